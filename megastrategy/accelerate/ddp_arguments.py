"""Translates accelerate's ``DistributedDataParallelKwargs`` to options of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .plugin import MegatronDDPPlugin


def translated_arguments(handler: Any, plugin: MegatronDDPPlugin, log: Callable[[str], None]) -> dict[str, Any]:
    """Returns torch DDP's arguments, and a logged option in place of a hook that sends gradients in 16 bits.

    Raises:
        ValueError: for another hook, or if gradients are all-reduced.
    """
    if handler is None:
        return {}
    arguments: dict[str, Any] = handler.to_kwargs()
    hook = str(handler.comm_hook)
    wrapper = str(handler.comm_wrapper)
    # accelerate reads the wrapper only if there is a hook
    if hook == "no":
        return arguments
    sent = wrapper if wrapper != "no" else hook
    if {hook, sent} - {"fp16", "bf16"}:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={hook}): this engine reduces the buckets, and knows FP16 and "
            "BF16. Use one of these, or accelerate's own Accelerator"
        )
    if not plugin.use_distributed_optimizer:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={hook}) contradicts use_distributed_optimizer=False: an "
            "all-reduce sends gradients as they are. Drop one of the two"
        )
    line = (
        f"accelerate's comm_hook={hook} became grad_wire_dtype={sent!r}: gradients are sent in 16 bits, and "
        "summed in 32 by the rank that steps with them"
        if plugin.grad_wire_dtype in (None, sent)
        else f"grad_wire_dtype={plugin.grad_wire_dtype!r} goes before accelerate's comm_hook={hook}"
    )
    log(f"megatron_ddp: {line}")
    return arguments | {"grad_wire_dtype": sent}
