"""Persistent contiguous buffers, in which gradients accumulate until they are reduced.

[Note: first gradients are copied, not added to zeros]
A gradient that has to begin from zero could be added to zeros, which takes one pass that writes them and one that reads
them again. Instead autograd makes its own tensor (``.grad`` is None until then), which is copied into the view. That
takes a call from Python for each parameter, so smaller views are zeroed, all at once, and added to. A view whose
gradient does not come is zeroed when its bucket is sealed.

[Note: partial sums over tensor ranks stay in .grad]
A gradient that may be a partial sum, to be added up over tensor ranks (tensor_parallel's [Note: gradients of replicated
parameters]), accumulates in autograd's own tensor, which is ``.grad``, if it begins from zero. Where the view already
has a gradient, as after a reduction whose result was not dropped, torch adds to the view as to all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MainGradError
from ..module import LocalParts
from ..wire import round_in_place
from .grad_buffers import GradBuffers, check_unchanged, copy_grad_, slice_view, stepped_in_backward
from .main_grads import has_main_grad, pop_added_flag, remove_main_grad, set_main_grad
from .reduced_grad import ReducedGrad, inside_backward

FILLED_NUMEL = 2**14
"""The first gradient of a view of this size is copied: two passes over 64 kB take as long as a call from Python."""


class ContiguousGradBuffers(GradBuffers):
    """Persistent buffers, one for each (dtype, grad dtype): 1-D, ``layout.buffers[i].numel`` elements, on
    ``device``."""

    has_main_grads = True

    def __init__(self, dp_rank: int, device: torch.device, parts: LocalParts) -> None:
        super().__init__(dp_rank, device, parts)
        self.flats: list[Tensor] = []
        self.main_grads: dict[int, Tensor] = {}
        self._main_grads_pending: set[int] = set()  # those of them whose .grad is None, in this backward
        # By parameter that may have partial sums over tensor ranks, whether .grad has it and the view has nothing.
        self._partial_sum_in_grad: dict[int, bool] = {}
        self._sealed: dict[int, Tensor] = {}  # by bucket that is on the wire, the tensor that is sent
        self._uninitialised: set[int] = set()  # parameters whose view is invalid until a gradient is copied into it
        self._addresses: list[int] = []  # of views when they were made: Module.to re-points one in place

    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        for buffer in self.layout.buffers[len(self.flats) :]:
            self.flats.append(torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=self._device))
        for index, grad in enumerate(grads, first):
            param = self.params[index]
            if has_main_grad(param):
                self.main_grads[index] = self._slice(index)
                set_main_grad(param, self.main_grads[index])
            elif self.local_parts.may_be_sum(param):
                self._partial_sum_in_grad[index] = False
            view = self.views[index] = self._view(index)
            self._addresses.append(view.data_ptr())
            if grad is not None:  # from before the model was wrapped: kept, as torch DDP keeps it
                copy_grad_(view, grad)
                param.grad, self.has_grad[index] = view, True

    def update_swapped_params(self) -> list[int]:
        swapped = super().update_swapped_params()
        for index in swapped:
            # A DTensor's own address is no evidence: its gradient may have been given other memory, too.
            if self.local_parts.local_view(self._get_view(index)).data_ptr() != self._slice(index).data_ptr():
                self._restore_view(index)
        return swapped

    def _restore_view(self, index: int) -> None:
        """Replaces a view that was given other memory by one of the buffer, with its values if it is ``.grad``."""
        self._check_param(index)
        param, moved = self.params[index], self._get_view(index)
        self.views[index] = self._view(index)
        if param.grad is moved:
            self._slice(index).copy_(self.local_parts.local_view(moved).detach())
            param.grad = self.views[index]

    def _restore_moved_views(self) -> None:
        """Finds views that user code has given other memory, as ``Module.half`` and ``share_memory`` do."""
        found = map(Tensor.data_ptr, map(self._get_view, range(len(self.views))))
        for index in [i for i, (here, place) in enumerate(zip(found, self._addresses, strict=True)) if here != place]:
            self._restore_view(index)

    def bucket(self, bucket: int) -> Tensor:
        """Returns the bucket's gradients: 1-D view, ``bucket.numel`` elements of the gradient dtype."""
        place = self.layout.buckets[bucket]
        return self.flats[place.buffer][place.start : place.end]

    def reduced(self, bucket: int, start: int, end: int) -> Tensor:
        if self._buckets[bucket].sums is None:
            return self.flats[self.layout.buckets[bucket].buffer][start:end]
        return super().reduced(bucket, start, end)

    # --- layers that add to main_grad --------------------------------------------------------------------------------

    def start_main_grads(self) -> None:
        if not self.main_grads:
            return
        self.finish_main_grads()  # of a backward that reached no parameter, and raised
        for index in self.main_grads:
            if pop_added_flag(self.params[index]):
                raise self._main_grad_error(
                    index,
                    "before the backward of any output of the model's forward, or in one that then raised: compute the "
                    "loss from what the wrapped model returned, and call zero_grad() after an error",
                )
        self._open()
        for index in self.main_grads:
            self.params[index].grad = None
        self._main_grads_pending = set(self.main_grads)

    def finish_main_grads(self) -> None:
        for index in self._main_grads_pending:
            if self.has_grad[index] and self.params[index].grad is None:
                self.params[index].grad = self.views[index]
        self._main_grads_pending = set()

    def check_late_main_grad(self, param: int) -> None:
        if param in self.main_grads and pop_added_flag(self.params[param]):
            raise self._main_grad_error(
                param,
                "after its bucket had been sent (a layer used by two re-entrant checkpoints): use "
                "checkpoint(use_reentrant=False)",
            )

    def _main_grad_error(self, index: int, when: str) -> MainGradError:
        name = self.layout.params[index].name
        return MainGradError(f"parameter {name!r}: its layer added a gradient to main_grad {when}")

    def clear(self, params: Iterable[int]) -> None:
        params = list(params)
        super().clear(params)
        if self.main_grads:
            for index in self.main_grads.keys() & params:
                pop_added_flag(self.params[index])

    # --- one backward ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        # A bias may come before the kernel has run, so the flags do not show yet whether a layer adds.
        if self.main_grads and not self._main_grads_pending:
            raise self._main_grad_error(
                min(self.main_grads),
                "or will, in a backward that starts from no output of the model's forward: compute the loss from what "
                "the wrapped model returned",
            )
        for index in self._main_grads_pending:
            if self.params[index].grad is not None:
                self.adopt_grad(index)
        self._open()

    def _open(self) -> None:
        self._restore_moved_views()
        grads = self._notice_drops(range(len(self.params)))
        for bucket in self.layout.buckets:
            # Outside of this rank's shard a reduced bucket has leftovers, which must not be averaged in again.
            if self._buckets[bucket.index].is_reduced and self._changes_if_reduced_again(bucket.index):
                self._reopen(bucket.index)
            else:
                self._zero_stale(bucket.index)
        self._keep_partial_sums_in_grad(grads)
        specs, parts = self.layout.params, self._parts
        uninitialised, not_in_view = self._uninitialised, self._not_in_view()
        for index, (param, view, grad) in enumerate(zip(self.params, self.views, grads, strict=True)):
            if grad is view:  # nearly always
                continue
            if (grad is None and index in uninitialised) or index in not_in_view:  # autograd makes its own tensor
                continue
            assert view is not None
            check_unchanged(parts[index], specs[index])
            if grad is None:
                if self.has_grad[index]:
                    self._zero_param(index)  # the user set .grad = None, which means zero
                    self.has_grad[index] = False
            elif isinstance(grad, ReducedGrad):  # the reduced gradient stays; autograd may have added before this call
                if (pending := grad.take_pending()) is not None:
                    view.add_(pending)
            else:
                # The user's tensor replaces the sums: in torch .grad is the only gradient.
                self._zero_sums(index)
                copy_grad_(view, grad)
                self.has_grad[index] = True
                self._uninitialised.discard(index)
            param.grad = view

    def _not_in_view(self) -> set[int]:
        """Returns the parameters whose ``.grad`` is not their view in this backward: it is autograd's own, or the
        bucket is on the wire, of a pipeline stage whose backwards are over."""
        in_grad = (index for index, is_in_grad in self._partial_sum_in_grad.items() if is_in_grad)
        sealed = (self.layout.buckets[bucket].params for bucket in self._sealed)
        return self._main_grads_pending.union(in_grad, *sealed)

    def _keep_partial_sums_in_grad(self, grads: Sequence[Tensor | None]) -> None:
        """See [Note: partial sums over tensor ranks stay in .grad]."""
        for index, is_in_grad in self._partial_sum_in_grad.items():
            if is_in_grad or not (self.has_grad[index] or grads[index] is self.views[index]):
                self._partial_sum_in_grad[index] = True
                self.has_grad[index] = grads[index] is not None  # the user may have set .grad

    def _reopen(self, bucket: int) -> None:
        """Makes a reduce-scattered bucket ready for accumulation and another reduction. Its result (mean over
        ranks) is then the first one plus the mean of the additions: the shard is multiplied by the number of
        shards, the rest, which other ranks own, is zeroed. (Of d ranks, d / num_shards have the same shard, and the
        mean divides by d.) This takes no memory, and is what torch DDP computes by averaging an average. Separate
        sums stay, to be added to."""
        place, state = self.layout.buckets[bucket], self._buckets[bucket]
        flat = self.flats[place.buffer]
        shard_start, shard_end = state.shard
        if any(self.has_grad[i] and not self._stale[i] for i in place.params):  # otherwise nothing is kept
            if state.sums is not None:
                self.bucket(bucket).zero_()
            else:
                flat[place.start : shard_start].zero_()
                flat[shard_end : place.end].zero_()
                flat[shard_start:shard_end].mul_(place.domain.repeat_factor)
        else:
            for index in place.params:
                self._stale[index] = True
        self._zero_stale(bucket)
        state.is_reduced = False

    def _changes_if_reduced_again(self, bucket: int) -> bool:
        return self._sharded or self.layout.buckets[bucket].domain.repeat_factor != 1.0

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        if self._changes_if_reduced_again(bucket):
            self._reopen(bucket)
        for index in self.layout.buckets[bucket].params:
            self.params[index].grad = self.views[index]  # seal() takes None for a drop, and would zero the sums
        for index, grad in grads.items():
            self._get_view(index).add_(grad)

    def adopt_grad(self, param: int) -> None:
        self._check_param(param)
        view = self._get_view(param)
        grad = self.params[param].grad
        assert grad is not None
        if self._partial_sum_in_grad.get(param):
            return
        if param in self._main_grads_pending:
            self.params[param].grad = None
            if not pop_added_flag(self.params[param]):
                view.add_(grad)
            return
        copy_grad_(view, grad)
        self._uninitialised.discard(param)
        self.params[param].grad = view

    def seal(self, bucket: int) -> None:
        params, views, addresses, has_grad = self.params, self.views, self._addresses, self.has_grad
        place = self.layout.buckets[bucket]
        stand_in = self._stand_in if self._sharded else None
        self._sum_over_tensor_ranks(bucket)
        for index in place.params:
            param, view = params[index], views[index]
            grad = param.grad
            if grad is None and index in self._main_grads_pending and has_grad[index]:
                grad = view
            if grad is None:  # dropped since: the view still has it, and would send it
                if has_grad[index] and inside_backward():
                    raise stepped_in_backward(self.layout.params[index].name)
                self._zero_param(index)
                has_grad[index] = False
            elif grad is not view or grad.data_ptr() != addresses[index]:
                # Replaced by the user, or re-pointed with the module (Module.to replaces .grad.data).
                self._check_param(index)
                self.views[index] = self._view(index)
                self._zero_sums(index)
                copy_grad_(self._get_view(index), grad)
                has_grad[index] = True
            param.grad = stand_in(index) if stand_in is not None and has_grad[index] else None
        if self._main_grads_pending:
            self._main_grads_pending.difference_update(place.params)
        buffer, sent = self.layout.buffers[place.buffer], self.bucket(bucket)
        if buffer.grad_wire_dtype != buffer.grad_dtype:  # in its memory, which is not read again before it is zeroed
            sent = round_in_place(sent, buffer.grad_wire_dtype)
        self._sealed[bucket] = sent

    def _sum_over_tensor_ranks(self, bucket: int) -> None:
        """Adds up the bucket's gradients that are partial sums, and copies them to their views. Collective over tensor
        ranks if there are any."""
        in_grad = [index for index in self.layout.buckets[bucket].params if self._partial_sum_in_grad.get(index)]
        grads = self.local_parts.local_grads([self.params[index] for index in in_grad]) if in_grad else []
        for index, grad in zip(in_grad, grads, strict=True):
            self._partial_sum_in_grad[index] = False
            if grad is not None:  # otherwise its view is zeroed as any other's
                self._check_param(index)
                copy_grad_(self.local_parts.local_view(self._get_view(index)), grad)
                self._uninitialised.discard(index)
                self.params[index].grad = self.views[index]

    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        return self._sealed[bucket], self._buckets[bucket].sums

    def publish(self, bucket: int) -> None:
        self._buckets[bucket].is_reduced = True
        self._sealed.pop(bucket, None)
        params = self.layout.buckets[bucket].params
        if self._sharded:
            self._show_reduced(params)
        else:
            for index in params:
                self.params[index].grad = self.views[index] if self.has_grad[index] else None

    def drop_unfinished(self) -> None:
        self._sealed.clear()
        super().drop_unfinished()

    def drop_unused_grads(self) -> None:
        if not all(self.has_grad):
            for index, param in enumerate(self.params):
                if not self.has_grad[index] and param.grad is self.views[index]:  # zeros would decay momentum
                    param.grad = None

    # --- between backwards -------------------------------------------------------------------------------------------

    def _take_written(self, param: int, grad: Tensor) -> None:
        copy_grad_(self._get_view(param), grad)
        if (sums := self._owned_sums(param)) is not None:  # the optimizer steps with these
            start, end = self.layout.owned_range(param, self._dp_rank) or (0, 0)
            sums.copy_(self.flats[self.layout.slots[param].buffer][start:end])

    def close_and_return_memory(self) -> list[Tensor]:
        flats = self.flats
        self.close()
        return flats

    def close(self, *, keeps_grads: bool = False) -> None:
        super().close(keeps_grads=keeps_grads)
        for index, place in self.main_grads.items():
            remove_main_grad(self.params[index], place)
        self.main_grads, self._main_grads_pending, self._partial_sum_in_grad = {}, set(), {}
        self.views, self.flats, self._sealed = [None] * len(self.params), [], {}

    # --- memory ------------------------------------------------------------------------------------------------------

    def _view(self, index: int) -> Tensor:
        return self.local_parts.as_grad(self.params[index], self._slice(index))

    def _slice(self, index: int) -> Tensor:
        spec, slot = self.layout.params[index], self.layout.slots[index]
        return slice_view(self.flats[slot.buffer], slot.start, spec.shape, spec.stride, spec.numel)

    def _get_view(self, index: int) -> Tensor:
        view = self.views[index]
        assert view is not None
        return view

    def _zero_param(self, param: int) -> None:
        self._get_view(param).zero_()
        self._uninitialised.discard(param)
        super()._zero_param(param)

    def _zero_bucket(self, bucket: int) -> None:
        super()._zero_bucket(bucket)
        place, slots = self.layout.buckets[bucket], self.layout.slots
        flat, start, zeroed = self.flats[place.buffer], place.start, list[Tensor]()
        for index in place.params:  # by address
            slot = slots[index]
            # See [Note: first gradients are copied, not added to zeros].
            if slot.end - slot.start >= FILLED_NUMEL and index not in self.main_grads:
                self._uninitialised.add(index)
                if start < slot.start:
                    zeroed.append(flat[start : slot.start])
                start = slot.end
        torch._foreach_zero_([*zeroed, flat[start : place.end]])
