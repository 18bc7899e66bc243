"""Holds gradients while they accumulate, and shows them as ``param.grad``. With the kinds of gradient buffers
(contiguous, flattened, pooled) the only file that assigns it.

[Note: views with a storage of their own]
A parameter (or gradient) in a flat buffer is made from a *slice of the buffer's storage*, not from a view of the
buffer: same memory, but its storage spans exactly its own bytes. So ``torch.save``, ``safetensors``, ``deepcopy`` and
pickling see tensors that share nothing, and write one parameter where a plain view would write the whole buffer.

[Note: life of a gradient view]
``clear`` (zero_grad) only marks a view dirty and sets ``.grad = None``. ``open`` (start of a backward) zeroes what is
dirty and small, and sets ``.grad`` to the views, so that autograd adds in place; what is dirty and large takes the
first gradient by a copy (contiguous_buffers' [Note: what is not zeroed]). ``seal`` takes ``.grad`` away while the
bucket is on the wire: a gradient that arrives late then lands in a tensor of its own, not in memory that a collective
is reading. ``publish`` says what the reduction left behind: with all-reduce the views come back, with reduce-scatter
``.grad`` is a stand-in that refuses to be read (:mod:`.reduced_grad`), since only this rank's shard of the buffer means
anything. A stand-in that is missing later was dropped by the user, and so is the gradient.
Where a layer adds to the buffer itself, ``start_main_grads`` opens before any gradient comes, ``.grad`` is None until
the bucket is sealed, and ``finish_main_grads`` shows what was not (main_grads' [Note: gradients that autograd does not
add]).

[Note: what somebody keeps]
``kept = param.grad; optimizer.zero_grad()`` leaves the gradient in ``kept`` under torch DDP, and the next backward
makes another. Here the next one would come into the same memory, and be ``kept`` in silence. Python's count of
references tells whether anybody has the tensor: then it gets memory of its own, and ``.grad`` is another from then on.
A view of it (``param.grad.detach()``) is another tensor of the buffer's memory, and is not seen.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ..errors import ParameterChangedError
from ..layout import BufferLayout, ParamSpec
from ..module import LocalParts
from ..wire import read_wire
from .main_grads import has_main_grad, no_place_for_main_grad
from .nonfinite import FiniteCheck
from .reduced_grad import ReducedGrad, RepresentedGrad


def slice_view(flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int], numel: int) -> Tensor:
    """Elements ``[start, start + numel)`` of ``flat`` (1-D, offset 0) as a tensor of ``shape``; see [Note: views with
    a storage of their own]."""
    if numel == 0:
        return flat.new_empty(shape)
    return flat.new_empty(0).set_(slice_storage(flat, start, numel), 0, tuple(shape), tuple(stride))


def slice_storage(flat: Tensor, start: int, numel: int) -> UntypedStorage:
    """A storage of its own over the same memory, of elements ``[start, start + numel)`` of ``flat``."""
    itemsize = flat.element_size()
    storage: UntypedStorage = flat.untyped_storage()[start * itemsize : (start + numel) * itemsize]
    return storage


def copy_grad_(target: Tensor, grad: Tensor) -> None:
    """``target`` (dense, of the parameter's shape) becomes the gradient, which may be sparse."""
    target.copy_(grad.to_dense() if grad.layout != torch.strided else grad)


def referred_to_elsewhere(tensors: Iterable[Tensor | None]) -> list[int]:
    """The places of tensors that are referred to by more than one container each, the caller's."""
    owner = [object()]  # one that surely is not; how many references are usual is no promise of Python's
    known = [*tensors, *owner]
    *counts, usual = map(sys.getrefcount, known)
    return [place for place, count in enumerate(counts) if count > usual and known[place] is not None]


class GradBuffers(ABC):
    """Holds gradients while they accumulate, and makes the tensors that the reducer sends.

    Attributes:
        local_parts: where this rank has parameters and gradients.
        params: the model's trainable parameters, in the layout's order (owned by the model).
        views: what ``param.grad`` is while gradients accumulate here; None where ``.grad`` is autograd's own.
        has_grad: whether a parameter received a gradient since it was last cleared (after a synchronised backward: on
            any rank).
        zeroed: parameters whose gradients :meth:`zero` was called for; whoever wants to know empties it.
        reduces_every_backward: whether nothing can accumulate on a rank beyond one backward.
        has_main_grads: whether a layer may add gradients itself where they accumulate.
        max_in_flight: how many pieces may be on their way at once; None where each has memory of its own.
        all_reduce_option: how whoever set the engine up asks it for whole gradients, for an error to say.
        main_grads: by parameter, where its layer may add the gradient itself; see main_grads' [Note: gradients that
            autograd does not add].
    """

    reduces_every_backward = False
    has_main_grads = False
    max_in_flight: int | None = None
    all_reduce_option = "use_distributed_optimizer=False"

    def __init__(self, dp_rank: int, device: torch.device, parts: LocalParts) -> None:
        self.local_parts = parts
        self._dp_rank, self._device = dp_rank, device
        self.params: list[Parameter] = []
        self._parts: list[Tensor] = []  # of the parameters, by parameter; these themselves where they are whole
        self.views: list[Tensor | None] = []
        self.has_grad: list[bool] = []
        self.zeroed: set[int] = set()
        self.main_grads: dict[int, Tensor] = {}
        self._stand_ins: list[ReducedGrad | None] = []  # made when they are first needed
        self._sharded = False
        self._shards: list[tuple[int, int]] = []  # by bucket, this rank's part of its buffer
        self._sums: list[Tensor | None] = []  # by bucket, what was reduced of that part, if it has memory of its own
        self._reduced: list[bool] = []  # the bucket holds a result, outside this rank's shard rubbish
        self._stale: list[bool] = []  # by parameter, to be zeroed before the next gradient is added

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Takes in the parameters that ``layout`` has beyond those known so far, with the gradients they have."""
        first = len(self.params)
        self.layout, self._sharded = layout, layout.num_shards > 1
        self.params += params[first:]
        self._parts += map(self.local_parts.local_view, params[first:])
        self.views += [None] * (len(params) - first)
        self.has_grad += [False] * (len(params) - first)
        self._stand_ins += [None] * (len(params) - first)
        self._stale += [False] * (len(params) - first)
        if not self.has_main_grads:
            for param, spec in zip(params[first:], layout.params[first:], strict=True):
                if has_main_grad(param):
                    raise no_place_for_main_grad(spec.name)
        # A stand-in is that of a wrapper that was collected, and the gradient with it.
        grads = [None if isinstance(param.grad, ReducedGrad) else param.grad for param in params[first:]]
        for param, spec in zip(params[first:], layout.params[first:], strict=True):
            param.grad = None  # first: torch takes no other dtype while a gradient is there
            # autograd then accumulates a 16-bit parameter's gradient in fp32; a no-op where the two dtypes are one
            param.grad_dtype = spec.grad_dtype
        for bucket in layout.buckets[len(self._shards) :]:
            self._shards.append(layout.shard_range(bucket, self._dp_rank))
            self._reduced.append(False)
            buffer, sums = layout.buffers[bucket.buffer], None
            if buffer.has_separate_sums:  # they outlive the bucket, which accumulates anew
                sums = torch.zeros(bucket.shard_numel, dtype=buffer.sum_dtype, device=self._device)
            self._sums.append(sums)
        self._place(first, grads)

    def update_swapped_params(self) -> list[int]:
        """Returns the parameters inside of which torch has put another tensor, and takes these in.

        ``Module.to`` does so with DTensors, also where nothing is to be moved. What autograd knew of the parameter is
        lost then, its hooks among it.
        """
        if not self.local_parts.has_parts:
            return []
        swapped = [i for i, param in enumerate(self.params) if self.local_parts.local_view(param) is not self._parts[i]]
        for index in swapped:
            param = self.params[index]
            self._parts[index] = self.local_parts.local_view(param)
            grad, param.grad = param.grad, None
            param.grad_dtype = self.layout.params[index].grad_dtype
            param.grad = grad
        return swapped

    @abstractmethod
    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        """Makes room for the parameters from ``first`` on, whose gradients so far are ``grads``."""

    @abstractmethod
    def open(self) -> None:
        """Makes every gradient ready to be accumulated into; one may have come before this call."""

    def start_main_grads(self) -> None:  # noqa: B027 - only main_grads are added to before a parameter's hook has run
        """A backward begins: what layers add to themselves is ready before the first of them does."""

    def finish_main_grads(self) -> None:  # noqa: B027 - nothing to do where no layer adds
        """A backward has ended: ``.grad`` shows again what layers have added, in buckets that are not sealed."""

    def check_late_main_grad(self, param: int) -> None:  # noqa: B027 - autograd's own gradient lies elsewhere
        """Raises MainGradError if a late gradient was added to memory that is being sent."""

    @abstractmethod
    def adopt_grad(self, param: int) -> None:
        """Takes in a gradient that autograd or the user put somewhere other than the view."""

    @abstractmethod
    def seal(self, bucket: int) -> None:
        """Ends accumulation in a bucket."""

    def num_pieces(self, bucket: int) -> int:
        """The number of reductions that carry a sealed bucket."""
        return 1

    @abstractmethod
    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        """Returns what to reduce of a sealed bucket (1-D, owned by this object), and what the result is added to, if
        that is not this rank's part of the first. Pieces are staged in order, each once."""

    def find_nonfinite(self, bucket: int, check: FiniteCheck) -> None:
        """Lets the check look at this rank's gradients in a sealed bucket, before it is staged."""
        sent = read_wire(self.piece_to_reduce(bucket, 0)[0], self.layout.buckets[bucket].numel)
        check.check_bucket(sent, bucket, self.layout)

    @abstractmethod
    def publish(self, bucket: int) -> None:
        """The reduction of a sealed bucket is complete; ``has_grad`` holds what the ranks agreed on."""

    def is_sharded(self, param: int) -> bool:
        """Whether only this rank's shard of the gradient means anything (from reduce-scatter to next backward)."""
        return self._sharded and self._reduced[self.layout.slots[param].bucket]

    def reduced(self, bucket: int, start: int, end: int) -> Tensor:
        """Elements ``[start, end)`` of the bucket's buffer, in this rank's shard, after a reduction: a 1-D view."""
        sums = self._sums[bucket]
        assert sums is not None, "parameters are sharded only where gradients are scattered"
        first = self._shards[bucket][0]
        return sums[start - first : end - first]

    def _owned_sums(self, param: int) -> Tensor | None:
        """This rank's part of a parameter's reduced gradient, if that has memory of its own."""
        bucket, owned = self.layout.slots[param].bucket, self.layout.owned_range(param, self._dp_rank)
        return None if self._sums[bucket] is None or owned is None else self.reduced(bucket, *owned)

    def local_grads(self, params: Iterable[int]) -> list[Tensor]:
        """This rank's parts of the gradients that there are of these parameters, as they are stepped: views."""
        parts = list[Tensor]()
        for index in params:
            grad = self.params[index].grad
            if not self.has_grad[index]:
                continue
            if self.is_sharded(index):
                if (owned := self.layout.owned_range(index, self._dp_rank)) is not None:
                    parts.append(self.reduced(self.layout.slots[index].bucket, *owned))
            elif grad is not None:
                parts.append(self.local_parts.local_view(grad).detach())
        return parts

    def local_bucket_of(self, param: int) -> Tensor:
        """This rank's part of the reduced bucket of a parameter that lies there alone: 1-D, to be written. Where there
        is no gradient it is memory of no use, which other ranks with a copy add theirs to."""
        bucket = self.layout.buckets[self.layout.slots[param].bucket]
        if self.layout.num_shards > 1:
            return self.reduced(bucket.index, *self.layout.shard_range(bucket, self._dp_rank))
        grad = self.params[param].grad
        if grad is None:
            part = self.local_parts.local_view(self.params[param])
            return torch.zeros(part.numel(), dtype=self.layout.params[param].grad_dtype, device=part.device)
        part = self.local_parts.local_view(grad).detach()
        return part.as_strided((part.numel(),), (1,))

    def continue_from(self, other: GradBuffers, shards: Mapping[int, Tensor]) -> None:
        """Takes the place of ``other``, of another layout, in which gradients were reduced and scattered; ``shards``,
        by parameter: this rank's parts here."""
        self.has_grad[:], self._stale[:] = other.has_grad, other._stale
        self._reduced[:] = [True] * len(self._reduced)
        self._show_reduced(range(len(self.params)))
        for index, shard in shards.items():
            start, end = self.layout.owned_range(index, self._dp_rank) or (0, 0)
            self.reduced(self.layout.slots[index].bucket, start, end).copy_(shard)

    def keep_views_of(self, other: GradBuffers) -> None:
        """Takes the place of ``other``, of another layout, with the very tensors that ``.grad`` was there: whoever
        kept one goes on seeing the gradient."""
        for index, (view, kept) in enumerate(zip(self.views, other.views, strict=True)):
            if view is not None and kept is not None:
                self.local_parts.local_view(kept).data = self.local_parts.local_view(view)
                self.views[index] = kept
                if self.params[index].grad is view:
                    self.params[index].grad = kept

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """Adds local gradients, by parameter, to a bucket that is reduced already; it must then be sealed and reduced
        again."""
        raise NotImplementedError("what is launched after backward meets no late gradient")

    def late_grad(self, param: int) -> Tensor:
        """The gradient that arrived while the bucket was sealed."""
        grad = self.params[param].grad
        if isinstance(grad, ReducedGrad):
            grad = grad.pending
        assert grad is not None
        return grad

    def pop_late_grad(self, param: int) -> Tensor:
        """Hands over the :meth:`late_grad`; ``.grad`` is None again."""
        late = self.late_grad(param)
        if isinstance(grad := self.params[param].grad, ReducedGrad):
            grad.pending = None
        self.params[param].grad = None
        return late

    def holds_unreduced(self, param: int) -> bool:
        """Whether ``.grad`` has anything that this rank has not reduced, after a backward that was not prepared."""
        grad = self.params[param].grad
        return grad is not None and (not isinstance(grad, ReducedGrad) or grad.pending is not None)

    def adopt_written_grads(self, params: Iterable[int]) -> None:
        """Takes in what the user did to ``.grad`` after a reduce-scatter: a tensor written there, or None."""
        if not self._sharded:
            return
        params = list(params)
        stand_ins = self._stand_ins
        for index, grad in zip(params, self._notice_drops(params), strict=True):
            if not (grad is None or grad is stand_ins[index] or isinstance(grad, ReducedGrad)):
                self.check_param(index)
                self.release_kept_grads([index])
                self._take_written(index, grad)
                self.has_grad[index], self._stale[index] = True, False
                self.params[index].grad = self._stand_in(index)

    def _take_written(self, param: int, grad: Tensor) -> None:
        """The user's ``.grad`` takes the place of what was reduced of it. The parameter's other owners take their parts
        from their own: users write the same on all ranks."""
        raise NotImplementedError("parameters are sharded only where gradients are scattered")

    def cut_grads(self, params: Iterable[int]) -> None:
        """Makes every ``.grad`` cut as its parameter is. Collective over the tensor ranks where any is not."""
        if not self.local_parts.has_parts:
            return
        # What no backward has reduced is as autograd left it. Clipped or unscaled would be a copy of it, and not what
        # is stepped.
        grads = ((index, self.params[index].grad) for index in params)
        other = [i for i, g in grads if g is not None and not self.local_parts.is_cut_alike(self.params[i], g)]
        for index, part in zip(other, self.local_parts.local_grads([self.params[i] for i in other]), strict=True):
            assert part is not None, "it has one"
            self.params[index].grad = self.local_parts.as_grad(self.params[index], part)

    def drop_unused_grads(self) -> None:  # noqa: B027 - nothing to do where .grad is autograd's own
        """Ends a backward without synchronisation: ``.grad`` is None where no gradient arrived, as in torch."""

    def clear(self, params: Iterable[int]) -> None:
        """Drops the gradients of these parameters: ``.grad`` is None, accumulation starts from zero."""
        params = list(params)
        for index in params:
            self.params[index].grad = None
            self.has_grad[index] = False
            self._stale[index] = True
        self.release_kept_grads(params)

    def restore_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Makes ``.grad`` what it was, by parameter, where somebody else has dropped it since, and nothing else has
        happened."""
        for param, grad in zip(self.params, grads, strict=True):
            if param.grad is None:
                param.grad = grad

    def release_kept_grads(self, params: Sequence[int]) -> None:
        """Leaves dropped gradients, which are in no ``.grad`` any more, to those who keep them; see [Note: what
        somebody keeps]."""
        for place in referred_to_elsewhere(map(self.views.__getitem__, params)):
            self._detach_view(params[place])
        stand_ins = self._stand_ins
        for place in referred_to_elsewhere(map(stand_ins.__getitem__, params)):
            stand_ins[params[place]] = None
        for index in params:
            if (known := stand_ins[index]) is not None and known.represented.has_copies:
                stand_ins[index] = None

    def _detach_view(self, param: int) -> None:
        """Somebody keeps the view: it gets memory of its own, and the parameter another view."""
        kept = self.views[param]
        assert kept is not None, "it is kept"
        part = self.local_parts.local_view(kept)
        part.data = part.detach().clone()
        self.views[param] = self._view(param)

    def _view(self, param: int) -> Tensor:
        """A tensor for ``.grad`` in the buffer's memory."""
        raise NotImplementedError("gradients are where autograd puts them")

    def drop_unfinished(self) -> None:
        """A backward broke off, or its sums are no good: every gradient is dropped, and nothing is sealed."""
        self.clear(range(len(self.params)))

    def zero(self, params: Iterable[int]) -> None:
        """Sets the gradients that exist to zero, and keeps them."""
        for index in params:
            view, grad = self.views[index], self.params[index].grad
            if self.has_grad[index] and view is not None:  # behind a stand-in, too, it has the gradient
                view.zero_()
            if grad is not None and grad is not view and not isinstance(grad, ReducedGrad):
                grad.zero_()
            if self.has_grad[index]:
                self._zero_sums(index)
                self._stale[index] = False  # a gradient of zeros is one: optimizers step with it
            self.zeroed.add(index)

    def _show_reduced(self, params: Iterable[int]) -> None:
        """``.grad`` of scattered gradients is a stand-in where there is one, and None where there is none, as in torch;
        what somebody has written there since stays, to be adopted."""
        for index in params:
            param, has_grad = self.params[index], self.has_grad[index]
            if (param.grad is not None) != has_grad:
                param.grad = self._stand_in(index) if has_grad else None

    def _stand_in(self, param: int) -> ReducedGrad:
        known = self._stand_ins[param]
        if known is None:
            buffers = weakref.ref(self)  # the user's parameters hold it, and must not keep the buffers

            def zero(represented: RepresentedGrad) -> None:
                present = buffers()
                known = present._stand_ins[param] if present is not None else None
                # One that was dropped is nobody's gradient.
                if present is not None and known is not None and known.represented is represented:
                    present.zero([param])

            spec, whole = self.layout.params[param], self.params[param]
            if tuple(whole.shape) != spec.shape:  # torch takes a gradient of the parameter's shape alone
                spec = dataclasses.replace(spec, shape=tuple(whole.shape), stride=whole.stride())
            known = self._stand_ins[param] = ReducedGrad(
                spec, whole.device, RepresentedGrad(zero), self.all_reduce_option
            )
        elif known.pending is not None:  # of a backward that broke off
            known.pending = None
        return known

    def _notice_drops(self, params: Sequence[int]) -> list[Tensor | None]:
        """Scattered gradients whose stand-in the user has taken away (``zero_grad`` of the raw module, ``.grad =
        None``) are dropped: nobody steps with them, and the next backward starts from zero.

        Returns:
            their ``.grad``, since with thousands of parameters each look at it shows in a step's time.

        Raises:
            ReducedGradError: if a stand-in was put back after that, since the gradient is gone, or is another
                parameter's.
        """
        has_grad, stand_ins = self.has_grad, self._stand_ins
        grads = [self.params[index].grad for index in params]
        for index, grad in zip(params, grads, strict=True):
            if grad is None:
                # Where a gradient is whole, None says nothing: sealing and zero_grad leave it behind as well.
                if has_grad[index] and self.is_sharded(index):
                    has_grad[index], self._stale[index] = False, True
                    self.release_kept_grads([index])
                continue
            # Nearly always its own; moved with the module it is another object.
            if grad is not (known := stand_ins[index]) and isinstance(grad, ReducedGrad):
                grad.check_is_of(self.layout.params[index], None if known is None else known.represented)
            if not has_grad[index] and isinstance(grad, ReducedGrad):
                raise grad.error("putting back a .grad that was dropped")
        return grads

    def _zero_sums(self, param: int) -> None:
        """This rank's part of what was reduced, where that has memory of its own, becomes zero."""
        if (sums := self._owned_sums(param)) is not None:
            sums.zero_()

    def _zero_param(self, param: int) -> None:
        """All that is accumulated of a parameter on this rank becomes zero."""
        self._zero_sums(param)

    def _zero_bucket(self, bucket: int) -> None:
        """The same for a bucket, in one."""
        if (sums := self._sums[bucket]) is not None:
            sums.zero_()

    def _zero_stale(self, bucket: int) -> None:
        params = self.layout.buckets[bucket].params
        stale = [index for index in params if self._stale[index]]
        if len(stale) == len(params):
            self._zero_bucket(bucket)
        else:
            for index in stale:
                self._zero_param(index)
        for index in stale:
            self._stale[index] = self.has_grad[index] = False

    def check_param(self, param: int) -> None:
        """Raises ParameterChangedError if the parameter is no longer what its place was made for."""
        check_unchanged(self._parts[param], self.layout.params[param])

    def close_and_return_memory(self) -> list[Tensor]:
        """Closes, and hands over the memory in which gradients accumulated: 1-D, by buffer; none if there is none."""
        self.close()
        return []

    def close(self, *, keeps_grads: bool = False) -> None:
        """Leaves ``.grad`` None and the parameters' gradient dtype as torch has it by default.

        ``keeps_grads``: gradients in that dtype that are whole stay, as they do when torch DDP's wrapper is dropped.
        """
        self._sums = [None] * len(self._sums)
        for param in self.params:
            grad, param.grad = param.grad, None
            param.grad_dtype = param.dtype  # the Parameter lives on, and would accumulate in ours
            if keeps_grads and grad is not None and grad.dtype == param.dtype and not isinstance(grad, ReducedGrad):
                param.grad = grad


def check_unchanged(part: Tensor, spec: ParamSpec) -> None:
    """Raises ParameterChangedError if dtype or shape of a parameter's part differ from what the buffers were laid out
    for."""
    if part.dtype != spec.dtype or part.shape != spec.shape:
        raise ParameterChangedError(
            f"parameter {spec.name!r} was {spec.dtype} of shape {spec.shape} when the model was wrapped and is now "
            f"{part.dtype} of shape {tuple(part.shape)}. Change dtypes and shapes before wrapping, or wrap the "
            "model again"
        )
