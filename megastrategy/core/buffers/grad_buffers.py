"""Gradients while they accumulate, and the contents of ``param.grad``, which only the files of this folder assign.

[Note: why a view has a storage of its own]
A parameter (or gradient) in a flat buffer is made from a *slice of the buffer's storage*, not from a view of the
buffer: the same memory, but its storage covers exactly its own bytes. So ``torch.save``, ``safetensors``, ``deepcopy``
and pickling see tensors that share nothing, and write one parameter where a plain view would write the whole buffer.

[Note: life of a gradient view]
``clear`` (zero_grad) sets ``.grad = None`` and marks the view stale. ``open`` (start of a backward) zeroes small stale
views and sets ``.grad`` to the views, so that autograd adds in place; a large one gets its first gradient by a copy.
``seal`` removes ``.grad`` while the bucket is on the wire: a late gradient then is in a tensor of its own, not in
memory that a collective reads. ``publish`` shows the result: with all-reduce the views are ``.grad`` again, with
reduce-scatter ``.grad`` is a stand-in that refuses to be read (:mod:`.reduced_grad`), since only this rank's shard of
the buffer is valid. A missing stand-in means that the user dropped the gradient. Where a layer adds to the buffer
itself, ``start_main_grads`` opens before any gradient comes, ``.grad`` is None until the bucket is sealed, and
``finish_main_grads`` shows the gradients of buckets that were not (main_grads' [Note: layers that add to main_grad]).

The state of a gradient, by parameter (p) or bucket (b). A change of one row has to be checked against all others:

| container | contents | set by | cleared by |
|---|---|---|---|
| ``has_grad`` p | a gradient (once reduced: on any rank) | hooks, ranks' agreement, ``seal`` | ``clear``, drops |
| ``_stale`` p | zero it before the next addition | ``clear``, drops | ``_zero_stale``, ``zero``, user's ``.grad`` |
| ``views`` p | the accumulating tensor | ``extend`` | ``close`` |
| ``_stand_ins`` p | the parameter's stand-in | ``_stand_in`` | never |
| ``zeroed`` p | ``zero`` was called | ``zero`` | its reader |
| ``_buckets[b].is_reduced`` | it has a result | ``publish`` | ``_reopen`` |
| ``_buckets[b].sums`` | its reduced shard | reductions | ``_zero_bucket``, ``_zero_sums`` |
| ``_sealed`` b | what is to be sent | ``seal`` | ``publish``, ``drop_unfinished`` |
| ``_uninitialised`` p | the view is valid after a copy only | ``_zero_bucket`` | that copy, ``_zero_param`` |
| ``_partial_sum_in_grad`` p | ``.grad`` has it, not the view | ``open`` | ``seal`` |
| ``_main_grads_pending`` p | ``.grad`` is None, a layer adds | ``start_main_grads`` | ``seal``, ``finish_main_grads`` |
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ..errors import ParameterChangedError
from ..layout import BufferLayout, ParamSpec
from ..module import LocalParts
from .main_grads import has_main_grad, no_place_for_main_grad
from .nonfinite import FiniteCheck
from .reduced_grad import ReducedGrad, RepresentedGrad


def slice_view(flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int], numel: int) -> Tensor:
    """Returns elements ``[start, start + numel)`` of ``flat`` (1-D, offset 0) as a tensor of ``shape``; see [Note: why
    a view has a storage of its own]."""
    if numel == 0:
        return flat.new_empty(shape)
    return flat.new_empty(0).set_(slice_storage(flat, start, numel), 0, tuple(shape), tuple(stride))


def slice_storage(flat: Tensor, start: int, numel: int) -> UntypedStorage:
    """Returns a separate storage over the memory of elements ``[start, start + numel)`` of ``flat``."""
    itemsize = flat.element_size()
    storage: UntypedStorage = flat.untyped_storage()[start * itemsize : (start + numel) * itemsize]
    return storage


def copy_grad_(target: Tensor, grad: Tensor) -> None:
    """Copies a gradient, which may be sparse, to ``target`` (dense, of the parameter's shape)."""
    target.copy_(grad.to_dense() if grad.layout != torch.strided else grad)


def late_grad(param: Parameter) -> Tensor:
    """Returns the gradient that arrived while the bucket was sealed."""
    grad = param.grad.pending if isinstance(param.grad, ReducedGrad) else param.grad
    assert grad is not None
    return grad


def pop_late_grad(param: Parameter) -> Tensor:
    """Returns the :func:`late_grad` and sets ``.grad`` to None."""
    late = late_grad(param)
    if isinstance(grad := param.grad, ReducedGrad):
        grad.pending = None
    param.grad = None
    return late


def has_unreduced(param: Parameter) -> bool:
    """Whether ``.grad`` has something that this rank has not reduced, after a backward that was not prepared."""
    grad = param.grad
    return grad is not None and (not isinstance(grad, ReducedGrad) or grad.pending is not None)


@dataclasses.dataclass
class _BucketState:
    """The reduced part of a bucket on this rank."""

    shard: tuple[int, int]  # this rank's part of the bucket's buffer
    sums: Tensor | None  # the reduced shard, if it has memory of its own
    is_reduced: bool = False  # contains a result; in the buffer everything except the shard is invalid then


class GradBuffers(ABC):
    """Holds gradients while they accumulate, and makes the tensors that the reducer sends.

    Attributes:
        local_parts: this rank's parts of parameters and gradients.
        params: the model's trainable parameters, in the layout's order (owned by the model).
        views: the tensors that are ``param.grad`` while gradients accumulate; None where ``.grad`` is autograd's own.
        has_grad: whether a parameter received a gradient since it was last cleared (after a synchronised backward: on
            any rank).
        zeroed: parameters whose gradients :meth:`zero` was called for; the reader empties it.
        main_grads: by parameter, the memory to which its layer adds; see main_grads' [Note: layers that add to
            main_grad].
        reduces_every_backward: whether gradients cannot accumulate on a rank over several backwards.
        has_main_grads: whether a layer may add gradients to the buffer itself.
        max_in_flight: the maximum number of pieces in flight; None where each has memory of its own.
        all_reduce_option: the option of the user's door that gives full gradients, for error messages.
    """

    reduces_every_backward = False
    has_main_grads = False
    main_grads: Mapping[int, Tensor] = types.MappingProxyType({})
    max_in_flight: int | None = None
    all_reduce_option = "use_distributed_optimizer=False"

    def __init__(self, dp_rank: int, device: torch.device, parts: LocalParts) -> None:
        self.local_parts = parts
        self._dp_rank, self._device = dp_rank, device
        self.params: list[Parameter] = []
        self._parts: list[Tensor] = []  # the local parts of the parameters; the parameters themselves if not cut
        self.views: list[Tensor | None] = []
        self.has_grad: list[bool] = []
        self.zeroed: set[int] = set()
        self._stand_ins: list[ReducedGrad | None] = []  # made when they are first needed
        self._buckets: list[_BucketState] = []
        self._stale: list[bool] = []  # by parameter, to be zeroed before the next gradient is added

    @property
    def _sharded(self) -> bool:
        return self.layout.num_shards > 1

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Adds the parameters that ``layout`` has beyond those known so far, with the gradients that they have."""
        first, number = len(self.params), len(params) - len(self.params)
        self.layout = layout
        self.params += params[first:]
        self._parts += map(self.local_parts.local_view, params[first:])
        self.views += [None] * number
        self.has_grad += [False] * number
        self._stand_ins += [None] * number
        self._stale += [False] * number
        if not self.has_main_grads:
            for param, spec in zip(params[first:], layout.params[first:], strict=True):
                if has_main_grad(param):
                    raise no_place_for_main_grad(spec.name)
        # A stand-in is left from a wrapper that was collected, and its gradient is gone.
        grads = [None if isinstance(param.grad, ReducedGrad) else param.grad for param in params[first:]]
        for param, spec in zip(params[first:], layout.params[first:], strict=True):
            param.grad = None  # first, since torch accepts no other dtype while a gradient is present
            # Autograd then accumulates a 16-bit parameter's gradient in fp32. No effect if both dtypes are the same.
            param.grad_dtype = spec.grad_dtype
        for bucket in layout.buckets[len(self._buckets) :]:
            buffer, sums = layout.buffers[bucket.buffer], None
            if buffer.has_separate_sums:  # they outlive the bucket, which accumulates anew
                sums = torch.zeros(bucket.shard_numel, dtype=buffer.sum_dtype, device=self._device)
            self._buckets.append(_BucketState(layout.shard_range(bucket, self._dp_rank), sums))
        self._place(first, grads)

    def update_swapped_params(self) -> list[int]:
        """Returns the parameters whose inner tensor torch has replaced, and uses the new ones. ``Module.to``
        replaces those of DTensors, even if nothing has to be moved; autograd's data of the parameter, and its hooks
        with them, are lost then."""
        if not self.local_parts.has_parts:
            return []
        views = map(self.local_parts.local_view, self.params)
        swapped = [i for i, (view, known) in enumerate(zip(views, self._parts, strict=True)) if view is not known]
        for index in swapped:
            param = self.params[index]
            self._parts[index] = self.local_parts.local_view(param)
            grad, param.grad = param.grad, None
            param.grad_dtype = self.layout.params[index].grad_dtype
            param.grad = grad
        return swapped

    @abstractmethod
    def _place(self, first: int, grads: Sequence[Tensor | None]) -> None:
        """Allocates memory for the parameters from ``first`` on, whose gradients so far are ``grads``."""

    # --- one backward ------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Makes every gradient ready for accumulation; one may have arrived before this call."""

    def start_main_grads(self) -> None:  # noqa: B027 - only main_grads are added to before a parameter's hook has run
        """Called when a backward begins: makes memory ready before the first layer adds to it."""

    def finish_main_grads(self) -> None:  # noqa: B027 - nothing to do where no layer adds
        """Called when a backward has ended: sets ``.grad`` where layers have added, in buckets that are not sealed."""

    def check_late_main_grad(self, param: int) -> None:  # noqa: B027 - autograd's own gradient is in other memory
        """Raises MainGradError if a layer added a late gradient to memory that is being sent."""

    @abstractmethod
    def adopt_grad(self, param: int) -> None:
        """Moves a gradient that autograd or the user put elsewhere to the view."""

    @abstractmethod
    def seal(self, bucket: int) -> None:
        """Ends accumulation in a bucket."""

    def num_pieces(self, bucket: int) -> int:
        """Returns the number of reductions that carry a sealed bucket."""
        return 1

    @abstractmethod
    def piece_to_reduce(self, bucket: int, piece: int) -> tuple[Tensor, Tensor | None]:
        """Returns the tensor to reduce (1-D, owned by this object) and the tensor that the result is added to; None if
        that is this rank's part of the first. Called for the pieces of a sealed bucket in order, once for each."""

    def find_nonfinite(self, bucket: int, check: FiniteCheck) -> None:
        """Checks this rank's gradients in a sealed bucket, before :meth:`piece_to_reduce`."""
        check.check_bucket(self.piece_to_reduce(bucket, 0)[0], bucket, self.layout)

    @abstractmethod
    def publish(self, bucket: int) -> None:
        """Called when the reduction of a sealed bucket is complete and ``has_grad`` is that of all ranks."""

    def add_to_reduced(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """Adds local gradients, by parameter, to a reduced bucket, which must then be sealed and reduced again."""
        raise NotImplementedError("a bucket that is launched after backward gets no late gradient")

    def drop_unused_grads(self) -> None:  # noqa: B027 - nothing to do where .grad is autograd's own
        """Ends a backward without synchronisation: ``.grad`` is None where no gradient arrived, as in torch."""

    def drop_unfinished(self) -> None:
        """Drops every gradient, and unseals every bucket, after a backward that failed or whose sums are invalid."""
        self.clear(range(len(self.params)))

    # --- reduced gradients -------------------------------------------------------------------------------------------

    def is_sharded(self, param: int) -> bool:
        """Whether only this rank's shard of the gradient is valid (from reduce-scatter to next backward)."""
        return self._sharded and self._buckets[self.layout.slots[param].bucket].is_reduced

    def reduced(self, bucket: int, start: int, end: int) -> Tensor:
        """Returns elements ``[start, end)`` of the bucket's buffer, inside this rank's shard, reduced: 1-D view."""
        state = self._buckets[bucket]
        assert state.sums is not None, "parameters are sharded only where gradients are scattered"
        return state.sums[start - state.shard[0] : end - state.shard[0]]

    def owned(self, param: int) -> Tensor | None:
        """Returns this rank's part of a reduce-scattered gradient, as a view; None if it owns no part."""
        owned = self.layout.owned_range(param, self._dp_rank)
        return None if owned is None else self.reduced(self.layout.slots[param].bucket, *owned)

    def _owned_sums(self, param: int) -> Tensor | None:
        """Returns the same if it has memory of its own."""
        return None if self._buckets[self.layout.slots[param].bucket].sums is None else self.owned(param)

    def local_grads(self, params: Iterable[int]) -> list[Tensor]:
        """Returns views of this rank's parts of the gradients of these parameters, as the optimizer steps with them."""
        parts = list[Tensor]()
        for index in params:
            grad = self.params[index].grad
            if not self.has_grad[index]:
                continue
            if self.is_sharded(index):
                if (owned := self.owned(index)) is not None:
                    parts.append(owned)
            elif grad is not None:
                parts.append(self.local_parts.local_view(grad).detach())
        return parts

    def local_bucket_of(self, param: int) -> Tensor:
        """Returns this rank's part of the reduced bucket of a parameter with a bucket of its own: 1-D, to be written.
        Without a gradient it is temporary memory, to which other ranks with a copy of the parameter add theirs."""
        bucket = self.layout.buckets[self.layout.slots[param].bucket]
        if self._sharded:
            return self.reduced(bucket.index, *self.layout.shard_range(bucket, self._dp_rank))
        grad = self.params[param].grad
        if grad is None:
            part = self.local_parts.local_view(self.params[param])
            return torch.zeros(part.numel(), dtype=self.layout.params[param].grad_dtype, device=part.device)
        part = self.local_parts.local_view(grad).detach()
        return part.as_strided((part.numel(),), (1,))

    def continue_from(self, other: GradBuffers, shards: Mapping[int, Tensor]) -> None:
        """Replaces ``other``, of a different layout, in which gradients were reduced and scattered. ``shards`` are this
        rank's parts in this layout, by parameter."""
        self.has_grad[:], self._stale[:] = other.has_grad, other._stale
        for state in self._buckets:
            state.is_reduced = True
        self._show_reduced(range(len(self.params)))
        for index, shard in shards.items():
            if (owned := self.owned(index)) is not None:
                owned.copy_(shard)

    def keep_views_of(self, other: GradBuffers) -> None:
        """Replaces ``other``, of a different layout, but not the tensors that were ``.grad``: user code that refers to
        one still sees the gradient."""
        for bucket, state in zip(self.layout.buckets, self._buckets, strict=True):
            # All of them or none: a move comes after reductions. What is reduced again is scaled first, for experts.
            state.is_reduced = any(other._buckets[other.layout.slots[i].bucket].is_reduced for i in bucket.params)
        for index, (view, kept) in enumerate(zip(self.views, other.views, strict=True)):
            if view is not None and kept is not None:
                self.local_parts.local_view(kept).data = self.local_parts.local_view(view)
                self.views[index] = kept
                if self.params[index].grad is view:
                    self.params[index].grad = kept

    def _show_reduced(self, params: Iterable[int]) -> None:
        """Sets ``.grad`` of scattered gradients to a stand-in, or None if there is no gradient, as in torch. A tensor
        that the user has put there since stays, and is adopted later."""
        for index in params:
            param, has_grad = self.params[index], self.has_grad[index]
            if (param.grad is not None) != has_grad:
                param.grad = self._stand_in(index) if has_grad else None

    def _stand_in(self, param: int) -> ReducedGrad:
        known = self._stand_ins[param]
        if known is None:
            buffers = weakref.ref(self)  # the user's parameters refer to it, and must not keep the buffers alive

            def zero(represented: RepresentedGrad) -> None:
                present = buffers()
                known = present._stand_ins[param] if present is not None else None
                # A dropped stand-in represents no gradient any more.
                if present is not None and known is not None and known.represented is represented:
                    present.zero([param])

            spec, whole = self.layout.params[param], self.params[param]
            if tuple(whole.shape) != spec.shape:  # torch accepts only gradients of the parameter's shape
                spec = dataclasses.replace(spec, shape=tuple(whole.shape), stride=whole.stride())
            represented = RepresentedGrad(spec, self.all_reduce_option, zero)
            known = self._stand_ins[param] = ReducedGrad(represented, whole.device)
        elif known.pending is not None:  # left from a backward that failed
            known.pending = None
        return known

    # --- changes of .grad by user code -------------------------------------------------------------------------------

    def adopt_written_grads(self, params: Iterable[int]) -> None:
        """Uses the tensors that the user has put in ``.grad`` after a reduce-scatter, and drops gradients where it is
        None."""
        if not self._sharded:
            return
        params = list(params)
        stand_ins = self._stand_ins
        for index, grad in zip(params, self._notice_drops(params), strict=True):
            if not (grad is None or grad is stand_ins[index] or isinstance(grad, ReducedGrad)):
                self._check_param(index)
                self._take_written(index, grad)
                self.has_grad[index], self._stale[index] = True, False
                self.params[index].grad = self._stand_in(index)

    def _take_written(self, param: int, grad: Tensor) -> None:
        """Replaces this rank's part of a reduced gradient by that of the user's ``.grad``. The parameter's other owners
        use theirs: users write the same on all ranks."""
        raise NotImplementedError("parameters are sharded only where gradients are scattered")

    def _notice_drops(self, params: Sequence[int]) -> list[Tensor | None]:
        """Drops scattered gradients whose stand-in the user has removed (``zero_grad`` of the raw module, ``.grad =
        None``): no optimizer steps with them, and the next backward starts from zero.

        Returns:
            their ``.grad``: with thousands of parameters each read of it is noticeable in a step's time.

        Raises:
            ReducedGradError: if a stand-in was put back after that, since the gradient is gone, or belongs to another
                parameter.
        """
        has_grad, stand_ins = self.has_grad, self._stand_ins
        grads = [self.params[index].grad for index in params]
        for index, grad in zip(params, grads, strict=True):
            if grad is None:
                # A gradient that is not scattered is also None while it is sealed, and after zero_grad.
                if has_grad[index] and self.is_sharded(index):
                    has_grad[index] = False
                    self._stale[index] = True
                continue
            # Nearly always the parameter's own. A stand-in that was moved with the module is another object.
            if grad is not (known := stand_ins[index]) and isinstance(grad, ReducedGrad):
                grad.check_is_of(self.layout.params[index], None if known is None else known.represented)
            if not has_grad[index] and isinstance(grad, ReducedGrad):
                raise grad.error("putting back a .grad that was dropped")
        return grads

    def cut_grads(self, params: Iterable[int]) -> None:
        """Makes every ``.grad`` cut as its parameter is. Collective over the tensor ranks where any is not."""
        if not self.local_parts.has_parts:
            return
        # Unreduced gradients are as autograd made them. Clipping or unscaling would change a copy, and the optimizer
        # would step without it.
        grads = ((index, self.params[index].grad) for index in params)
        other = [i for i, g in grads if g is not None and not self.local_parts.is_cut_alike(self.params[i], g)]
        for index, part in zip(other, self.local_parts.local_grads([self.params[i] for i in other]), strict=True):
            assert part is not None, "it has one"
            self.params[index].grad = self.local_parts.as_grad(self.params[index], part)

    def clear(self, params: Iterable[int]) -> None:
        """Drops the gradients of these parameters: ``.grad`` is None, accumulation starts from zero."""
        params = list(params)
        for index in params:
            self.params[index].grad = None
            self.has_grad[index] = False
            self._stale[index] = True

    def zero(self, params: Iterable[int]) -> None:
        """Sets existing gradients to zero, and keeps them."""
        for index in params:
            view, grad = self.views[index], self.params[index].grad
            if self.has_grad[index] and view is not None:  # it has the gradient also while .grad is a stand-in
                view.zero_()
            if grad is not None and grad is not view and not isinstance(grad, ReducedGrad):
                grad.zero_()
            if self.has_grad[index]:
                self._zero_sums(index)
                self._stale[index] = False  # optimizers step with a gradient of zeros
            self.zeroed.add(index)

    def restore_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Sets each ``.grad`` that other code has set to None since to ``grads``, by parameter, if nothing else has
        changed."""
        for param, grad in zip(self.params, grads, strict=True):
            if param.grad is None:
                param.grad = grad

    def _view(self, param: int) -> Tensor:
        """Makes a tensor for ``.grad`` in the buffer's memory."""
        raise NotImplementedError("gradients are where autograd puts them")

    # --- zeros -------------------------------------------------------------------------------------------------------

    def _zero_sums(self, param: int) -> None:
        """Zeroes this rank's part of a reduced gradient, if that has memory of its own."""
        if (sums := self._owned_sums(param)) is not None:
            sums.zero_()

    def _zero_param(self, param: int) -> None:
        """Zeroes everything that is accumulated of a parameter on this rank."""
        self._zero_sums(param)

    def _zero_bucket(self, bucket: int) -> None:
        """Does the same for a bucket, at once."""
        if (sums := self._buckets[bucket].sums) is not None:
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

    def _check_param(self, param: int) -> None:
        check_unchanged(self._parts[param], self.layout.params[param])

    def close_and_return_memory(self) -> list[Tensor]:
        """Closes, and returns the memory in which gradients accumulated: 1-D, by buffer; empty if there is none."""
        self.close()
        return []

    def close(self, *, keeps_grads: bool = False) -> None:
        """Sets ``.grad`` to None, and the parameters' gradient dtype to torch's default.

        ``keeps_grads``: gradients in that dtype that are not sharded stay, as when torch DDP's wrapper is dropped.
        """
        for state in self._buckets:
            state.sums = None
        for param in self.params:
            grad, param.grad = param.grad, None
            param.grad_dtype = param.dtype  # the Parameter lives on, and would accumulate in the engine's dtype
            if keeps_grads and grad is not None and grad.dtype == param.dtype and not isinstance(grad, ReducedGrad):
                param.grad = grad


def stepped_in_backward(name: str) -> ParameterChangedError:
    """Returns the error for a parameter that a hook has stepped, or whose gradient it has dropped, in a backward."""
    return ParameterChangedError(
        f"parameter {name!r} was changed, or its .grad set to None, during a backward: an optimizer that steps in a "
        "gradient hook (register_post_accumulate_grad_hook or register_hook: optimizer in backward, LOMO) uses this "
        "rank's own gradient, and the ranks' weights would part. Step after backward(), with a DistributedOptimizer; "
        'for gradients in less memory, DistributedDataParallelConfig(grad_buffer="pooled")'
    )


def check_unchanged(part: Tensor, spec: ParamSpec) -> None:
    """Raises ParameterChangedError if a parameter's part no longer has the dtype and shape of its place."""
    if part.dtype != spec.dtype or part.shape != spec.shape:
        raise ParameterChangedError(
            f"parameter {spec.name!r} was {spec.dtype} of shape {spec.shape} when the model was wrapped and is now "
            f"{part.dtype} of shape {tuple(part.shape)}. Change dtypes and shapes before wrapping, or wrap the "
            "model again"
        )
