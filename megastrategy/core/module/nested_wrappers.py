"""Refuses callers of the wrapped model's forward that would reduce its gradients too, or scale what is no longer there.

Neither can be told when the model is wrapped, since what calls it comes later.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

_STAGE = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_SPLIT_BACKWARDS = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules that write the weights' ``.grad`` themselves, so that no hook of a parameter tells of it."""


def check_not_inside_torch_ddp(model: nn.Module) -> None:
    """Raises ValueError if ``model`` is called as a part of a module that torch DDP wraps: both would reduce."""
    outer = TorchDDP._active_ddp_module  # torch's own note of whose forward is under way; or a GraphSplits of ours
    if isinstance(outer, nn.Module) and any(child is model for child in outer.modules()):
        raise ValueError(
            f"this model is inside a DistributedDataParallel of torch's (around a {type(outer.module).__name__}), and "
            "both would reduce its gradients. Leave one out: train with this one alone, around the whole module, or "
            "give torch's the plain module (model.close(), then model.module)"
        )


def check_not_a_stage(model: nn.Module, *, stays_local: bool) -> None:
    """Raises ValueError in a stage of torch's pipelining, unless gradients stay local until a step that reduces them.

    The stage knows torch's DDP and FSDP only. Anything else gets a synchronised backward for every microbatch; and at
    the end the sum in each ``.grad`` is divided by their number, which a reduce-scatter has emptied by then.

    Args:
        model: whose forward is called.
        stays_local: it accumulates without sending, under ``no_sync``, and a sharded optimizer's step will reduce.
    """
    # Without an import of pipelining there are no stages, and each forward saves the walk over frames.
    if _STAGE not in sys.modules:
        return
    names: list[str] = []
    # A stage leaves no mark on what it calls, so the stack is the only witness.
    frame: FrameType | None = sys._getframe(1)
    schedule = ""
    while frame is not None and not schedule:
        names.append(frame.f_globals.get("__name__", ""))
        if names[-1] == _SCHEDULES:
            schedule = type(frame.f_locals.get("self")).__name__
        frame = frame.f_back
    if _STAGE not in names:
        return
    # First, since it is wrong however the model is wrapped: nothing else that is said below would help.
    if schedule in _SPLIT_BACKWARDS:
        raise ValueError(
            f"{schedule} computes the gradients of weights apart from backward, and writes them where this engine does "
            "not see them: choose a schedule with whole backwards (ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS, "
            "ScheduleInterleaved1F1B), or torch's DDP or fully_shard for the stages"
        )
    # As Accelerate prepares it. The stage would then go on to torch's own reducer, which that object lacks.
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
