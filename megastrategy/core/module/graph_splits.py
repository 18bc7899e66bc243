"""Makes torch.compile split a model's graph near the ends of buckets, as it does under torch DDP.

[Note: reductions under compiled backwards]
A compiled graph is one node for autograd: all its gradients arrive at its end, when no backward is left under which
their reduction could run. So torch splits graphs for its own DDP into graphs of about a bucket of parameters each
(``torch._dynamo.backends.distributed.DDPOptimizer``). When it compiles a frame, it reads a class attribute of torch DDP
for the object whose forward is running, and one attribute of that object: the bytes of a bucket. It makes no difference
whether the wrapper, the module or a function that calls it was compiled, as long as the frame is compiled inside the
wrapper's forward. Graphs end near the ends of buckets, not at them: torch counts parameters in the order of their use.
"""

from __future__ import annotations

import statistics
from typing import Any

from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..layout import BufferLayout


class GraphSplits:
    """Takes the place of torch's DDP while one forward runs whose graph is to be split."""

    def __init__(self, layout: BufferLayout) -> None:
        self._layout = layout
        self._before: Any = TorchDDP._active_ddp_module
        self._is_over = False
        TorchDDP._active_ddp_module = self  # type: ignore[assignment]

    @property
    def bucket_bytes_cap(self) -> int:
        """The bytes of parameters after which a graph ends, under torch's name."""
        buckets = self._layout.buckets
        buffers = self._layout.buffers
        # The median: the first buckets are smaller on purpose, and the one of an embedding may be many times larger.
        usual = statistics.median_high(bucket.numel * buffers[bucket.buffer].dtype.itemsize for bucket in buckets)
        # torch's first graph has a size of its own, and torch asserts that the others are no smaller.
        return max(usual, _DEFAULT_FIRST_BUCKET_BYTES)

    @_disable_dynamo
    def end(self) -> None:
        """Ends the replacement, after the forward or an exception in it."""
        # The attribute belongs to the process. If ranks are threads, another rank may have set it since, and the
        # previous value may have ended.
        self._is_over = True
        active: Any = TorchDDP._active_ddp_module
        while isinstance(active, GraphSplits) and active._is_over:
            active = active._before
        TorchDDP._active_ddp_module = active
