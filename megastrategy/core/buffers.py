"""Contiguous storage for gradients and parameters. The only file that assigns ``param.data``, and with the other kinds
of gradient buffers (flattened, pooled) the only one that assigns ``param.grad``.

[Note: views with a storage of their own]
A parameter (or gradient) in a flat buffer is made from a *slice of the buffer's storage*, not from a view of the
buffer: same memory, but its storage spans exactly its own bytes. So ``torch.save``, ``safetensors``, ``deepcopy`` and
pickling see tensors that share nothing, and write one parameter where a plain view would write the whole buffer.

[Note: life of a gradient view]
``clear`` (zero_grad) only marks a view dirty and sets ``.grad = None``. ``open`` (start of a backward) zeroes what is
dirty, a whole bucket at once where it can, and sets ``.grad`` to the views, so that autograd adds in place. ``seal``
takes ``.grad`` away while the bucket is on the wire: a gradient that arrives late then lands in a tensor of its own,
not in memory that a collective is reading. ``publish`` says what the reduction left behind: with all-reduce the views
come back, with reduce-scatter ``.grad`` stays None, since only this rank's shard of the buffer means anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from .errors import ParameterChangedError
from .layout import BufferLayout, ParamSpec
from .nonfinite import NonFinite, find_in_bucket


def slice_view(flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int], numel: int) -> Tensor:
    """Elements ``[start, start + numel)`` of ``flat`` (1-D, offset 0) as a tensor of ``shape``; see [Note: views with
    a storage of their own]."""
    if numel == 0:
        return flat.new_empty(shape)
    itemsize = flat.element_size()
    storage = flat.untyped_storage()[start * itemsize : (start + numel) * itemsize]
    return flat.new_empty(0).set_(storage, 0, tuple(shape), tuple(stride))


def copy_grad_(target: Tensor, grad: Tensor) -> None:
    """``target`` (dense, of the parameter's shape) becomes the gradient, which may be sparse."""
    target.copy_(grad.to_dense() if grad.layout != torch.strided else grad)


class GradBuffers(ABC):
    """Where gradients accumulate, and the tensors that the reducer sends.

    Attributes:
        params: the model's trainable parameters, in the layout's order (owned by the model).
        views: what ``param.grad`` is while gradients accumulate here; None where ``.grad`` is autograd's own.
        has_grad: whether a parameter received a gradient since it was last cleared (after a synchronised backward: on
            any rank).
        num_updates: how often a parameter's gradient was completed, so that an optimizer steps each once.
        reduces_every_backward: whether nothing can accumulate on a rank beyond one backward.
        max_in_flight: how many pieces may be on their way at once; None where each has memory of its own.
    """

    reduces_every_backward = False
    max_in_flight: int | None = None

    def __init__(self) -> None:
        self.params: list[Parameter] = []
        self.views: list[Tensor | None] = []
        self.has_grad: list[bool] = []
        self.num_updates: list[int] = []
        self._dp_rank = 0
        self._reduced: list[bool] = []  # the bucket holds a result, outside this rank's shard rubbish
        self._stale: list[bool] = []  # by parameter, to be zeroed before the next gradient is added

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Takes in the parameters that ``layout`` has beyond those known so far, with the gradients they have."""
        first = len(self.params)
        self.layout = layout
        self.params += params[first:]
        self.views += [None] * (len(params) - first)
        self.has_grad += [False] * (len(params) - first)
        self.num_updates += [0] * (len(params) - first)
        self._stale += [False] * (len(params) - first)
        grads = [param.grad for param in params[first:]]
        for param, spec in zip(params[first:], layout.params[first:], strict=True):
            param.grad = None
            # autograd then accumulates a 16-bit parameter's gradient in fp32; a no-op where the two dtypes are one
            param.grad_dtype = spec.grad_dtype
        self._place(first, grads)

    @abstractmethod
    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        """Makes room for the parameters from ``first`` on, whose gradients so far are ``grads``."""

    @abstractmethod
    def open(self, first: int | None = None) -> None:
        """Makes every gradient ready to be accumulated into. ``first``: the parameter whose gradient came before this
        call."""

    @abstractmethod
    def adopt(self, param: int) -> None:
        """Takes in a gradient that autograd or the user put somewhere other than the view."""

    @abstractmethod
    def seal(self, bucket: int) -> None:
        """Ends accumulation in a bucket."""

    def num_pieces(self, bucket: int) -> int:
        """In how many reductions a sealed bucket goes."""
        return 1

    @abstractmethod
    def stage(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        """What to reduce of a sealed bucket, 1-D and owned by this object, and what the result is to be added to where
        that is not this rank's part of it. Pieces are staged in order, each once.
        """

    def find_nonfinite(self, bucket: int, dp_rank: int) -> list[NonFinite]:
        """This rank's gradients in a sealed bucket, before it is staged, that are not finite."""
        return find_in_bucket(self.stage(bucket, 0)[0], bucket, self.layout, dp_rank)

    @abstractmethod
    def publish(self, bucket: int) -> None:
        """The reduction of a sealed bucket is complete; ``has_grad`` holds what the ranks agreed on."""

    def is_sharded(self, param: int) -> bool:
        """Whether only this rank's shard of the gradient means anything: after a reduce-scatter, until the next
        backward."""
        return False

    def reduced(self, bucket: int, start: int, end: int) -> Tensor:
        """Elements ``[start, end)`` of the bucket's buffer, in this rank's shard, after a reduction: a 1-D view."""
        raise NotImplementedError("parameters are sharded only where gradients are scattered")

    def take_over(self, other: GradBuffers, shards: Mapping[int, Tensor]) -> None:
        """Takes the place of ``other``, of another layout, in which gradients were reduced and scattered; ``shards``,
        by parameter: this rank's parts here."""
        self.has_grad[:], self._stale[:], self.num_updates[:] = other.has_grad, other._stale, other.num_updates
        self._reduced[:] = [True] * len(self._reduced)
        for index, shard in shards.items():
            start, end = self.layout.owned_range(index, self._dp_rank) or (0, 0)
            self.reduced(self.layout.slots[index].bucket, start, end).copy_(shard)

    def keep_views(self, other: GradBuffers) -> None:
        """Takes the place of ``other``, of another layout, with the very tensors that ``.grad`` was there: whoever
        kept one goes on seeing the gradient."""
        for index, (view, kept) in enumerate(zip(self.views, other.views, strict=True)):
            if view is not None and kept is not None:
                kept.data = view
                self.views[index] = kept
                if self.params[index].grad is view:
                    self.params[index].grad = kept

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """Adds local gradients, by parameter, to a bucket that is reduced already; it must then be sealed and reduced
        again."""
        raise NotImplementedError("what is launched after backward meets no late gradient")

    def take(self, param: int) -> Tensor:
        """Hands over the gradient that arrived while the bucket was sealed; ``.grad`` is None again."""
        grad = self.params[param].grad
        assert grad is not None
        self.params[param].grad = None
        return grad

    def adopt_written(self, params: Iterable[int]) -> None:  # noqa: B027 - nothing to do where .grad is the truth
        """Takes in what the user wrote into ``.grad`` after a reduce-scatter, where it was None."""

    def detach_unused(self) -> None:  # noqa: B027 - nothing to do where .grad is autograd's own
        """After a backward without synchronisation: ``.grad`` is None where no gradient arrived, as in torch."""

    def use_up(self, params: Iterable[int]) -> None:  # noqa: B027 - nothing to do where .grad is there to be cleared
        """An optimizer stepped with these gradients. With reduce-scatter the next backward starts from zero: ``.grad``
        is None by then, so zeroing through the raw module or by hand could not be noticed.
        """

    def clear(self, params: Iterable[int]) -> None:
        """Drops the gradients of these parameters: ``.grad`` is None, accumulation starts from zero."""
        for index in params:
            self.params[index].grad = None
            self.has_grad[index] = False
            self._stale[index] = True

    def drop_unfinished(self) -> None:
        """A backward broke off, or its sums are no good: every gradient is dropped, and nothing is sealed."""
        self.clear(range(len(self.params)))

    def zero(self, params: Iterable[int]) -> None:
        """Sets the gradients that exist to zero, and keeps them."""
        for index in params:
            view, grad = self.views[index], self.params[index].grad
            if self.has_grad[index] and view is not None:
                view.zero_()
            if grad is not None and grad is not view:
                grad.zero_()
            if self.has_grad[index]:
                self._zero_sums(index)
                self._stale[index] = False  # a gradient of zeros is one: optimizers step with it

    def _zero_sums(self, param: int) -> None:  # noqa: B027 - nothing to do where there are none apart
        """This rank's part of what was reduced, where that has memory of its own, becomes zero."""

    def _zero_param(self, param: int) -> None:
        """All that is accumulated of a parameter on this rank becomes zero."""
        self._zero_sums(param)

    def _zero_bucket(self, bucket: int) -> None:
        """The same for a bucket, in one."""
        for index in self.layout.buckets[bucket].params:
            self._zero_param(index)

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
        check_unchanged(self.params[param], self.layout.params[param])

    def close(self) -> None:
        """Leaves ``.grad`` None and the parameters' gradient dtype as torch has it by default."""
        for param in self.params:
            param.grad = None
            param.grad_dtype = param.dtype


class ContiguousGradBuffers(GradBuffers):
    """Persistent buffers, one for each (dtype, grad dtype): 1-D, ``layout.buffers[i].numel`` elements, on
    ``device``."""

    def __init__(self, layout: BufferLayout, params: Sequence[Parameter], dp_rank: int, device: torch.device) -> None:
        super().__init__()
        self._dp_rank, self._device = dp_rank, device
        self._sharded = layout.num_shards > 1
        self.flats: list[Tensor] = []
        self._shards: list[tuple[int, int]] = []
        self._sums: list[Tensor | None] = []
        self._addresses: list[int] = []
        self.extend(layout, params)

    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        layout = self.layout
        for buffer in layout.buffers[len(self.flats) :]:
            self.flats.append(torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=self._device))
        for bucket in layout.buckets[len(self._shards) :]:
            self._shards.append(layout.shard_range(bucket, self._dp_rank))
            self._reduced.append(False)
            buffer, apart = layout.buffers[bucket.buffer], None
            if buffer.sums_apart:
                apart = torch.zeros(bucket.numel // layout.num_shards, dtype=buffer.sum_dtype, device=self._device)
            self._sums.append(apart)
        for index, grad in enumerate(grads, first):
            self.views[index] = self._view(index)
            self._addresses.append(self._get_view(index).data_ptr())
            if grad is not None:
                copy_grad_(self._get_view(index), grad)
                self.params[index].grad, self.has_grad[index] = self.views[index], True

    def bucket(self, bucket: int) -> Tensor:
        """The bucket's gradients: 1-D view, ``bucket.numel`` elements of the gradient dtype."""
        place = self.layout.buckets[bucket]
        return self.flats[place.buffer][place.start : place.end]

    def sums(self, bucket: int) -> Tensor | None:
        """What a reduction adds to, where that is not the bucket itself: this rank's shard, owned by this object."""
        return self._sums[bucket]

    def reduced(self, bucket: int, start: int, end: int) -> Tensor:
        sums = self._sums[bucket]
        if sums is None:
            return self.flats[self.layout.buckets[bucket].buffer][start:end]
        first = self._shards[bucket][0]
        return sums[start - first : end - first]

    def _owned_sums(self, param: int) -> Tensor | None:
        """This rank's part of a parameter's reduced gradient, if that has memory of its own."""
        bucket, owned = self.layout.slots[param].bucket, self.layout.owned_range(param, self._dp_rank)
        return None if self._sums[bucket] is None or owned is None else self.reduced(bucket, *owned)

    def is_sharded(self, param: int) -> bool:
        return self._sharded and self._reduced[self.layout.slots[param].bucket]

    def use_up(self, params: Iterable[int]) -> None:
        if self._sharded:
            self._mark_stale(params)

    def open(self, first: int | None = None) -> None:
        reopened = {b for b, reduced in enumerate(self._reduced) if reduced and self._sharded}
        for bucket in self.layout.buckets:
            if bucket.index in reopened:
                self.reopen(bucket.index)
            else:
                self._zero_stale(bucket.index)
        specs, slots = self.layout.params, self.layout.slots
        for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is view:
                continue
            assert view is not None
            check_unchanged(param, specs[index])
            if grad is None:
                if self.has_grad[index] and slots[index].bucket not in reopened:
                    self._zero_param(index)  # the user set .grad = None, which means zero
                    self.has_grad[index] = False
            elif index == first and slots[index].bucket in reopened:
                view.add_(grad)  # autograd found .grad None; what was reduced before stays
            else:
                self._zero_sums(index)
                copy_grad_(view, grad)
                self.has_grad[index] = True
            param.grad = view

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
        if any(self.has_grad[i] and not self._stale[i] for i in place.params):
            if self._sums[bucket] is not None:
                self.bucket(bucket).zero_()
            else:
                flat[place.start : shard_start].zero_()
                flat[shard_end : place.end].zero_()
                flat[shard_start:shard_end].mul_(self.layout.num_shards)
        else:
            self._mark_stale(place.params)
        self._zero_stale(bucket)
        self._reduced[bucket] = False

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        if self._sharded:
            self.reopen(bucket)
        for index in self.layout.buckets[bucket].params:
            self.params[index].grad = self.views[index]
        for index, grad in grads.items():
            self._get_view(index).add_(grad)

    def adopt(self, param: int) -> None:
        self.check_param(param)
        view = self._get_view(param)
        grad = self.params[param].grad
        assert grad is not None
        copy_grad_(view, grad)
        self.params[param].grad = view

    def seal(self, bucket: int) -> None:
        for index in self.layout.buckets[bucket].params:
            param, view = self.params[index], self._get_view(index)
            grad = param.grad
            if grad is None:
                self._zero_param(index)
                self.has_grad[index] = False
            elif grad is not view or view.data_ptr() != self._addresses[index]:
                # replaced by the user, or re-pointed with the module (Module.to replaces .grad.data)
                self.check_param(index)
                self.views[index] = self._view(index)
                self._zero_sums(index)
                copy_grad_(self._get_view(index), grad)
                self.has_grad[index] = True
            param.grad = None

    def stage(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        return self.bucket(bucket), self._sums[bucket]

    def publish(self, bucket: int) -> None:
        self._reduced[bucket] = True
        for index in self.layout.buckets[bucket].params:
            self.num_updates[index] += 1
            if not self._sharded:
                self.params[index].grad = self.views[index] if self.has_grad[index] else None

    def adopt_written(self, params: Iterable[int]) -> None:
        for index in params:
            param = self.params[index]
            if param.grad is not None and self._sharded:
                self.check_param(index)
                copy_grad_(self._get_view(index), param.grad)
                if (sums := self._owned_sums(index)) is not None:
                    start, end = self.layout.owned_range(index, self._dp_rank) or (0, 0)
                    sums.copy_(self.flats[self.layout.slots[index].buffer][start:end])
                self.has_grad[index], self._stale[index] = True, False
                self.num_updates[index] += 1
                param.grad = None

    def detach_unused(self) -> None:
        if not all(self.has_grad):
            for index, param in enumerate(self.params):
                if not self.has_grad[index] and param.grad is self.views[index]:
                    param.grad = None

    def close(self) -> None:
        super().close()
        self.views, self.flats = [None] * len(self.params), []
        self._sums = [None] * len(self._sums)

    def _view(self, index: int) -> Tensor:
        spec, slot = self.layout.params[index], self.layout.slots[index]
        return slice_view(self.flats[slot.buffer], slot.start, spec.shape, spec.stride, spec.numel)

    def _get_view(self, index: int) -> Tensor:
        view = self.views[index]
        assert view is not None
        return view

    def _zero_param(self, param: int) -> None:
        self._get_view(param).zero_()
        self._zero_sums(param)

    def _zero_sums(self, param: int) -> None:
        if (sums := self._owned_sums(param)) is not None:
            sums.zero_()

    def _mark_stale(self, params: Iterable[int]) -> None:
        for index in params:
            self._stale[index] = True

    def _zero_bucket(self, bucket: int) -> None:
        self.bucket(bucket).zero_()
        if (sums := self._sums[bucket]) is not None:
            sums.zero_()


class ParamBuffers:
    """Contiguous parameters, so that a bucket of updated shards can be gathered in place.

    The parameters' memory moves into ``flats`` (1-D, same layout as the gradients) when this is made; their values,
    shapes and strides stay. ``restore`` gives them memory of their own again, and leaves those alone that were moved
    out of here from outside (``module.double()``).
    """

    def __init__(self, layout: BufferLayout, params: Sequence[Parameter], device: torch.device) -> None:
        self._device = device
        self.params: list[Parameter] = []
        self.flats: list[Tensor] = []
        self._addresses: list[int] = []
        self.extend(layout, params)

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Moves in the parameters that ``layout`` has beyond those known so far."""
        first = len(self.params)
        self.layout = layout
        self.params += params[first:]
        for buffer in layout.buffers[len(self.flats) :]:
            self.flats.append(torch.zeros(buffer.numel, dtype=buffer.dtype, device=self._device))
        for index, param in enumerate(params[first:], first):
            self._move_in(index, param.detach())
            self._addresses.append(param.data_ptr())

    def bucket(self, bucket: int) -> Tensor:
        """The bucket's parameters: 1-D view, ``bucket.numel`` elements of the parameter dtype."""
        place = self.layout.buckets[bucket]
        return self.flats[place.buffer][place.start : place.end]

    def recapture(self) -> None:
        """Brings back parameters that were re-pointed from outside (``p.data = x``), with the values they have now.

        Raises:
            ParameterChangedError: if one of them has another dtype, shape or device than when the model was wrapped.
        """
        for index, param in enumerate(self.params):
            if param.data_ptr() != self._addresses[index] and param.numel() > 0:
                check_unchanged(param, self.layout.params[index])
                self._move_in(index, param.detach())

    def restore(self) -> None:
        """Gives every parameter that lies here memory of its own, with the present values and strides."""
        spans = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in self.flats]
        for param in self.params:
            if any(start <= param.data_ptr() < end for start, end in spans):
                param.data = param.detach().clone(memory_format=torch.preserve_format)
        self.flats = []

    def _move_in(self, index: int, value: Tensor) -> None:
        spec, slot = self.layout.params[index], self.layout.slots[index]
        view = slice_view(self.flats[slot.buffer], slot.start, spec.shape, spec.stride, spec.numel)
        view.copy_(value)
        self.params[index].data = view


def check_unchanged(param: Parameter, spec: ParamSpec) -> None:
    """Raises ParameterChangedError if dtype or shape differ from what the buffers were laid out for."""
    if param.dtype != spec.dtype or param.shape != spec.shape:
        raise ParameterChangedError(
            f"parameter {spec.name!r} was {spec.dtype} of shape {spec.shape} when the model was wrapped and is now "
            f"{param.dtype} of shape {tuple(param.shape)}. Change dtypes and shapes before wrapping, or wrap the "
            "model again"
        )
