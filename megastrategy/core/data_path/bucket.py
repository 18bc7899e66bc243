"""A bucket: the gradients that one collective reduces, from autograd's own tensors to this rank's shard.

[Note: .grad is the record]
The gradient of a parameter is what its ``.grad`` is, and a bucket keeps no second record of it:

* ``None``: no gradient;
* a tensor of autograd's or of user code: not in the buffer yet; it is copied when the bucket is complete;
* the view of the buffer: accumulated there, and autograd adds to it in place;
* the stand-in: reduced, and this rank has a shard of it. Autograd adds a later gradient to the stand-in's ``pending``.

[Note: sums over tensor ranks]
The gradient of a parameter that is replicated over tensor ranks may be a partial sum. In the buffer it could not stay
one: the buffer's view is a replicated DTensor, and torch would all-reduce each gradient that it adds to one. So
microbatches accumulate in autograd's own tensor, and ``collect`` adds up those of a bucket in one collective.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..collectives import Collectives, Handle
from ..events import EventKind, Listener, emit
from ..layout import Bucket as BucketPlan
from ..layout import ParamSpec
from ..module import LocalParts
from .memory import Memory
from .nonfinite import FiniteCheck
from .reduced_grad import ReducedGrad, RepresentedGrad
from .replica_hook import HookQueue

get_grad = operator.attrgetter("grad")
requires_grad = operator.attrgetter("requires_grad")
_GRAD: Any = Tensor.grad
_set_grad = _GRAD.__set__
_none = itertools.repeat(None)
_data_ptr = Tensor.data_ptr
NEVER = -1
"""A place whose gradient never arrives."""


def set_grads(params: Sequence[Parameter], grads: Iterable[Tensor | None]) -> None:
    """Sets ``.grad`` of each parameter, in one loop in C."""
    collections.deque(map(_set_grad, params, grads), maxlen=0)


def widen_grads(params: Sequence[Parameter], specs: Sequence[ParamSpec]) -> None:
    """Converts gradients that are not in a buffer to their dtype there: a sum of microbatches in 16 bits would
    round."""
    for param, spec in zip(params, specs, strict=True):
        if param.grad is not None and param.grad.dtype != spec.grad_dtype:
            param.grad = param.grad.to(spec.grad_dtype)


class State(enum.Enum):
    """The state of a bucket: OPEN, SEALED, IN_FLIGHT, REDUCED, and OPEN again; under ``no_sync`` OPEN after SEALED."""

    OPEN = enum.auto()
    """Gradients arrive and accumulate on this rank."""
    SEALED = enum.auto()
    """All gradients of this rank are in the buffer: it can be launched, or the next microbatch adds to it."""
    IN_FLIGHT = enum.auto()
    """The ranks reduce the buffer."""
    REDUCED = enum.auto()
    """The mean over ranks is in this rank's shard, or everywhere with an all-reduce."""


