"""Raises errors if the wrapped model is inside of torch DDP, or is a stage of torch's pipelining.

Checked in a forward: when the model is wrapped, its caller does not exist yet.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

_STAGE = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_SPLIT_BACKWARDS = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules that write the weights' ``.grad`` themselves, so that no hook of a parameter fires."""


def check_not_inside_torch_ddp(model: nn.Module) -> None:
    """Raises ValueError if ``model`` is called inside of a module that torch DDP wraps: both would reduce."""
    outer = TorchDDP._active_ddp_module  # the torch DDP whose forward is running, or a GraphSplits
    if isinstance(outer, nn.Module) and any(child is model for child in outer.modules()):
        raise ValueError(
            f"this model is inside a DistributedDataParallel of torch's (around a {type(outer.module).__name__}), and "
            "both would reduce its gradients. Leave one out: train with this one alone, around the whole module, or "
            "give torch's the plain module (model.close(), then model.module)"
        )


def check_not_a_stage(model: nn.Module, *, stays_local: bool) -> None:
    """Raises ValueError in a stage of torch's pipelining, unless gradients stay local until a step that reduces them.

    The stage knows only torch's DDP and FSDP. For another wrapper it runs a synchronised backward for every microbatch,
    and divides each ``.grad`` by their number at the end, when a reduce-scatter has emptied it.

    ``stays_local``: whether gradients accumulate under ``no_sync``, and a sharded optimizer's step will reduce them.
    """
    # Without an import of pipelining there is no stage, and the walk over frames takes microseconds in each forward.
    if _STAGE not in sys.modules:
        return
    names: list[str] = []
    # A stage leaves no mark on the module that it calls: only the stack shows it.
    frame: FrameType | None = sys._getframe(1)
    schedule = ""
    while frame is not None and not schedule:
        names.append(frame.f_globals.get("__name__", ""))
        if names[-1] == _SCHEDULES:
            schedule = type(frame.f_locals.get("self")).__name__
        frame = frame.f_back
    if _STAGE not in names:
        return
    # First, since the remedies below would not help.
    if schedule in _SPLIT_BACKWARDS:
        raise ValueError(
            f"{schedule} computes the gradients of weights apart from backward, and writes them where this engine does "
            "not see them: choose a schedule with whole backwards (ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS, "
            "ScheduleInterleaved1F1B), or torch's DDP or fully_shard for the stages"
        )
    # A model that Accelerate has prepared. The stage would use torch's own reducer, which that object lacks.
    if isinstance(model, TorchDDP):
        raise ValueError(
            "a stage of torch's pipelining takes this prepared model for torch's DDP, and would ask for its reducer: "
            "wrap the stage's module in megastrategy.DistributedDataParallel by hand"
        )
    if not stays_local:
        raise ValueError(
            "a stage of torch's pipelining runs this model's backward once a microbatch: gradients would be reduced "
            "every time, and not divided by the number of microbatches. Accumulate them, and let the step reduce them "
            "once:\n"
            "    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)\n"
            "    with model.no_sync():\n"
            "        schedule.step(...)\n"
            "    optimizer.step()\n"
            'with use_distributed_optimizer=True and grad_buffer="contiguous", the defaults: with all-reduce a step '
            'takes the gradients as they are, and "pooled" ones never stay on their rank'
        )
