"""The tensors that the user's optimizer steps: permanent, and the keys of its state.

A run joins the neighbouring shards of one parameter group in a bucket, so that an optimizer steps a few tensors for a
model of thousands of parameters. The padding between two parameters is stepped along: weight, gradient and state are
zero there. A parameter without a gradient in a step that its neighbours take leaves its run for good: its state, such
as a step counter, has a different history from then on.

A parameter that needs a whole step (Muon) is a run of its own on its owner, or on every rank, in the parameter's shape.
So is a 16-bit parameter that is not sharded, on every rank.

[Note: main params]
A run of 16-bit weights has an fp32 main param: the optimizer steps that, and the weights get its rounding. Before a
step, elements of the weights that are not the rounding of their main param were changed by other code
(``load_state_dict``, averaging, ``p.data = x``), and the main param takes their value.

[Note: offloaded state]
With ``offload_optimizer_states`` on an accelerator, every run has its main param in host memory, and so has the
optimizer's state, which follows the tensors that are stepped. A step copies the reduced gradients to the host, runs
there on all cores, and copies the new weights back. That is ZeRO-Offload, and FSDP2's CPUOffloadPolicy with a step on
the host: no state crosses the link. Weights of 32 bits have a main param of their own dtype then.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..data_path import Bucket, Memory
from ..layout import EVERY_RANK, BufferLayout, Part, block_numel, neighbours

Values = dict[str, Any]
"""The state of one tensor, by name."""


@dataclasses.dataclass(eq=False)
class Run:
    """One tensor of the optimizer.

    Attributes:
        bucket, group: the numbers of its bucket and its parameter group.
        members: the parameters in it, by address.
        main: the tensor in the optimizer's group: the weights themselves, or their fp32 main params.
        weights: the weights whose fp32 copy ``main`` is; None if ``main`` is the weights.
        grad: the reduced gradient, of the shape of ``main``; None for a whole parameter, whose parts other ranks have,
            and for gradients that are autograd's own.
        host_grad: host memory for a copy of it; None unless ``main`` is on the host of an accelerator.
        is_whole: whether it is one parameter in its shape.
    """

    bucket: int
    group: int
    members: list[Part]
    main: Tensor
    weights: Tensor | None
    grad: Tensor | None
    is_whole: bool = False
    host_grad: Tensor | None = None

    @property
    def start(self) -> int:
        """The address of its first element."""
        return self.members[0].start

    @property
    def end(self) -> int:
        """The address behind its last element."""
        return self.members[-1].end

    @property
    def has_main_param(self) -> bool:
        """Whether it has an fp32 main param of 16-bit weights."""
        return self.weights is not None and self.weights.dtype != self.main.dtype

    @property
    def copies_grad(self) -> bool:
        """Whether the gradient is copied for a step, since its dtype or its device differs."""
        return self.grad is not None and (self.host_grad is not None or self.grad.dtype != self.main.dtype)

    def grad_memory(self) -> Tensor:
        """Returns the gradient of ``main``, or memory for it."""
        if self.host_grad is not None:
            return self.host_grad
        return torch.empty_like(self.main) if self.grad is None or self.copies_grad else self.grad

    def is_elementwise(self, value: Any) -> bool:
        """Whether a value of the state has an element for each of ``main``."""
        return isinstance(value, Tensor) and value.shape == self.main.shape

    def read(self, value: Tensor, member: Part) -> Tensor:
        """Returns the member's elements of an element-wise value, 1-D."""
        return flat(value)[member.start - self.start : member.end - self.start]

    def split(self, parts: Sequence[Sequence[Part]], state: Any) -> list[Run]:
        """Divides the run and its state into runs of these members."""
        values = state.pop(self.main, None)
        runs = []
        for members in parts:
            span = slice(members[0].start - self.start, members[-1].end - self.start)
            run = Run(
                bucket=self.bucket,
                group=self.group,
                members=list(members),
                main=self.main[span],
                weights=None if self.weights is None else self.weights[span],
                grad=None if self.grad is None else self.grad[span],
                host_grad=None if self.host_grad is None else self.host_grad[span],
            )
            if values is not None:
                state[run.main] = {
                    name: value[span] if self.is_elementwise(value) else copy.deepcopy(value)
                    for name, value in values.items()
                }
            runs.append(run)
        return runs


