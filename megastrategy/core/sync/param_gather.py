"""All-gathers the new weights: after a step each rank has only those of its own shards.

[Note: waiting for a parameter at its first read]
With ``overlap_param_gather=True`` the gathers run while user code does. Until a bucket has arrived, its parameters
are instances of a subclass of Parameter, whose ``__torch_function__`` waits for the bucket, changes them back to
plain parameters and then runs the operation. So the first read of a parameter waits, whether in a module's forward, in
``state_dict``, ``deepcopy`` or an averaging callback, and later reads cost nothing. torch's own lazy modules use the
same trick (``UninitializedParameter`` changes its class). Code that does not dispatch on the tensor's class (a kernel
of an extension) is covered by a hook on the modules that hold the parameters.

A DTensor, or another subclass of Parameter, has methods and attributes that read its memory without
``__torch_function__`` (``to_local()``, ``full_tensor()``). So the step itself waits for a bucket with any of them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .. import devices
from ..buffers import ParamBuffers
from ..collectives import Collectives, Handle
from ..errors import CollectiveError
from ..events import EventKind, Listener, emit, profiler_range
from ..layout import Domain, Spans


class ParamGather:
    """All-gathers the parameter buckets, in place in ``buffers``.

    Attributes:
        missing: the buckets whose last gather failed: other ranks' shards may have the values before the step.
    """

    def __init__(
        self,
        buffers: ParamBuffers,
        ranks_of: Callable[[Domain], Collectives],
        module: nn.Module,
        listener: Listener | None = None,
    ) -> None:
        self._buffers = buffers
        self._ranks_of = ranks_of
        self._module = module
        self._listener = listener
        self._handles: dict[int, Handle] = {}  # by bucket, in the order of their start
        self._loops_stream: Any = None  # on which the gathers were started
        self.missing: set[int] = set()
        self._bucket_of: dict[int, int] = {}  # by id of a parameter that has not arrived yet
        self._hooks: dict[int, RemovableHandle] = {}  # by id of the module
        self._holders: dict[int, list[nn.Module]] = {}  # by bucket
        self._is_scripted = False
        self._num_held = -1  # number of parameters at the last search
        self._lock = threading.RLock()  # any thread may read a parameter first

    def start(self, bucket: int, spans: Spans | None = None) -> None:
        """Launches a bucket's gather. Collective: the same buckets in the same order on every rank.

        The last buckets contain the first layers, which the next forward needs first: start them first.

        ``spans``: by rank, the elements that it sends; None for equal parts.
        """
        emit(self._listener, EventKind.GATHER_START, bucket)
        with profiler_range("gather", bucket):
            flat = self._buffers.bucket(bucket)
            self._loops_stream = devices.current_stream(flat.device)
            ranks = self._owners(bucket)
            self._handles[bucket] = ranks.all_gather(flat) if spans is None else ranks.gather_spans(flat, spans)
        self.missing.discard(bucket)

    def _owners(self, bucket: int) -> Collectives:
        return self._ranks_of(self._buffers.layout.buckets[bucket].domain)

    def set_buffers(self, buffers: ParamBuffers) -> None:
        """Sets the buffers to which the parameters have moved, while no gather was under way."""
        assert not self._handles, "a gather would write to the old memory of the parameters"
        self._buffers, self._num_held = buffers, -1
        if self.missing:  # their elements are in other buckets now
            self.missing = {bucket.index for bucket in buffers.layout.buckets}

    def finish(self) -> None:
        """Waits until all parameters have arrived (on CUDA: for work that is queued from now on).

        Raises:
            CollectiveError: if a gather failed.
        """
        self._wait_for(list(self._handles))

    def wait_on_first_read(self) -> None:
        """Makes the first read of each parameter wait for its bucket."""
        # A walk of the modules takes milliseconds, so only after parameters were added.
        if self._num_held != len(self._buffers.params):
            self._find_holders()
        if self._is_scripted:
            self.finish()  # their reads of parameters cannot be noticed
        unnoticed: list[int] = []
        for bucket in self._handles:
            params = self._params_of(bucket)
            if any(type(param) is not Parameter for param in params):
                unnoticed.append(bucket)
                continue
            for param in params:
                self._bucket_of[id(param)] = bucket
                # The object stays the same in the module and in optimizers; only its operations change.
                param.__class__ = self._awaited
            for module in self._holders.get(bucket, ()):
                # Once, since a module may hold parameters of several buckets; first, since users' hooks may read them.
                if id(module) not in self._hooks:
                    self._hooks[id(module)] = module.register_forward_pre_hook(self._before_module, prepend=True)
        self._wait_for(unnoticed)

    def before_forward(self) -> None:
        """Waits before a forward if torch.compile is in use: compiled code depends on the parameters' class."""
        if self._handles and _uses_dynamo():
            self.finish()

    def finish_params(self, params: Iterable[Tensor]) -> None:
        """Waits until these parameters have arrived."""
        buckets = {bucket for param in params if (bucket := self._bucket_of.get(id(param))) is not None}
        self._wait_for(sorted(buckets, reverse=True))

    def _wait_for(self, buckets: Sequence[int]) -> None:
        # Without the lock: most parameters that are read have arrived.
        if not buckets:
            return
        with self._lock:
            # Checked again under the lock: another thread may have waited for it.
            self._wait_locked([bucket for bucket in buckets if bucket in self._handles])

    def _wait_locked(self, buckets: Sequence[int]) -> None:
        """Waits on the reader's stream and on the training loop's, since no later read will wait."""
        emit(self._listener, EventKind.WAIT_START, 1)
        try:
            with profiler_range("wait for weights"):
                for bucket in buckets:
                    self._handles[bucket].wait()
                    # After a read on another stream (an average of the weights, a checkpoint's copy) the loop's next
                    # forward would otherwise read weights for which its own stream has not waited.
                    reader = devices.current_stream(self._buffers.bucket(bucket).device)
                    if reader != self._loops_stream:
                        self._loops_stream.wait_stream(reader)
                    # Removed only now: after a failed wait it counts as missing, which a save checks.
                    emit(self._listener, EventKind.GATHER_END, bucket, self._handles.pop(bucket).ran_ns)
                    self._make_plain(bucket)
        except CollectiveError:  # later buckets will not arrive either
            pending, self._handles = list(self._handles), {}
            self.missing.update(pending)
            for bucket in pending:
                self._make_plain(bucket)
            raise
        finally:
            emit(self._listener, EventKind.WAIT_END, 1)

    def _make_plain(self, bucket: int) -> None:
        for param in self._params_of(bucket):
            # A class that other code has assigned meanwhile stays.
            if self._bucket_of.pop(id(param), None) is not None and isinstance(param, _Awaited):
                param.__class__ = Parameter  # type: ignore[assignment]
        for module in self._holders.get(bucket, ()):
            if id(module) in self._hooks and not any(id(p) in self._bucket_of for p in module._parameters.values()):
                self._hooks.pop(id(module)).remove()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        self.finish_params(param for param in module._parameters.values() if param is not None)

    def _params_of(self, bucket: int) -> list[Parameter]:
        return [self._buffers.params[index] for index in self._buffers.layout.buckets[bucket].params]

    @functools.cached_property  # A class is in cycles of references: without one the gather is freed at once.
    def _awaited(self) -> type[Parameter]:
        metaclass: Any = type(Parameter)
        # With Parameter's metaclass and name: isinstance checks of user code and of torch's lazy modules still hold.
        made: type[Parameter] = metaclass(Parameter.__name__, (_Awaited, Parameter), {"_gather": self, "__slots__": ()})
        return made

    def _find_holders(self) -> None:
        bucket_of = {
            id(param): slot.bucket for param, slot in zip(self._buffers.params, self._buffers.layout.slots, strict=True)
        }
        self._holders = {}
        self._is_scripted = False
        for module in self._module.modules():
            self._is_scripted |= isinstance(module, torch.jit.ScriptModule)
            # Only its own parameters: children have hooks of their own, and wait only for their parameters.
            for bucket in {bucket_of[id(p)] for p in module._parameters.values() if id(p) in bucket_of}:
                self._holders.setdefault(bucket, []).append(module)
        self._num_held = len(self._buffers.params)


class _Awaited:
    """A parameter whose bucket has not arrived; see [Note: waiting for a parameter at its first read]."""

    __slots__ = ()
    _gather: ParamGather

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS_NO_ELEMENT:
            # Otherwise the getter would be dispatched here again.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        awaited = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Awaited)]
        for leaf in awaited:
            if isinstance(leaf, _Awaited):  # an earlier leaf of the same bucket may have finished it
                leaf._finish()
        if not awaited:  # it is in a container that is no pytree, such as a subclass of list
            for kind in types:
                if issubclass(kind, _Awaited):
                    kind._gather.finish()
        return func(*args, **kwargs)

    def _finish(self) -> None:
        self._gather.finish_params([self])  # type: ignore[list-item]
        if isinstance(self, _Awaited):  # user code has created it from a parameter's class
            self.__class__ = Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._finish()
        return self.__deepcopy__(memo)  # of its present class


_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad
_DEVICE: Any = Tensor.device
_DTYPE: Any = Tensor.dtype
_READS_NO_ELEMENT = frozenset(
    (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__get__, _DEVICE.__get__, _DTYPE.__get__)
)
"""Attributes that training loops read of every parameter between steps, and models of their first one in a forward, to
move inputs to its device."""


def _uses_dynamo() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
