"""Gathers the new weights of all ranks.

[Note: reads between a step and the next forward]
By default ``step()`` waits for all weights, so every read is right. With ``overlap_param_gather`` the gathers run under
the next forward, and each module waits for its own parameters in a hook. Code that reads a parameter earlier must wait,
too: until its bucket has arrived a parameter has a subclass of its class, whose first operation waits. That is safe
only for plain parameters of Python modules. Other classes (DTensor) have methods that read their memory without an
operation, and so have scripted modules, so their buckets are waited for in ``step()``. Memory that user code has taken
from a parameter before the step (``p.data``) cannot wait: ``finish_param_gather()`` comes before its read.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .. import devices
from ..collectives import Collectives, Handle
from ..errors import CollectiveError
from ..events import EventKind, Listener, emit, profiler_range
from ..layout import Bucket as BucketPlan
from ..layout import Domain, Spans
from .memory import Memory


class Gather:
    """The gathers of one step.

    Args:
        overlaps: whether they run under the next forward.
        ranks_of: returns the ranks that own a domain's buckets.

    Attributes:
        missing: the buckets whose last gather failed, or could not start: shards of other ranks may have the values
            before the step.
    """

    def __init__(self, overlaps: bool, ranks_of: Callable[[Domain], Collectives], listener: Listener | None) -> None:
        self.missing: set[int] = set()
        self._overlaps = overlaps
        self._ranks_of = ranks_of
        self._listener = listener
        self._works: dict[int, Handle] = {}  # by bucket, in the order of their start
        self._weights: list[Tensor] = []  # by bucket
        self._ranks: list[Collectives] = []  # by bucket
        self._params: list[Sequence[Parameter]] = []  # by bucket
        self._can_overlap: list[bool] = []  # by bucket
        self._bucket_of: dict[int, int] = {}
        self._stream: Any = None  # of the training loop, on an accelerator
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def connect(
        self, memory: Memory, plans: Sequence[BucketPlan], params: Sequence[Parameter], module: nn.Module
    ) -> None:
        """Includes the buckets beyond those it has."""
        assert memory.weights is not None, "sharded"
        if len(self._weights) == len(plans):
            return
        scripted = {
            id(param)
            for child in module.modules()
            if isinstance(child, torch.jit.ScriptModule)
            for param in child.parameters()
        }
        for plan in plans[len(self._weights) :]:
            self._weights.append(memory.weights.bucket(plan.index))
            self._ranks.append(self._ranks_of(plan.domain))
            of_bucket = [params[index] for index in plan.params]
            self._params.append(of_bucket)
            is_plain = all(type(param) is Parameter and id(param) not in scripted for param in of_bucket)
            self._can_overlap.append(self._overlaps and is_plain)
            self._bucket_of.update((id(param), plan.index) for param in of_bucket)
        self.remove_hooks()
        for child in module.modules() if self._overlaps else ():
            numbers = {self._bucket_of.get(id(param)) for param in child._parameters.values()}
            buckets = [number for number in numbers if number is not None and self._can_overlap[number]]
            if buckets and not isinstance(child, torch.jit.ScriptModule):
                self._handles.append(child.register_forward_pre_hook(_Wait(self, buckets), prepend=True))

    @functools.cached_property  # A class is in cycles of references: without one the gather is freed at once.
    def _class(self) -> type[Parameter]:
        return type("ArrivingParameter", (_Arriving, Parameter), {"__slots__": (), "_gather": self})

    def remove_hooks(self) -> None:
        """Removes the hooks on modules."""
        _remove(self._handles)

    def start(self, buckets: Sequence[int], spans_of: Mapping[int, Spans]) -> None:
        """Launches the gathers of these buckets; of some only the elements ``spans_of`` are sent."""
        self.missing.update(buckets)
        if self._overlaps and buckets:
            self._stream = devices.current_stream(self._weights[0].device)
        for bucket in buckets:
            emit(self._listener, EventKind.GATHER_START, bucket)
            with profiler_range("gather", bucket):
                if bucket in spans_of:
                    work = self._ranks[bucket].gather_spans(self._weights[bucket], spans_of[bucket])
                else:
                    work = self._ranks[bucket].all_gather(self._weights[bucket])
                self._works[bucket] = work
        self.missing.difference_update(buckets)

    def finish_step(self) -> None:
        """Waits for the weights whose reads could not wait for themselves."""
        for bucket in self._works if self._overlaps else ():
            if self._can_overlap[bucket]:
                _set_classes(self._params[bucket], self._class)
        self.wait([bucket for bucket in self._works if not self._can_overlap[bucket]])

    def finish(self) -> None:
        """Waits for all weights.

        Raises:
            CollectiveError: if a gather failed, most often because another rank ended.
        """
        self.wait(list(self._works))

    def wait_for_param(self, param: Parameter) -> None:
        """Waits for one parameter, and gives it its class again."""
        bucket = self._bucket_of.get(id(param))
        if bucket is None:
            self.finish()  # user code made it of a parameter's class
            param.__class__ = Parameter
        else:
            self.wait([bucket])

    def wait(self, buckets: Iterable[int]) -> None:
        """Waits for those of these buckets that have not arrived."""
        works = self._works
        pending = list(filter(works.__contains__, buckets))
        if not pending:
            return
        emit(self._listener, EventKind.WAIT_START, 1)
        try:
            with profiler_range("wait for weights"):
                for bucket in pending:
                    works[bucket].wait()
                    emit(self._listener, EventKind.GATHER_END, bucket, works.pop(bucket).ran_ns)
                    if self._can_overlap[bucket]:
                        _set_classes(self._params[bucket], Parameter)
                if self._overlaps:
                    # After a read on another stream (an average of the weights, a checkpoint's copy) the loop's next
                    # forward would otherwise read weights for which its own stream has not waited.
                    reader = devices.current_stream(self._weights[0].device)
                    if reader != self._stream:
                        self._stream.wait_stream(reader)
        except CollectiveError:
            self.missing.update(works)
            self._forget()
            raise
        finally:
            emit(self._listener, EventKind.WAIT_END, 1)

    def _forget(self) -> None:
        """Forgets all gathers after one has failed: none of the others will be better."""
        for bucket in self._works:
            if self._can_overlap[bucket]:
                _set_classes(self._params[bucket], Parameter)
        self._works.clear()

    def before_forward(self) -> None:
        """Waits before a forward if torch.compile is in use: compiled code depends on the parameters' class."""
        if self._works and _uses_dynamo():
            self.finish()


