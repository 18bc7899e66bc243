"""Engines of other projects that are measured where they are installed: DeepSpeed, Megatron-core and Dion, on gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LR = 1e-4


class Stepper:
    """Does what a training loop does with an optimizer."""

    def __init__(self, step: Callable[[], object], zero_grad: Callable[[], object]) -> None:
        self.step, self.zero_grad = step, zero_grad


Peer = tuple[nn.Module, Stepper, Callable[[], contextlib.AbstractContextManager[None]]]
"""The model, what steps, and a context for microbatches that are not the last."""


def build_deepspeed(
    module: nn.Module, stage: int, microbatch: int, accumulate: int, dtype: str, adamw: torch.optim.AdamW
) -> Peer:
    """ZeRO of a stage; gradients are accumulated and reduced in fp32."""
    import deepspeed

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())  # asked for, and not used on the host
    config = {
        "train_micro_batch_size_per_gpu": microbatch,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw, config=config, dist_init_required=False)

    @contextlib.contextmanager
    def not_last() -> Iterator[None]:
        yield
        engine.step()  # which counts microbatches

    return engine, Stepper(engine.step, lambda: None), not_last


def _megatron_ddp(module: nn.Module, *, is_bf16: bool, **options: bool) -> Any:
    """Its DDP, with gradients reduced in fp32 under backward."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    # of a transformer, which the module need not be: nothing reads these sizes
    of_model = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, bf16=is_bf16)
    of_ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, **options)
    return DistributedDataParallel(of_model, of_ddp, module)


def _megatron_peer(model: Any, optimizer: Any) -> Peer:
    def zero_grad() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()

    def step() -> None:
        model.finish_grad_sync()
        with OnHost():
            optimizer.step()

    return model, Stepper(step, zero_grad), model.no_sync


def build_megatron_core(module: nn.Module, dtype: str) -> Peer:
    """DDP and the distributed optimizer, both overlaps on."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_bf16 = dtype == "bf16"
    of_optimizer = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=0.01,
        adam_beta2=0.999,
        clip_grad=0.0,
        bf16=is_bf16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    with OnHost():
        model = _megatron_ddp(module, is_bf16=is_bf16, use_distributed_optimizer=True, overlap_param_gather=True)
        # {}: weight decay for every parameter, as torch has it
        optimizer = get_megatron_optimizer(of_optimizer, [model], {})
    return _megatron_peer(model, optimizer)


def build_megatron_core_layer_wise(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Peer:
    """DDP with an all-reduce, and the layer-wise distributed optimizer around torch's: each rank steps some parameters
    whole, and all gather what is new. For fp32 weights."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = OptimizerConfig(lr=LR, clip_grad=0.0)
    with OnHost():
        model = _megatron_ddp(module, is_bf16=False, use_distributed_optimizer=False)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        wrapped = [FP32Optimizer(optimizer, config, None) for optimizer in optimizers]
        optimizer = LayerWiseDistributedOptimizer(wrapped, config, groups)
    return _megatron_peer(model, optimizer)


def build_dion(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its Muon for torch DDP: each rank orthogonalises a part of the matrices of one shape, and gathers the updates.

    The recipe's settings, except for the coefficients of the iteration, which are its own.
    """
    import dion

    group = torch.distributed.group.WORLD
    optimizer: torch.optim.Optimizer = dion.Muon(
        matrices, distributed_mesh=group, lr=LR, nesterov=True, weight_decay=0.1, adjust_lr="rms_norm"
    )
    return optimizer


def _all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Gathers tensors of any sizes, which gloo refuses: by broadcasts, as NCCL has it."""
    for rank, received in enumerate(tensors):
        if rank == torch.distributed.get_rank(group):
            received.copy_(tensor)
        torch.distributed.broadcast(received, group=group, group_src=rank)


class OnHost(TorchFunctionMode):
    """While this is open what asks for CUDA and NCCL gets the host and gloo: Megatron-core's optimizer makes tensors
    there and looks at the names of tensor types. Nothing that it computes is changed."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = [
            mock.patch("torch.cuda.current_device", return_value="cpu"),
            mock.patch("torch.distributed.all_gather", _all_gather),
        ]

    def __enter__(self) -> OnHost:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
