"""Adds up a rank's bytes, and says whether they fit and what to change if they do not. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from ...core import BufferLayout, DistributedDataParallelConfig, memory_use
from ..planned_layout import planned_layout
from .one_step import MeasuredStep, ModelPlan, device_of

Verdict = Literal["fits", "close", "does not"]

CLOSE_SHARE = 0.1
"""The part of a device that has to stay free for ``fits``: its context, the communicators' own memory, an allocator's
fragments and kernels' scratch take some, and are not counted here."""
MOST_RANKS = 4096
"""More ranks than this are not proposed."""
MOST_PLANNED = 2**20
"""More ranks than this are a slip of the keyboard: torch's groups have no room for 2**31."""


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes on rank 0 of ``dp_size``; with parameters that are stepped whole, on the fullest rank.

    Attributes:
        weight_bytes: of trainable parameters, and of what they change by where that is sent.
        frozen_bytes: of frozen parameters and the modules' buffers.
        grad_bytes: of gradients, between steps.
        main_param_bytes: of fp32 copies of 16-bit weights.
        state_bytes: of the optimizers' state.
        exchange_bytes: of what other ranks send while a backward runs, where ranks add it up themselves.
        activation_bytes: the most temporaries at once, with the batch: saved tensors, staging buffers, scratch of the
            optimizers.
        first_backward_bytes: of weights and gradients before the end of the first backward, and the most at its end,
            when they move into buffers.
        saved_bytes: the part of the temporaries that was alive at the end of the first forward.
        computes: whether the step was carried out, and not its shapes alone.
    """

    dp_size: int
    weight_bytes: int
    frozen_bytes: int
    grad_bytes: int
    main_param_bytes: int
    state_bytes: int
    exchange_bytes: int
    activation_bytes: int
    first_backward_bytes: tuple[int, int]
    saved_bytes: int
    computes: bool

    @property
    def fixed_bytes(self) -> int:
        """All that is there between steps, too."""
        return self.weight_bytes + self.frozen_bytes + self.grad_bytes + self.main_param_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        """The most at once, in any step."""
        before, at_end = self.first_backward_bytes
        first = self.frozen_bytes + max(before + self.activation_bytes, at_end)
        return max(self.fixed_bytes + self.exchange_bytes + self.activation_bytes, first)

    def verdict(self, device_bytes: int) -> Verdict:
        """Returns whether it fits a device; ``close`` if it does by less than :data:`CLOSE_SHARE`."""
        free = device_bytes - self.total_bytes
        if free < 0:
            return "does not"
        return "fits" if free >= CLOSE_SHARE * device_bytes else "close"


def rank_memory(step: MeasuredStep) -> RankMemory:
    """Adds up what the layouts say and what was counted in a step."""
    return _of_layouts(step, [model.layout for model in step.models])


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that a user can change, and the bytes of a rank with it."""

    what: str
    total_bytes: int


def changes(step: MeasuredStep, device_bytes: int) -> list[Change]:
    """Lists what would take less memory, the least first: a line in the script, or more ranks.

    Args:
        step: measured; activations are taken to stay as they are.
        device_bytes: what there is on a device, which decides how many ranks are proposed.
    """
    now = rank_memory(step)
    smaller = []
    for what, options, in_16_bits in _OPTIONS:
        total_bytes = _bytes_with(step, step.dp_size, options, in_16_bits=in_16_bits)
        if total_bytes is not None and total_bytes < now.total_bytes:
            smaller.append(Change(what, total_bytes))
    smaller.sort(key=lambda change: change.total_bytes)
    size = step.dp_size * 2
    while size <= MOST_RANKS:
        total = _bytes_with(step, size, {})
        if total is not None and total <= (1 - CLOSE_SHARE) * device_bytes:
            return [Change(f"{size:,} ranks", total), *smaller]
        size *= 2
    return smaller


_OPTIONS: Sequence[tuple[str, dict[str, object], bool]] = (
    ("use_distributed_optimizer=True", {"use_distributed_optimizer": True}, False),
    ('grad_buffer="pooled"', {"grad_buffer": "pooled"}, False),
    ("bf16 weights", {}, True),
    ('bf16 weights, grad_buffer="pooled"', {"grad_buffer": "pooled"}, True),
    ("offload_optimizer_states=True", {"offload_optimizer_states": True}, False),
    ("grad_reduce_in_fp32=False", {"grad_reduce_in_fp32": False}, False),
    ("num_distributed_optimizer_instances=1", {"num_distributed_optimizer_instances": 1}, False),
)


