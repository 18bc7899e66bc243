"""Records which gradients have arrived in a backward, and which came after their bucket was launched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from ..buffers import GradBuffers, pop_late_grad
from ..config import DistributedDataParallelConfig
from ..errors import UnusedParameterError
from ..layout import Bucket


class UsedParams:
    """The parameters that one reducer's backwards have reached on this rank.

    Attributes:
        is_needed: by parameter, whether it required gradients in the last backward.
        of_static_graph: by parameter, whether any rank used it in the first synchronised backward; None without
            ``static_graph``, and before that backward.
    """

    def __init__(self, config: DistributedDataParallelConfig) -> None:
        self._config = config
        self._backward = 0  # number of the last backward
        self._last_arrival: list[int] = []  # by parameter, number of the last backward in which a gradient arrived
        self._is_reduced: list[bool] = []  # by parameter, its gradient was reduced, and no other has come since
        self.is_needed: list[bool] = []
        self.of_static_graph: list[bool] | None = None
        self._static_here: list[bool] = []

    def extend(self, num_params: int) -> None:
        """Adds so many parameters."""
        self._last_arrival += [0] * num_params
        self._is_reduced += [False] * num_params

    def begin_backward(self, params: Sequence[Parameter]) -> None:
        """Called when a backward has reached its first parameter."""
        self._backward += 1
        is_needed = [param.requires_grad for param in params]  # a frozen one is not waited for
        if is_needed != self.is_needed:  # the agreement of static_graph was about other parameters
            self.is_needed, self.of_static_graph = is_needed, None

    def begin_unprepared(self) -> None:
        """Called before gradients of backwards that no forward prepared are added, as those of one backward."""
        self._backward += 1

    def add(self, index: int) -> bool:
        """Records a gradient. Returns whether it is the first of the parameter in this backward."""
        is_first = self._last_arrival[index] != self._backward
        self._last_arrival[index], self._is_reduced[index] = self._backward, False
        return is_first

    def has_arrived(self, index: int) -> bool:
        """Whether a gradient of the parameter has arrived in this backward."""
        return self._last_arrival[index] == self._backward

    def note_reduced(self, has_grad: Sequence[bool]) -> None:
        """Records that the gradients of all parameters with ``has_grad`` are reduced."""
        self._is_reduced[:] = has_grad

    @property
    def are_exchanged(self) -> bool:
        """Whether a synchronised backward ends with an exchange of the used parameters between ranks."""
        agrees = self._config.find_unused_parameters or self._config.static_graph
        return agrees and self.of_static_graph is None

    def unreduced(self, buffers: GradBuffers) -> list[bool]:
        """Returns by parameter whether this rank has a gradient that was not reduced yet."""
        if buffers.reduces_every_backward:  # whose has_grad includes the backwards before this one
            return [last == self._backward for last in self._last_arrival]
        return [has and not done for has, done in zip(buffers.has_grad, self._is_reduced, strict=True)]

    def agree(self, has_grad: Sequence[bool], here: list[bool]) -> None:
        """Keeps the used parameters for a static graph: ``has_grad`` of all ranks, and those of this rank."""
        if self._config.static_graph:
            self.of_static_graph, self._static_here = list(has_grad), here

    def check_promises(self, buffers: GradBuffers, rank: int) -> None:
        """Raises UnusedParameterError if parameters were used against the promises of the configuration."""
        has_grad = self.unreduced(buffers)
        if self.of_static_graph is not None:
            changed = [i for i, used in enumerate(has_grad) if used != self._static_here[i]]
            promise = "static_graph=True: the same parameters as in the first synchronised backward must be used"
        elif not (self._config.find_unused_parameters or self._config.static_graph):
            changed = [i for i, used in enumerate(has_grad) if not used and buffers.params[i].requires_grad]
            promise = "find_unused_parameters=False: every parameter must be used"
        else:
            return
        if changed:
            names = [buffers.layout.params[index].name for index in changed]
            first = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
            what = "a gradient" if has_grad[changed[0]] else "no gradient"
            raise UnusedParameterError(
                f"rank {rank}: {len(names)} parameter(s) received {what} in this backward against {promise}: {first}. "
                "Drop the option (unused parameters are handled by default, at one byte a parameter a step), or freeze "
                "what is never used"
            )


class LateGrads:
    """The late gradients of one reducer; see reducer's [Note: why a late gradient is not lost].

    Attributes:
        params: those with a late gradient in this backward.
        deferred: those that ever had one; their buckets are launched at the end of backward.
    """

    def __init__(self) -> None:
        self.params: set[int] = set()
        self.deferred: set[int] = set()
        self._grads: dict[int, Tensor] = {}

    def add(self, index: int) -> None:
        """Records a gradient that has arrived while the parameter's bucket is on the wire."""
        self.params.add(index)
        self.deferred.add(index)

    def detach(self, bucket: Bucket, buffers: GradBuffers) -> None:
        """Moves the bucket's late gradients out of ``.grad``, before its reduced gradients are published there."""
        for index in self.params.intersection(bucket.params):
            self._grads[index] = pop_late_grad(buffers.params[index])

    def pop(self, bucket: Bucket) -> dict[int, Tensor]:
        """Removes the bucket's late gradients, and returns them by parameter."""
        return {index: self._grads.pop(index) for index in self.params.intersection(bucket.params)}

    def clear(self) -> None:
        """Drops the late gradients of a backward that is over."""
        self.params.clear()
        self._grads.clear()
