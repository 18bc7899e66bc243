"""Runs the first steps of an unmodified script with another bucket size, and ends it when they are recorded.

The ranks are those of ``megastrategy profile`` (:mod:`.profiling`), with two differences in each process: every model
that is wrapped gets the bucket size, whatever the script says, and the process ends after its steps.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..core import DistributedDataParallel, DistributedDataParallelConfig
from .profiling import Recording, run_script, run_target
from .timeline import RankEvents
from .tuning import TuningError

_RANK_PROGRAM = "megastrategy.tools.short_runs"
_DEFAULT = "default"
_PATIENCE_S = 60.0


def run_with_size(
    target: str,
    arguments: Sequence[str],
    bucket_size: int | None,
    *,
    is_module: bool,
    num_ranks: int,
    skip: int,
    steps: int,
) -> list[RankEvents]:
    """Returns the records of ``steps`` steps after the first ``skip``, by rank. Raises TuningError if the script failed
    before."""
    size = _DEFAULT if bucket_size is None else str(bucket_size)
    with tempfile.TemporaryDirectory() as folder:
        done = run_script(
            target,
            arguments,
            Path(folder),
            is_module=is_module,
            num_ranks=num_ranks,
            skip=skip,
            steps=steps,
            program=(_RANK_PROGRAM, size),
        )
    if done.failure:
        raise TuningError(done.failure)
    return done.ranks


def set_bucket_size(bucket_size: int | None, wrapper: type[DistributedDataParallel] = DistributedDataParallel) -> None:
    """Patches ``wrapper`` for the rest of the process, as :meth:`.Recording.install` does."""
    init = wrapper.__init__

    @functools.wraps(init)
    def init_with_size(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(*args, **kwargs)
        config = given.arguments.get("config") or DistributedDataParallelConfig()
        given.arguments["config"] = dataclasses.replace(config, bucket_size=bucket_size)
        init(*given.args, **given.kwargs)

    wrapper.__init__ = init_with_size  # type: ignore[method-assign]


class ShortRecording(Recording):
    """Ends the process when its steps are recorded."""

    def done(self) -> NoReturn:
        """Writes the record, and ends without running another line of the script.

        It waits for the other ranks, which may still receive from this one. No exception ends the
        script: it could be caught, and a Trainer would write a checkpoint.
        """
        self.finish()
        until = time.monotonic() + _PATIENCE_S
        # as many files as ranks; one that fails leaves none, and the launcher then ends all
        num_ranks = int(os.environ["WORLD_SIZE"])
        while time.monotonic() < until and len(list(self.folder.glob("events.rank*.json"))) < num_ranks:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """``python -m megastrategy.tools.short_runs SIZE FOLDER SKIP STEPS (SCRIPT | -m MODULE) [ARGUMENTS]``"""
    size, folder, skip, steps, *command = sys.argv[1:]
    recording = ShortRecording(Path(folder), int(os.environ["RANK"]), int(skip), int(steps))
    set_bucket_size(None if size == _DEFAULT else int(size))
    recording.install()
    try:
        run_target(command)
    finally:
        recording.finish()


if __name__ == "__main__":
    # by its own name: __main__ is the script's from here on
    from megastrategy.tools.short_runs import main as run_rank

    run_rank()
