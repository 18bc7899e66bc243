"""Runs an unmodified script as one of two ranks, and counts what the engine holds once a step is done.

python -m tests.tools.held_bytes FOLDER (SCRIPT | -m MODULE) [ARGUMENTS]

Nothing here is pretended: the script's own process group, ranks, data and steps. When the next step begins the bytes
are written into FOLDER, and the rank ends.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from megastrategy import DistributedDataParallel
from megastrategy.core import Event, combine_listeners
from megastrategy.tools.profiling import run_target
from megastrategy.tools.timeline import BEGINS_STEP, completes_step
from tests.core.properties.test_memory import bytes_of
from tests.support.data_path import memory_of
from tests.support.patience import HANG_S


def held(models: list[DistributedDataParallel], optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Parameters, the modules' buffers, the engine's own, and what is stepped with its state."""
    for model in models:
        yield from (*model.module.parameters(), *model.module.buffers())
        flats, grads = memory_of(model)
        yield from [*flats, *grads]
    for optimizer in optimizers:
        yield from (tensor.grad for tensor in optimizer.state if isinstance(tensor, Tensor) and tensor.grad is not None)
        yield from optimizer.state
        yield from (leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor))
        yield from (param for group in optimizer.param_groups for param in group["params"])


def end_together(folder: Path, nbytes: int) -> None:
    """Writes this rank's bytes, and ends once the other has, too: it still may wait for a message of this one's."""
    rank = int(os.environ["RANK"])
    part = folder / f"part{rank}"
    part.write_text(str(nbytes))
    part.rename(folder / f"rank{rank}")
    deadline = time.monotonic() + HANG_S
    while not (folder / f"rank{1 - rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(folder: Path, command: list[str]) -> None:
    models: list[DistributedDataParallel] = []
    optimizers: dict[int, torch.optim.Optimizer] = {}
    begun: set[int] = set()
    complete: set[int] = set()
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def init_with_listener(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        number = len(models)
        models.append(model)

        def listen(event: Event) -> None:
            if event.kind in BEGINS_STEP:
                begun.add(number)
            if number in complete and event.kind in BEGINS_STEP:
                end_together(folder, bytes_of(list(held(models, list(optimizers.values())))))
            elif completes_step(event, model.engine.has_optimizer):
                complete.add(number)

        given = kwargs.pop("listener", None)
        init(model, *args, listener=combine_listeners([listen] if given is None else [given, listen]), **kwargs)

    DistributedDataParallel.__init__ = init_with_listener  # type: ignore[method-assign,assignment]

    def see_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A step before the first forward is a trial on copies, which are freed afterwards.
        if begun:
            optimizers[id(optimizer)] = optimizer

    register_optimizer_step_post_hook(see_step)
    run_target(command)


if __name__ == "__main__":
    # by its own name: __main__ is the script's from here on
    from tests.tools.held_bytes import main as run_rank

    run_rank(Path(sys.argv[1]), sys.argv[2:])