class _Wait:
    """Waits for buckets before a module's forward; a copy of the module has one that waits for nothing."""

    def __init__(self, gather: Gather | None = None, buckets: Sequence[int] = ()) -> None:
        self._gather = weakref.ref(gather) if gather is not None else None
        self._buckets = buckets

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        gather = self._gather() if self._gather is not None else None
        if gather is not None:
            gather.wait(self._buckets)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Wait, ()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _set_classes(params: Sequence[Parameter], kind: type[Parameter]) -> None:
    collections.deque(map(setattr, params, itertools.repeat("__class__"), itertools.repeat(kind)), maxlen=0)


def _uses_dynamo() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


class _Arriving:
    """A parameter that has not arrived; see [Note: reads between a step and the next forward]."""

    __slots__ = ()
    _gather: Gather

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        arriving = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Arriving)]
        for leaf in arriving:
            cls._gather.wait_for_param(leaf)  # type: ignore[arg-type]
        if not arriving:
            cls._gather.finish()  # it is in a container that is no pytree
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._gather.wait_for_param(self)  # type: ignore[arg-type]
        return self.__deepcopy__(memo)


_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad
_DEVICE: Any = Tensor.device
_DTYPE: Any = Tensor.dtype
_READS_NO_ELEMENT = frozenset(
    (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__get__, _DEVICE.__get__, _DTYPE.__get__)
)
"""Attributes that training loops read of every parameter between steps, and models of their first one in a forward, to
move inputs to its device."""