def _bytes_with(
    step: MeasuredStep, dp_size: int, options: dict[str, object], *, in_16_bits: bool = False
) -> int | None:
    """The bytes on so many ranks with these options; None where they contradict others, or the number of ranks."""
    layouts = []
    for model in step.models:
        try:
            config = dataclasses.replace(model.config, **options)  # type: ignore[arg-type]
            layouts.append(_laid_out(model.layout, config, dp_size, in_16_bits=in_16_bits))
        except ValueError:
            return None
    return _of_layouts(step, layouts).total_bytes


def _of_layouts(step: MeasuredStep, layouts: Sequence[BufferLayout]) -> RankMemory:
    parts = [_states(model, layout) for model, layout in zip(step.models, layouts, strict=True)]
    return RankMemory(
        step.dp_size,
        **{name: sum(part[name] for part in parts) for name in _STATES},
        first_backward_bytes=(
            2 * sum(spec.numel * spec.dtype.itemsize for layout in layouts for spec in layout.params),
            sum(memory_use(layout, 0, 0).first_backward_bytes for layout in layouts),
        ),
        activation_bytes=step.input_bytes + max(step.backward_peak_bytes, step.step_peak_bytes),
        saved_bytes=step.saved_bytes,
        computes=step.computes,
    )


_STATES = ("weight_bytes", "frozen_bytes", "grad_bytes", "main_param_bytes", "state_bytes", "exchange_bytes")


def _laid_out(
    layout: BufferLayout, config: DistributedDataParallelConfig, dp_size: int, *, in_16_bits: bool
) -> BufferLayout:
    specs = list(layout.params)
    for number, spec in enumerate(specs):
        dtype = torch.bfloat16 if in_16_bits and spec.dtype == torch.float32 else spec.dtype
        is_short = dtype in (torch.bfloat16, torch.float16)
        grad_dtype = torch.float32 if is_short and config.grad_reduce_in_fp32 else dtype
        specs[number] = dataclasses.replace(spec, dtype=dtype, grad_dtype=grad_dtype)
    return planned_layout(specs, config, dp_size)


def _states(model: ModelPlan, layout: BufferLayout) -> dict[str, int]:
    """The engine's own bytes for a model, laid out so, on the fullest rank that owns whole parameters."""
    loads = dict.fromkeys(range(layout.num_shards), 0)
    owners = {index: rank for index, rank in model.rank_of.items() if rank < layout.num_shards}
    for index, rank in owners.items():
        loads[rank] += layout.params[index].numel
    fullest = max(loads, key=lambda rank: loads[rank])
    use = memory_use(layout, fullest, model.num_kept, owners, device_of(layout), groups=model.groups)
    main_param_bytes = memory_use(layout, fullest, 0, owners, device_of(layout), groups=model.groups).state_bytes
    return {
        "weight_bytes": use.param_bytes,
        "frozen_bytes": model.frozen_bytes + model.buffer_bytes,
        "grad_bytes": use.grad_bytes,
        "main_param_bytes": main_param_bytes,
        "state_bytes": use.state_bytes - main_param_bytes + model.other_state_bytes,
        "exchange_bytes": use.received_bytes,
    }


def parse_ranks(text: str) -> list[int]:
    """Reads ``1,8,64``. Raises ValueError for other text, and for more than :data:`MOST_PLANNED` ranks."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MOST_PLANNED for part in parts):
        raise ValueError(
            f"{text!r}: expected numbers of ranks up to {MOST_PLANNED:,} with commas between them, such as 1,8,64"
        )
    return sorted({int(part) for part in parts})


_UNITS = {"GiB": 2**30, "MiB": 2**20, "TiB": 2**40, "GB": 10**9, "MB": 10**6, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """Reads ``80GiB``, in bytes. Raises ValueError for other text."""
    for unit, factor in _UNITS.items():
        if text.strip().endswith(unit):
            try:
                nbytes = float(text.strip().removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 < nbytes < float("inf"):
                return int(nbytes)
    raise ValueError(f"{text!r}: expected a size with a unit ({', '.join(_UNITS)}), such as 80GiB")
