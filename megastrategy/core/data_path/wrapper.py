"""The wrapped module on the new data path, beside the old one until that is deleted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from ..buffers import inside_backward
from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..distributed_data_parallel import DistributedDataParallel as OldWrapper
from ..distributed_data_parallel import refuse_join as refuse_join
from ..errors import raise_closed
from ..events import EventKind, Listener
from ..module import GraphSplits, check_equal_weights, check_not_inside_torch_ddp, common_device
from ..sync import Replicas
from ..torch_ddp_surface import config_with
from .engine import Engine


class DistributedDataParallel(OldWrapper):
    """Data parallelism after Megatron-LM around any module; see the old wrapper for the arguments."""

    _engine: Engine | None  # type: ignore[assignment]

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        process_group: ProcessGroup | None = None,
        *,
        collectives: Collectives | None = None,
        listener: Listener | None = None,
        expert_mesh: DeviceMesh | None = None,
        replicas: Replicas | None = None,
        all_reduce_option: str = "DistributedDataParallelConfig(use_distributed_optimizer=False)",
        **torch_options: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        if torch_options or not isinstance(config, DistributedDataParallelConfig | None):
            config = config_with(config, torch_options, common_device(dict(module.named_parameters())))
        self.ddp_config = config or DistributedDataParallelConfig()
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.static_graph = self.ddp_config.static_graph
        if replicas is not None:
            raise NotImplementedError("the new data path has no replicas yet")
        self._engine = Engine(
            self,
            self.ddp_config,
            process_group=process_group,
            collectives=collectives,
            listener=listener,
            should_sync=self.should_sync,
            all_reduce_option=all_reduce_option,
            expert_mesh=expert_mesh,
        )
        self.device = self._engine.device

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        """The engine, with its layout, reducer and gather.

        Raises:
            ClosedError: after :meth:`close`, and in a copy.
        """
        if self._engine is None:
            raise_closed()
        return self._engine

    @_disable_dynamo(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; broadcasts its buffers first where torch DDP would."""
        training = torch.is_grad_enabled()
        engine = self._engine
        if engine is None:
            if self.training and training:
                raise_closed()
            return self._call_module(*args, **kwargs)
        splits = self._begin_forward(engine, training, args, kwargs)
        try:
            outputs = self._call_module(*args, **kwargs)
        except BaseException as error:
            if training:
                engine.reducer.forward_failed(error, syncs=self.require_backward_grad_sync)
            raise
        finally:
            if splits is not None:
                splits.end()
        return self._end_forward(engine, training, outputs)

    @_disable_dynamo
    def _begin_forward(  # type: ignore[override]
        self, engine: Engine, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GraphSplits | None:
        engine.emit(EventKind.FORWARD_START, int(training))
        if training and not inside_backward():  # inside, a checkpoint around the whole wrapper recomputes it
            check_not_inside_torch_ddp(self)
            engine.reducer.before_forward()
            engine.check_params()
            for group in engine.model_parallel.groups:
                group.before_forward(args, kwargs)
        engine.gather.before_forward()
        if self.require_forward_param_sync and self.ddp_config.broadcast_buffers:
            engine.broadcast_buffers()
        # If nothing could be sent earlier, a single graph is faster.
        is_split = training and engine.sends_under_backward and len(engine.layout.buckets) > 1
        return GraphSplits(engine.layout) if is_split else None

    @_disable_dynamo
    def _end_forward(self, engine: Engine, training: bool, outputs: Any) -> Any:  # type: ignore[override]
        sync = self.require_backward_grad_sync
        self.require_forward_param_sync = training and sync
        # A forward that runs the backwards of a batch leaves nothing for a later backward.
        if training and engine.reducer.batch is None:
            engine.reducer.after_forward(outputs, syncs=sync)
        engine.emit(EventKind.FORWARD_END, int(training))
        return outputs

    def watch_backward(self, outputs: Any) -> None:
        """Prepares the next backward, which starts from these tensors, as a forward that returned them would."""
        self.engine.reducer.prepare(outputs, syncs=self.require_backward_grad_sync)

    def finish_param_gather(self) -> None:
        """Waits for the parameters that the last step has left in flight, with ``overlap_param_gather=True``.

        Raises:
            CollectiveError: if a gather failed, most often because another rank ended.
        """
        if self._engine is not None:
            self._engine.gather.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of all parameters."""
        engine = self._engine
        if engine is None:
            nn.Module.zero_grad(self, set_to_none)
            return
        engine.zero_grads(engine.params, set_to_none=set_to_none)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns the full reduced gradient of a parameter, in memory of its own; None if it has none. Collective with
        reduce-scatter."""
        return self.engine.full_grad(param)

    def grad_norms(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of each trainable parameter's gradient: 1-D, fp64, in the order of ``layout.params``."""
        return self.engine.grad_norms(norm_type)

    def check_replicas(self) -> None:
        """Compares the weights that should be equal on all ranks. Collective, between steps.

        Raises:
            ReplicaMismatchError: on all ranks, with the first parameter that differs.
        """
        self.finish_param_gather()
        engine = self.engine
        engine.collectives.wait_for_device(engine.device, "all-gather")
        check_equal_weights(engine.named_params(), engine.local_parts, engine.model_parallel, engine.collectives)
