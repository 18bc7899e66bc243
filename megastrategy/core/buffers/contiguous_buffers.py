"""Persistent contiguous buffers, in which gradients accumulate until they are reduced.

[Note: what is not zeroed]
A gradient that is to begin from zero could be added to zeros, which takes a pass that writes them and one that reads
them again. Autograd hands the first gradient over instead (``.grad`` is None until then), and it is copied into its
view. That takes a call from Python for each parameter, so smaller ones are zeroed, all at once, and added to. A view
whose gradient does not come is zeroed when its bucket is sealed.

[Note: what is held until its bucket is sealed]
A gradient that may be a sum over tensor ranks (tensor_parallel's [Note: gradients of replicated parameters])
accumulates in autograd's own tensor, which ``.grad`` is, from zero on. Where the view has something already, as after a
reduction whose result was not dropped, torch adds to the view as to all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MainGradError
from ..module import LocalParts
from ..wire import round_in_place
from .grad_buffers import GradBuffers, check_unchanged, copy_grad_, referred_to_elsewhere, slice_view
from .main_grads import has_main_grad, pop_added_flag, remove_main_grad, set_main_grad
from .reduced_grad import ReducedGrad

FILLED_NUMEL = 2**14
"""A gradient of so many elements is copied into its view: two passes over 64 kB take as long as a call from Python."""


class ContiguousGradBuffers(GradBuffers):
    """Persistent buffers, one for each (dtype, grad dtype): 1-D, ``layout.buffers[i].numel`` elements, on
    ``device``."""

    has_main_grads = True

    def __init__(self, dp_rank: int, device: torch.device, parts: LocalParts) -> None:
        super().__init__(dp_rank, device, parts)
        self.flats: list[Tensor] = []
        self._rounded: dict[int, Tensor] = {}  # by bucket, what is sent of it: its memory in another dtype
        self._copied_on_first_grad: set[int] = (
            set()
        )  # parameters whose first gradient is copied; see [Note: what is not zeroed]
        self._main_grad_pending: set[int] = set()  # parameters with a main_grad whose .grad is None, for this backward
        self._may_be_partial_sum: set[int] = set()  # parameters; see [Note: what is held until its bucket is sealed]
        self._partial_sum_in_grad: set[int] = (
            set()
        )  # of them, those whose gradient is .grad, so that their view has none of it
        self._sealed: set[int] = set()  # buckets that are on the wire
        self._uninitialised: set[int] = set()  # parameters whose view has no meaning until a gradient is copied into it
        self._addresses: list[int] = []  # of views when they were made: Module.to re-points one in place

    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        layout = self.layout
        for buffer in layout.buffers[len(self.flats) :]:
            self.flats.append(torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=self._device))
        for index, grad in enumerate(grads, first):
            if has_main_grad(self.params[index]):
                # Another tensor than the view, whose references tell whether somebody has kept .grad.
                self.main_grads[index] = self._slice(index)
                set_main_grad(self.params[index], self.main_grads[index])
            else:
                if layout.params[index].numel >= FILLED_NUMEL:
                    self._copied_on_first_grad.add(index)
                if self.local_parts.may_be_sum(self.params[index]):
                    self._may_be_partial_sum.add(index)
            self.views[index] = self._view(index)
            self._addresses.append(self._get_view(index).data_ptr())
            if grad is not None:  # from before the model was wrapped: kept, as torch DDP keeps it
                copy_grad_(self._get_view(index), grad)
                self.params[index].grad, self.has_grad[index] = self.views[index], True

    def update_swapped_params(self) -> list[int]:
        swapped = super().update_swapped_params()
        for index in swapped:
            # A DTensor's own address says nothing: its gradient may have been given other memory, too.
            if self.local_parts.local_view(self._get_view(index)).data_ptr() != self._slice(index).data_ptr():
                self._restore_view(index)
        return swapped

    def _restore_view(self, index: int) -> None:
        """A view that was given other memory is in the buffer again, with its content where that is the gradient."""
        self.check_param(index)
        param, moved = self.params[index], self._get_view(index)
        self.views[index] = self._view(index)
        if param.grad is moved:
            self._slice(index).copy_(self.local_parts.local_view(moved).detach())
            param.grad = self.views[index]

    def _restore_moved_views(self) -> None:
        """Looks for views that were given other memory by user code, as ``Module.half`` and ``share_memory`` do."""
        found = map(Tensor.data_ptr, map(self._get_view, range(len(self.views))))
        for index in [i for i, (here, place) in enumerate(zip(found, self._addresses, strict=True)) if here != place]:
            self._restore_view(index)

    def bucket(self, bucket: int) -> Tensor:
        """The bucket's gradients: 1-D view, ``bucket.numel`` elements of the gradient dtype."""
        place = self.layout.buckets[bucket]
        return self.flats[place.buffer][place.start : place.end]

    def reduced(self, bucket: int, start: int, end: int) -> Tensor:
        if self._sums[bucket] is None:
            return self.flats[self.layout.buckets[bucket].buffer][start:end]
        return super().reduced(bucket, start, end)

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
        self._main_grad_pending = set(self.main_grads)

    def clear(self, params: Iterable[int]) -> None:
        params = list(params)
        super().clear(params)
        if self.main_grads:
            for index in self.main_grads.keys() & params:
                pop_added_flag(self.params[index])

    def finish_main_grads(self) -> None:
        for index in self._main_grad_pending:
            if self.has_grad[index] and self.params[index].grad is None:
                self.params[index].grad = self.views[index]
        self._main_grad_pending = set()

    def check_late_main_grad(self, param: int) -> None:
        if param in self.main_grads and pop_added_flag(self.params[param]):
            raise self._main_grad_error(
                param,
                "after its bucket had been sent (a layer used by two re-entrant checkpoints): use "
                "checkpoint(use_reentrant=False)",
            )

    def open(self) -> None:
        # A bias may come before the kernel has run, so that no layer has told of itself yet.
        if self.main_grads and not self._main_grad_pending:
            raise self._main_grad_error(
                min(self.main_grads),
                "or will, in a backward that starts from no output of the model's forward: compute the loss from what "
                "the wrapped model returned",
            )
        for index in self._main_grad_pending:
            if self.params[index].grad is not None:
                self.adopt_grad(index)
        self._open()

    def _open(self) -> None:
        self._restore_moved_views()
        grads = self._notice_drops(range(len(self.params)))
        self._release_replaced_grads(grads)
        for bucket in self.layout.buckets:
            # Outside this rank's shard a reduced bucket has other ranks' leftovers, which must not be averaged in
            # again.
            if self._sharded and self._reduced[bucket.index]:
                self.reopen(bucket.index)
            else:
                self._zero_stale(bucket.index)
        self._keep_partial_sums_in_grad(grads)
        specs, parts, unfilled, elsewhere = self.layout.params, self._parts, self._uninitialised, self._not_in_view()
        for index, (param, view, grad) in enumerate(zip(self.params, self.views, grads, strict=True)):
            if grad is view:  # nearly always
                continue
            if (grad is None and index in unfilled) or index in elsewhere:  # autograd hands its gradient over
                continue
            assert view is not None
            check_unchanged(parts[index], specs[index])
            if grad is None:
                if self.has_grad[index]:
                    self._zero_param(index)  # the user set .grad = None, which means zero
                    self.has_grad[index] = False
            elif isinstance(grad, ReducedGrad):  # what was reduced stays, and autograd may have come before this call
                if (pending := grad.take_pending()) is not None:
                    view.add_(pending)
            else:
                # The user's tensor takes the place of what was summed: in torch .grad is all that there is.
                self._zero_sums(index)
                copy_grad_(view, grad)
                self.has_grad[index] = True
                self._uninitialised.discard(index)
            param.grad = view

    def _not_in_view(self) -> set[int]:
        """The parameters whose ``.grad`` is not their view in this backward: it is autograd's own, or the bucket is on
        the wire, of a stage whose backwards are over."""
        return self._main_grad_pending.union(
            self._partial_sum_in_grad, *(self.layout.buckets[number].params for number in self._sealed)
        )

    def drop_unfinished(self) -> None:
        self._sealed.clear()
        super().drop_unfinished()

    def _keep_partial_sums_in_grad(self, grads: Sequence[Tensor | None]) -> None:
        """Leaves gradients that may be sums over tensor ranks where autograd puts them, if nothing is in their view."""
        for index in self._may_be_partial_sum:
            if index in self._partial_sum_in_grad or not (self.has_grad[index] or grads[index] is self.views[index]):
                self._partial_sum_in_grad.add(index)
                self.has_grad[index] = grads[index] is not None  # the user may have set .grad

    def reopen(self, bucket: int) -> None:
        """Turns a reduce-scattered bucket into one that can be accumulated into and reduced again.

        Afterwards a second reduction (mean over ranks) gives the first result plus the mean of what is added: the
        shard is multiplied by the number of shards, the rest, which other ranks own, is zeroed. (Of d ranks, d /
        num_shards hold the same shard, and the mean divides by d.) This takes no memory, and is what torch DDP
        computes by averaging an average. Sums that lie apart stay, to be added to.
        """
        place = self.layout.buckets[bucket]
        flat = self.flats[place.buffer]
        shard_start, shard_end = self._shards[bucket]
        if any(self.has_grad[i] and not self._stale[i] for i in place.params):  # else nothing to keep
            if self._sums[bucket] is not None:
                self.bucket(bucket).zero_()
            else:
                flat[place.start : shard_start].zero_()
                flat[shard_end : place.end].zero_()
                flat[shard_start:shard_end].mul_(self.layout.num_shards)
        else:
            for index in place.params:
                self._stale[index] = True
        self._zero_stale(bucket)
        self._reduced[bucket] = False

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        if self._sharded:
            self.reopen(bucket)
        for index in self.layout.buckets[bucket].params:
            self.params[index].grad = self.views[index]  # sealing takes None for a drop, and would zero the sums
        for index, grad in grads.items():
            self._get_view(index).add_(grad)

    def adopt_grad(self, param: int) -> None:
        self.check_param(param)
        view = self._get_view(param)
        grad = self.params[param].grad
        assert grad is not None
        if param in self._partial_sum_in_grad:
            return
        if param in self._main_grad_pending:
            self.params[param].grad = None
            if not pop_added_flag(self.params[param]):
                view.add_(grad)
            return
        copy_grad_(view, grad)
        self._uninitialised.discard(param)
        self.params[param].grad = view

    def seal(self, bucket: int) -> None:
        params, views, addresses, has_grad = self.params, self.views, self._addresses, self.has_grad
        stand_in = self._stand_in if self._sharded else None
        if self._partial_sum_in_grad:
            self._bring_in_partial_sums(bucket)
        for index in self.layout.buckets[bucket].params:
            param, view = params[index], views[index]
            grad = param.grad
            if grad is None and index in self._main_grad_pending and has_grad[index]:
                grad = view
            if grad is None:  # dropped in this backward: the view still holds it, and would send it
                del view  # which would count for somebody's
                self.release_kept_grads([index])
                self._zero_param(index)
                has_grad[index] = False
            elif grad is not view or grad.data_ptr() != addresses[index]:
                # replaced by the user, or re-pointed with the module (Module.to replaces .grad.data)
                self.check_param(index)
                del view
                self.release_kept_grads([index])
                self.views[index] = self._view(index)
                self._zero_sums(index)
                copy_grad_(self._get_view(index), grad)
                has_grad[index] = True
            param.grad = stand_in(index) if stand_in is not None and has_grad[index] else None
        self._sealed.add(bucket)
        if self._main_grad_pending:
            self._main_grad_pending.difference_update(self.layout.buckets[bucket].params)
        buffer = self.layout.buffers[self.layout.buckets[bucket].buffer]
        if buffer.grad_wire_dtype != buffer.grad_dtype:  # nobody reads the bucket again before it is zeroed
            self._rounded[bucket] = round_in_place(self.bucket(bucket), buffer.grad_wire_dtype)

    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        return self._rounded.get(bucket, self.bucket(bucket)), self._sums[bucket]

    def publish(self, bucket: int) -> None:
        self._reduced[bucket] = True
        self._sealed.discard(bucket)
        params = self.layout.buckets[bucket].params
        if self._sharded:
            self._show_reduced(params)
        else:
            for index in params:
                self.params[index].grad = self.views[index] if self.has_grad[index] else None

    def _take_written(self, param: int, grad: Tensor) -> None:
        copy_grad_(self._get_view(param), grad)
        if (sums := self._owned_sums(param)) is not None:  # what is stepped, where there are such
            start, end = self.layout.owned_range(param, self._dp_rank) or (0, 0)
            sums.copy_(self.flats[self.layout.slots[param].buffer][start:end])

    def drop_unused_grads(self) -> None:
        if not all(self.has_grad):
            for index, param in enumerate(self.params):
                if not self.has_grad[index] and param.grad is self.views[index]:  # zeros would decay momentum
                    param.grad = None

    def close_and_return_memory(self) -> list[Tensor]:
        flats = self.flats
        # Somebody may have kept one in the backward that the move ends, and would see other things in it.
        for index in referred_to_elsewhere(self.views):
            self._detach_view(index)
        self.close()
        return flats

    def close(self, *, keeps_grads: bool = False) -> None:
        super().close(keeps_grads=keeps_grads)
        for index, place in self.main_grads.items():
            remove_main_grad(self.params[index], place)
        self.main_grads, self._main_grad_pending, self._partial_sum_in_grad = {}, set(), set()
        self.views, self.flats, self._rounded = [None] * len(self.params), [], {}

    def _release_replaced_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Leaves gradients that somebody took out of ``.grad`` without clearing them to those who keep them."""
        has_grad, views = self.has_grad, self.views
        elsewhere = self._not_in_view()
        replaced = [i for i, grad in enumerate(grads) if has_grad[i] and grad is not views[i] and i not in elsewhere]
        self.release_kept_grads([i for i in replaced if not isinstance(grads[i], ReducedGrad)])

    def _bring_in_partial_sums(self, bucket: int) -> None:
        """Brings the bucket's gradients that are sums over tensor ranks to their views, when they are added up."""
        held = [index for index in self.layout.buckets[bucket].params if index in self._partial_sum_in_grad]
        grads = self.local_parts.local_grads([self.params[index] for index in held])
        for index, grad in zip(held, grads, strict=True):
            if grad is not None:  # else its view is zeroed as any other's
                self.check_param(index)
                copy_grad_(self.local_parts.local_view(self._get_view(index)), grad)
                self._uninitialised.discard(index)
                self.params[index].grad = self.views[index]
        self._partial_sum_in_grad.difference_update(held)

    def _view(self, index: int) -> Tensor:
        return self.local_parts.as_grad(self.params[index], self._slice(index))

    def _slice(self, index: int) -> Tensor:
        spec, slot = self.layout.params[index], self.layout.slots[index]
        return slice_view(self.flats[slot.buffer], slot.start, spec.shape, spec.stride, spec.numel)

    def _main_grad_error(self, index: int, when: str) -> MainGradError:
        name = self.layout.params[index].name
        return MainGradError(f"parameter {name!r}: its layer added a gradient to main_grad {when}")

    def _get_view(self, index: int) -> Tensor:
        view = self.views[index]
        assert view is not None
        return view

    def _between(self, bucket: int, params: Sequence[int]) -> list[Tensor]:
        """The bucket without these parameters of it: what is sent with them, if it were only zeros."""
        place = self.layout.buckets[bucket]
        flat, start, parts = self.flats[place.buffer], place.start, list[Tensor]()
        for index in params:  # by address, as a bucket's are
            slot = self.layout.slots[index]
            if start < slot.start:
                parts.append(flat[start : slot.start])
            start = slot.end
        return [*parts, flat[start : place.end]]

    def _zero_param(self, param: int) -> None:
        self._get_view(param).zero_()
        self._uninitialised.discard(param)
        self._zero_sums(param)

    def _zero_bucket(self, bucket: int) -> None:
        super()._zero_bucket(bucket)
        filled = [index for index in self.layout.buckets[bucket].params if index in self._copied_on_first_grad]
        torch._foreach_zero_(self._between(bucket, filled))
        self._uninitialised.update(filled)
