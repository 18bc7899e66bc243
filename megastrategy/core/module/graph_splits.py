"""Lets torch.compile split a model's graph where buckets end, as it does under torch DDP.

[Note: reductions under compiled backwards]
A compiled graph is one node for autograd: all its gradients come at its end, when there is no backward left to hide
their reduction under. So torch splits what it compiles for its own DDP into graphs of about a bucket of parameters each
(``torch._dynamo.backends.distributed.DDPOptimizer``). It asks a class attribute of torch DDP whose forward is under way
when it compiles a frame, and reads one attribute of that object: how many bytes a bucket has. Whether the wrapper, the
module or a function that calls it was compiled makes no difference, as long as the frame is compiled inside the
wrapper's forward. Pieces end near the ends of buckets, not at them: torch counts parameters in the order of their use.
"""

from __future__ import annotations

import statistics
from typing import Any

from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..layout import BufferLayout


class GraphSplits:
    """In the place of torch's DDP while one forward runs whose graph shall be split; made anew for each."""

    def __init__(self, layout: BufferLayout) -> None:
        self._layout = layout
        self._before: Any = TorchDDP._active_ddp_module
        self._is_over = False
        TorchDDP._active_ddp_module = self  # type: ignore[assignment]

    @property
    def bucket_bytes_cap(self) -> int:
        """The bytes of parameters that end a piece of the graph, under torch's name for it."""
        buckets, buffers = self._layout.buckets, self._layout.buffers
        # The middle one: the first are smaller on purpose, and one that holds an embedding may be many times larger.
        usual = statistics.median_high(bucket.numel * buffers[bucket.buffer].dtype.itemsize for bucket in buckets)
        # torch's first piece has a size of its own, and torch asserts that the others are no smaller.
        return max(usual, _DEFAULT_FIRST_BUCKET_BYTES)

    @_disable_dynamo
    def end(self) -> None:
        """The forward has ended, be it in an exception."""
        # The attribute is the process's. Where ranks are threads it may be another rank's by now, which stays; and
        # what was there before may have ended meanwhile.
        self._is_over = True
        active: Any = TorchDDP._active_ddp_module
        while isinstance(active, GraphSplits) and active._is_over:
            active = active._before
        TorchDDP._active_ddp_module = active