def make_runs(
    memory: Memory,
    buckets: Sequence[Bucket],
    rank: int,
    groups: Mapping[int, int],
    owners: Mapping[int, int],
    joined: Collection[int],
) -> list[Run]:
    """Returns the runs of this rank, bucket by bucket.

    Args:
        groups: by parameter, the number of its group; others have no run.
        owners: by parameter that is stepped whole, its owner, or that every rank steps it.
        joined: the groups in which neighbours may be one tensor, and a parameter two.
    """
    weights = memory.weights
    assert weights is not None, "sharded"
    layout = memory.layout
    offloads = layout.offloads_state and not devices.is_on_host(memory.device)
    max_numel = block_numel(layout, memory.device)
    runs = []
    for bucket in buckets:
        plan = bucket.plan
        flat_weights = weights.flats[plan.buffer]
        first = layout.shard_range(plan, rank)[0]
        for group, members in neighbours(layout, plan, rank, groups, owners, max_numel, joined):
            start = members[0].start
            end = members[-1].end
            grad = bucket.shard[start - first : end - first]
            runs.append(Run(plan.index, group, members, flat_weights[start:end], None, grad))
        for param in plan.params:
            if owners.get(param) in (EVERY_RANK, plan.domain.shard_of(rank)) and param in groups:
                spec = layout.params[param]
                slot = layout.slots[param]
                main = flat_weights[slot.start : slot.end].as_strided(spec.shape, spec.stride)
                member = Part(param, slot.start, slot.end)
                runs.append(Run(plan.index, groups[param], [member], main, None, None, is_whole=True))
    add_main_params(runs, layout, offloads=offloads)
    return runs


def make_unsharded_runs(
    memory: Memory, buckets: Sequence[Bucket], groups: Mapping[int, int], parts: Mapping[int, Tensor]
) -> list[Run]:
    """Returns a run for each parameter, where every rank steps all of them.

    ``parts``: the parameters themselves, or this rank's parts of them.
    """
    layout = memory.layout
    runs = []
    for bucket in buckets:
        for param in bucket.plan.params:
            if param in groups:
                slot = layout.slots[param]
                member = Part(param, slot.start, slot.end)
                grad = memory.grad_views[param] if memory.keeps_grads else None
                main = parts[param].data  # with a version counter of its own
                runs.append(Run(bucket.plan.index, groups[param], [member], main, None, grad, is_whole=True))
    add_main_params(runs, layout)
    return runs


def add_main_params(runs: Sequence[Run], layout: BufferLayout, *, offloads: bool = False) -> None:
    """Gives runs of 16-bit weights an fp32 main param: one allocation for each dtype of weights.

    ``offloads``: all runs get one, in pinned host memory, and memory for their gradients there.
    """

    def main_dtype(run: Run) -> torch.dtype:
        return torch.float32 if layout.params[run.members[0].param].has_main_param else run.main.dtype

    with_main = [run for run in runs if offloads or main_dtype(run) != run.main.dtype]
    for dtype in dict.fromkeys(run.main.dtype for run in with_main):
        of_dtype = [run for run in with_main if run.main.dtype == dtype]
        sizes = [run.main.numel() for run in of_dtype]
        device = of_dtype[0].main.device
        if offloads:
            mains, grads = (devices.pinned_memory(sum(sizes), main_dtype(of_dtype[0]), device) for _ in range(2))
        else:
            mains = grads = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        for run, main in zip(of_dtype, mains.split(sizes), strict=True):
            place = run.main.shape, run.main.stride(), main.storage_offset()
            run.weights = run.main
            run.main = mains.as_strided(*place)
            run.main.copy_(run.weights)
            run.host_grad = grads.as_strided(*place) if offloads else None


class MainParams:
    """The main params of one dtype of weights, compared and rounded in one call; see [Note: main params]."""

    def __init__(self, runs: Sequence[Run]) -> None:
        base = runs[0].main._base
        assert base is not None, "views of one allocation"
        self._mains = base
        self._weights = [flat(run.weights) for run in runs if run.weights is not None]
        self._pieces = [flat(run.main) for run in runs]
        offsets = [(piece.storage_offset(), piece.numel()) for piece in self._pieces]
        self._spans = [slice(start, start + numel) for start, numel in offsets]
        self._dtype = self._weights[0].dtype

    def take_outside_changes(self) -> None:
        """Takes the weights' values where these are not the rounding of the main params."""
        current = torch.empty_like(self._mains, dtype=self._dtype)
        torch._foreach_copy_([current[span] for span in self._spans], self._weights)
        changed = self._mains.to(self._dtype) != current
        torch.where(changed, current, self._mains, out=self._mains)

    def round(self) -> None:
        """Sets the weights to the rounding of the main params."""
        torch._foreach_copy_(self._weights, self._pieces)


def main_params_of(runs: Sequence[Run]) -> list[MainParams]:
    """Returns the main params of these runs, one object for each allocation."""
    by_base: dict[int, list[Run]] = {}
    for run in runs:
        if run.weights is not None:
            by_base.setdefault(id(run.main._base), []).append(run)
    return [MainParams(of_base) for of_base in by_base.values()]


def flat(dense: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in the order of its memory, as a view."""
    return dense if dense.dim() == 1 and dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))


def group_members(members: Sequence[Part], key: Callable[[Part], Any]) -> list[list[Part]]:
    """Divides members into neighbours with equal keys."""
    return [list(of_key) for _, of_key in itertools.groupby(members, key)]
