"""Gathers the new weights of all ranks.

[Note: reads between a step and the next forward]
By default ``step()`` waits for all weights, so every read is right. With ``overlap_param_gather`` the gathers run under
the next forward, and each module waits for its own parameters in a hook. Code that reads a parameter earlier must wait,
too: until its bucket has arrived a parameter has a subclass of its class, whose first operation waits. That is safe
only for plain parameters. Other classes (DTensor) have methods that read their memory without an operation, so their
buckets are waited for in ``step()``. Memory that user code has taken from a parameter before the step (``p.data``)
cannot wait: ``finish_param_gather()`` comes before its read.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

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
        missing: the buckets whose last gather failed: other ranks' shards may have the values before the step.
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
        self._class = type("ArrivingParameter", (_Arriving, Parameter), {"__slots__": (), "_gather": self})

    def connect(
        self, memory: Memory, plans: Sequence[BucketPlan], params: Sequence[Parameter], module: nn.Module
    ) -> None:
        """Includes the buckets beyond those it has."""
        assert memory.weights is not None, "sharded"
        if len(self._weights) == len(plans):
            return
        for plan in plans[len(self._weights) :]:
            self._weights.append(memory.weights.bucket(plan.index))
            self._ranks.append(self._ranks_of(plan.domain))
            of_bucket = [params[index] for index in plan.params]
            self._params.append(of_bucket)
            self._can_overlap.append(self._overlaps and all(type(param) is Parameter for param in of_bucket))
            self._bucket_of.update((id(param), plan.index) for param in of_bucket)
        if self._overlaps:
            for child in module.modules():
                self._wait_before(child)

    def start(self, buckets: Sequence[int], spans_of: Mapping[int, Spans]) -> None:
        """Launches the gathers of these buckets; of some only the elements ``spans_of`` are sent."""
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
        self._wait([bucket for bucket in self._works if not self._can_overlap[bucket]])

    def finish(self) -> None:
        """Waits for all weights.

        Raises:
            CollectiveError: if a gather failed, most often because another rank ended.
        """
        if self._works:
            self._wait(list(self._works))

    def wait_for_param(self, param: Parameter) -> None:
        """Waits for one parameter, and gives it its class again."""
        bucket = self._bucket_of.get(id(param))
        if bucket is None:
            self.finish()  # user code made it of a parameter's class
            param.__class__ = Parameter
        elif bucket in self._works:
            self._wait([bucket])

    def _wait(self, buckets: Sequence[int]) -> None:
        works = self._works
        emit(self._listener, EventKind.WAIT_START, 1)
        try:
            with profiler_range("wait for weights"):
                for bucket in buckets:
                    works[bucket].wait()
                    emit(self._listener, EventKind.GATHER_END, bucket, works.pop(bucket).ran_ns)
                    if self._can_overlap[bucket]:
                        _set_classes(self._params[bucket], Parameter)
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

    def _wait_before(self, module: nn.Module) -> None:
        buckets = {self._bucket_of[id(p)] for p in module._parameters.values() if id(p) in self._bucket_of}
        if not buckets:
            return

        def before_forward(_module: nn.Module, _args: Any) -> None:
            if self._works:
                self._wait([bucket for bucket in buckets if bucket in self._works])

        module.register_forward_pre_hook(before_forward, prepend=True)


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
_READS_NO_ELEMENT = frozenset((_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__get__))