class Bucket:
    """One bucket of the plan on this rank. All lists are in the order of ``plan.params``; an index is a place.

    Args:
        ranks: those that reduce it.
        mean: the factor of each rank's gradients.

    Attributes:
        grads: the bucket's part of the gradient buffer.
        shard: the memory of the reduced gradients that this rank owns.
        waiting: places whose gradient the running backward still has to bring; hooks remove them. Empty between
            backwards.
        awaited: places for which a backward waits: those that require gradients, and NEVER after a late gradient.
        used: a byte for each place: whether it has a gradient, on this rank when sealed, on any rank when reduced.
        is_late: whether a gradient has arrived after the launch.
        has_main_grads: whether layers add gradients to the buffer themselves.
        has_unprepared: whether a backward that no forward prepared has brought gradients.
        missing: places that require gradients and got none since the last reduction.
    """

    def __init__(
        self,
        plan: BucketPlan,
        memory: Memory,
        params: Sequence[Parameter],
        parts: LocalParts,
        ranks: Collectives,
        dp_rank: int,
        mean: float,
        all_reduce_option: str,
        listener: Listener | None,
        replicas: HookQueue | None,
    ) -> None:
        layout = memory.layout
        self.plan = plan
        self._layout = layout
        self._dp_rank = dp_rank
        self.params = [params[index] for index in plan.params]
        self.specs = [layout.params[index] for index in plan.params]
        self.grads = memory.grad_bucket(plan)
        self.shard = memory.reduced_shard(plan, dp_rank)
        self.state = State.OPEN
        self.waiting: set[int] = set()
        self.awaited = {place for place, param in enumerate(self.params) if param.requires_grad}
        self.used = bytes(len(self.params))
        self.is_late = False
        self.has_unprepared = False
        self.has_main_grads = False
        self.missing = set(self.awaited)
        self.is_sharded = layout.num_shards > 1
        self._parts = parts
        self._ranks = ranks
        self._mean = mean
        self._repeat_factor = plan.domain.repeat_factor
        self._listener = listener
        self._replicas = replicas
        buffer = layout.buffers[plan.buffer]
        self._wire_dtype = buffer.grad_wire_dtype
        self._has_separate_sums = buffer.has_separate_sums
        self._all_used = bytes([1] * len(self.params))
        self._views: list[Tensor] = []  # the places of gradients in ``grads``
        self._faces: list[Tensor] = []  # the same as values of ``.grad``
        self._is_plain = True  # no DTensor among them
        if memory.keeps_grads:
            self._set_views([memory.grad_views[index] for index in plan.params])
        self._sums = [place for place, param in enumerate(self.params) if parts.may_be_sum(param)]
        self._has_views = False  # whether a ``.grad`` may be a view of the buffer
        self._carry: Tensor | None = None  # reduced gradients that the next reduction adds to
        self._work: Handle | None = None
        self._sent: Tensor | None = None  # gradients in the dtype of the wire, until they are reduced
        self._gaps: list[Tensor] | None = None  # of the shard, between parameters
        self._published = self._faces  # the values of ``.grad`` when it is reduced
        if self.is_sharded:
            self._published = [self._stand_in(place, all_reduce_option) for place in range(len(self.params))]

    def _set_views(self, views: list[Tensor]) -> None:
        self._views = views
        self._faces = [self._make_face(place) for place in range(len(views))]
        self._is_plain = all(type(face) is Tensor for face in self._faces)

    def _make_face(self, place: int) -> Tensor:
        # A tensor of its own: ``Module.to`` gives the one in ``.grad`` other memory, in place.
        return self._parts.as_grad(self.params[place], self._views[place].detach())

    def _take_back_moved(self) -> None:
        """Copies gradients that ``Module.to`` has moved to other memory back into the buffer."""
        if self._is_plain and all(map(operator.eq, map(_data_ptr, self._faces), map(_data_ptr, self._views))):
            return
        for place, (view, face) in enumerate(zip(self._views, self._faces, strict=True)):
            local = self._parts.local_view(face)
            if local.data_ptr() != view.data_ptr():
                view.copy_(local)
                self._faces[place] = self._make_face(place)
                if self.params[place].grad is face:
                    self.params[place].grad = self._faces[place]

    def face(self, param: int) -> Tensor:
        """Returns a parameter's place in the buffer as a value of ``.grad``; ``param``: its number in the layout."""
        return self._faces[self.plan.params.index(param)]

    # --- a backward ---------------------------------------------------------------------------------------------------

    def open(self, *, has_grads: bool) -> None:
        """Begins a backward. Reduced gradients that were not dropped stay, and local ones are added to them.

        ``has_grads``: whether any parameter of the model has a gradient.
        """
        if self._has_views:
            self._take_back_moved()
        if has_grads and self.state is State.REDUCED:
            self._keep_reduced()
        self.state = State.OPEN
        self.waiting.update(self.awaited)

    def update_awaited(self) -> None:
        """Follows changes of ``requires_grad``; before a backward."""
        never = self.awaited & {NEVER}
        self.awaited = never | {place for place, flag in enumerate(map(requires_grad, self.params)) if flag}

    def collect(self) -> bytes:
        """Copies the gradients that are not in the buffer yet into it, in one call of a foreach kernel.

        Returns a byte for each place: whether it has a gradient.
        """
        grads = list(map(get_grad, self.params))
        used = bytes(map(operator.is_not, grads, _none))
        has_views = self._has_views or self.has_main_grads
        if used == self._all_used and not has_views and self._carry is None and self._are_dense(grads):
            torch._foreach_copy_(self._views, grads)
            return used
        if has_views and all(map(operator.is_, grads, self._faces)):
            return used
        places = []
        for place, grad in enumerate(grads):
            if isinstance(grad, ReducedGrad):
                grad = self.params[place].grad = grad.take_pending()
            if grad is None:
                self._views[place].zero_()
            elif grad is not self._faces[place]:
                places.append(place)
        # Sums over the tensor ranks are added up here, in one collective.
        local = self._parts.local_grads([self.params[place] for place in places])
        present = [grad for grad in local if grad is not None]
        sources = [grad if grad.layout == torch.strided else grad.to_dense() for grad in present]
        if places:
            torch._foreach_copy_([self._views[place] for place in places], sources)
        return used

    def _are_dense(self, grads: Sequence[Tensor]) -> bool:
        return self._is_plain and not any(map(_is_sparse, grads)) and ReducedGrad not in set(map(type, grads))

    def accumulate(self) -> None:
        """Ends a microbatch that is not reduced: later ones add to the buffer in place."""
        self.missing &= self.waiting
        self.waiting.clear()
        self._forget_dropped()
        sums = self._take_sums() if self._sums and self._carry is None else {}
        used = self.collect()
        self._forget_pending()
        self._set_faces(used)
        for place, grad in sums.items():
            self.params[place].grad = grad
        self._has_views = True
        self.state = State.SEALED

    def _take_sums(self) -> dict[int, Tensor]:
        """Takes gradients that may be sums over the tensor ranks out of ``.grad``.

        See [Note: sums over tensor ranks].
        """
        sums = {}
        for place in self._sums:
            grad = self.params[place].grad
            if grad is not None and grad is not self._faces[place] and not isinstance(grad, ReducedGrad):
                sums[place] = grad.to(self.shard.dtype)  # a sum of microbatches in 16 bits would round
                self.params[place].grad = None
        return sums

    def _set_faces(self, used: bytes) -> None:
        if used == self._all_used:
            set_grads(self.params, self._faces)
        else:
            set_grads(self.params, [face if flag else None for face, flag in zip(self._faces, used, strict=True)])

    def seal(self) -> None:
        """Ends the arrival of gradients."""
        self.missing &= self.waiting
        self.waiting.clear()
        self._forget_dropped()
        self._seal()

    def _seal(self) -> None:
        self.used = self.collect()
        if self._carry is not None:
            self._add_carry()
        # Frees autograd's tensors. A gradient that comes from now on is a late one.
        set_grads(self.params, _none)
        self._has_views = False
        self._forget_pending()
        self.state = State.SEALED

    def _forget_pending(self) -> None:
        """Forgets gradients of unprepared backwards in stand-ins that user code has dropped."""
        if self.has_unprepared and self.is_sharded:
            self._clear_stand_ins()
        self.has_unprepared = False

    def _clear_stand_ins(self) -> None:
        for stand_in in self._published:
            stand_in.pending = None  # type: ignore[attr-defined]

    def _forget_dropped(self) -> None:
        """Drops carried gradients whose ``.grad`` user code has dropped since."""
        if self._carry is None:
            return
        for place, grad in enumerate(map(get_grad, self.params)):
            if grad is not self._faces[place] and not self._stands_in(place, grad):
                carried = self._part_of(self._carry, place)
                if carried is not None:
                    carried[1].zero_()

    def _stands_in(self, place: int, grad: Tensor | None) -> bool:
        """Whether ``grad`` is the reduced gradient; with ``create_graph`` autograd makes another stand-in."""
        if grad is self._published[place]:
            return True
        return isinstance(grad, ReducedGrad) and grad.represented is self._published[place].represented  # type: ignore[attr-defined]

    def check_written(self, place: int) -> None:
        """Raises ReducedGradError if ``.grad`` is the stand-in of another parameter."""
        grad = self.params[place].grad
        if isinstance(grad, ReducedGrad):
            grad.check_is_of(self.specs[place], self._published[place].represented)  # type: ignore[attr-defined]

    def check_finite(self, check: FiniteCheck) -> None:
        """Checks this rank's gradients as they are sent: a finite one may be infinite in 16 bits."""
        sent = self.grads.to(self._wire_dtype) if self._has_separate_sums else self.grads
        check.check_bucket(sent, self.plan.index, self._layout)

    @property
    def launches_at_once(self) -> bool:
        """Whether :meth:`launch` waits for no earlier bucket."""
        return True

    def launch(self) -> None:
        """Starts the reduction."""
        emit(self._listener, EventKind.REDUCE_START, self.plan.index)
        if self._has_separate_sums:
            self.shard.zero_()
            self._sent = self.grads.to(self._wire_dtype)
            self._work = self._ranks.reduce_scatter_into(self.shard, self._sent, self._mean)
        elif self.is_sharded:
            self._work = self._ranks.reduce_scatter(self.grads, self._mean)
        else:
            self._work = self._ranks.all_reduce(self.grads, self._mean)
        self._end_launch()

    def _end_launch(self) -> None:
        if self._replicas is not None and self._work is not None:
            shard = self.shard if self._has_separate_sums else self.reduced
            self._work = self._replicas.start(shard, self._work)
        self.state = State.IN_FLIGHT

    def wait(self) -> None:
        """Waits for the reduction."""
        work = self._work
        assert work is not None, "launched"
        self._work = None
        work.wait()
        self._sent = None
        if self._has_separate_sums and self._carry is not None:
            self.shard.add_(self._carry)
            self._carry = None
        self.state = State.REDUCED
        emit(self._listener, EventKind.REDUCE_END, self.plan.index, work.ran_ns)

    def missing_flags(self) -> bytes:
        """Returns a byte for each place: whether it requires a gradient and got none since the last reduction."""
        return bytes(map(self.missing.__contains__, range(len(self.params))))

    def find_late(self) -> None:
        """Adds the parameters with a late gradient to those that are used."""
        late = map(operator.is_not, map(get_grad, self.params), _none)
        self.used = bytes(map(operator.or_, self.used, late))

    def reduce_again(self) -> None:
        """Adds late gradients of all ranks to the reduced ones. Collective."""
        self._carry = self.reduced.clone()
        self._reduce_late()

    def _reduce_late(self) -> None:
        used = self.used
        self._seal()
        self.used = used
        self.launch()
        self.wait()
        self.is_late = False
        self.awaited.add(NEVER)  # from now on it is launched at the end of backward

    def publish(self, used: bytes) -> None:
        """Sets ``.grad`` of the parameters that any rank has used."""
        self.used = used
        self.missing = set(self.awaited)
        if used == self._all_used:
            set_grads(self.params, self._published)
        else:
            grads = zip(self._published, used, strict=True)
            set_grads(self.params, [grad if flag else None for grad, flag in grads])
        self._has_views = not self.is_sharded

    def drop(self) -> None:
        """Drops all gradients, those of a failed backward too."""
        set_grads(self.params, _none)
        if self.is_sharded:
            self._clear_stand_ins()
        self.used = bytes(len(self.params))  # of this rank only, if it was not agreed on
        self.waiting.clear()
        self.missing = set(self.awaited)
        self.state = State.OPEN
        self.is_late = False
        self.has_unprepared = False
        self._has_views = False
        self._carry = None

    # --- after it -----------------------------------------------------------------------------------------------------

    def reduced_flags(self) -> list[bool]:
        """Returns, by place, whether the reduced gradient is there: not if user code has set ``.grad`` to None."""
        return list(map(operator.is_, map(get_grad, self.params), self._published))

    def has_local(self) -> bool:
        """Whether gradients are here that were not reduced; user code's, written after a reduction, are not among
        them."""
        if self.state is State.REDUCED:
            return self.has_unprepared and any(map(_is_local, map(get_grad, self.params)))
        return any(map(operator.is_not, map(get_grad, self.params), _none))

    def grad_flags(self) -> list[bool]:
        """Returns, by place, whether a step has a gradient to use."""
        if self.is_sharded:
            return self.reduced_flags()
        return list(map(operator.is_not, map(get_grad, self.params), _none))

    def has_written(self) -> bool:
        """Whether a ``.grad`` is neither None nor the reduced gradient."""
        grads = list(map(get_grad, self.params))
        are_reduced = map(operator.is_, grads, self._published)
        are_none = map(operator.is_, grads, _none)
        return not all(map(operator.or_, are_reduced, are_none))

    def adopt_local(self) -> None:
        """Copies gradients that are not in the buffer into it, where every rank steps all of them."""
        self._set_faces(self.collect())
        self._has_views = True

    def adopt_written(self) -> None:
        """Takes gradients that user code wrote into ``.grad`` after the reduction: the same on all ranks."""
        for place, grad in enumerate(map(get_grad, self.params)):
            if grad is None or grad is self._published[place]:
                continue
            param = self.params[place]
            if isinstance(grad, ReducedGrad):
                grad.check_is_of(self.specs[place], self._published[place].represented)  # type: ignore[attr-defined]
            else:
                local = self._parts.local_grad(param)
                assert local is not None, "grad is not None"
                self._write(place, local)
            param.grad = self._published[place]

    def _write(self, place: int, grad: Tensor) -> None:
        spec = self.specs[place]
        whole = torch.empty_strided(spec.shape, spec.stride, dtype=self.shard.dtype, device=self.shard.device)
        whole.copy_(grad)
        owned = self.owned(place)
        if owned is not None:
            start, shard = owned
            shard.copy_(whole.as_strided((spec.numel,), (1,))[start : start + shard.numel()])

    def owned(self, place: int) -> tuple[int, Tensor] | None:
        """Returns the part of a reduced gradient that this rank owns: the number of its first element, and a 1-D view;
        None if it owns nothing of it."""
        return self._part_of(self.shard, place)

    @property
    def padding(self) -> list[Tensor]:
        """The elements of the shard between parameters, which are zero: views."""
        if self._gaps is None:
            first, last = self._layout.shard_range(self.plan, self._dp_rank)
            ends = [first]
            starts = []
            for owned in (self._layout.owned_range(index, self._dp_rank) for index in self.plan.params):
                if owned is not None and owned[0] < owned[1]:
                    starts.append(owned[0])
                    ends.append(owned[1])
            spans = zip(ends, [*starts, last], strict=True)
            self._gaps = [self.shard[start - first : end - first] for start, end in spans if start < end]
        return self._gaps

    def final_grads(self) -> list[Tensor]:
        """Returns the memory of the gradients that a step may use on this rank, without those of frozen parameters."""
        flags = self.grad_flags()
        required = list(map(requires_grad, self.params))
        if all(flags) and all(required):
            return [self.reduced]
        places = [place for place, flag in enumerate(flags) if flag and required[place]]
        if not self.is_sharded:
            return [self._parts.local_view(get_grad(self.params[place])) for place in places]
        return [owned[1] for owned in map(self.owned, places) if owned is not None]

    def _part_of(self, shard: Tensor, place: int) -> tuple[int, Tensor] | None:
        index = self.plan.params[place]
        owned = self._layout.owned_range(index, self._dp_rank)
        if owned is None:
            return None
        first = self._layout.shard_range(self.plan, self._dp_rank)[0]
        return owned[0] - self._layout.slots[index].start, shard[owned[0] - first : owned[1] - first]

    def zero_(self, places: Iterable[int]) -> None:
        """Zeroes gradients, wherever they are."""
        for place in places:
            grad = self.params[place].grad
            if grad is not None:
                grad.detach().zero_()

    @property
    def reduced(self) -> Tensor:
        """The memory of the reduced gradients on this rank."""
        return self.shard if self.is_sharded else self.grads

    def _keep_reduced(self) -> None:
        if not self.is_sharded:
            # ``.grad`` is a view with the mean, the same on all ranks of the domain, and the mean of means is the mean.
            # Of experts the sum over the ranks that have them is divided by the number of all ranks.
            if self._repeat_factor != 1.0:
                self.grads.mul_(self._repeat_factor)
            return
        flags = self.reduced_flags()
        if not any(flags):
            return
        for place, is_kept in enumerate(flags):
            if not is_kept:
                self._zero_reduced(place)
        self._carry = self.shard.clone()

    def _add_carry(self) -> None:
        if self._has_separate_sums:
            return  # it is added in wait()
        # Its owners have it, and the sum over ranks is multiplied by ``mean``.
        assert self._carry is not None
        self.reduced.add_(self._carry, alpha=self._repeat_factor)
        self._carry = None

    def _zero_reduced(self, place: int) -> None:
        owned = self.owned(place)
        if owned is not None:
            owned[1].zero_()

    def _stand_in(self, place: int, all_reduce_option: str) -> Tensor:
        param = self.params[place]
        spec = dataclasses.replace(self.specs[place], shape=tuple(param.shape), stride=tuple(param.stride()))
        this = weakref.ref(self)  # weak: ``.grad`` has the stand-in, and no collector of garbage sees that

        def zero(_: RepresentedGrad) -> None:
            bucket = this()
            if bucket is not None:
                bucket._zero_reduced(place)

        return ReducedGrad(RepresentedGrad(spec, all_reduce_option, zero), self.shard.device)


_is_sparse = operator.attrgetter("is_sparse")


def _is_local(grad: Tensor | None) -> bool:
    if isinstance(grad, ReducedGrad):
        return grad.pending is not None
    return grad is not None
