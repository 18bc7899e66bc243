"""Runs an unmodified training script on local ranks, and records the events of every wrapped model in it.

The ranks are started as torchrun starts them, with this module in front of the script (``python -m
megastrategy.tools.profiling``). In such a process, which is the tool's own, every
:class:`~megastrategy.DistributedDataParallel` gets a listener, in every door: a plain loop, Lightning, Fabric or
Accelerate. The script, its arguments and its environment are the same as under torchrun.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import runpy
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..core import DistributedDataParallel, Event, EventKind, combine_listeners
from .timeline import BEGINS_STEP, ModelEvents, RankEvents, completes_step

_RANK_PROGRAM = "megastrategy.tools.profiling"


# --- in the command's process ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Profile:
    """Holds the record of a script, and how it ended.

    Attributes:
        ranks: the records, by rank; ranks without one are left out.
        failure: the error of the script, if it failed; its steps before are recorded all the same.
    """

    ranks: list[RankEvents]
    failure: str


def run_script(
    target: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    is_module: bool,
    num_ranks: int,
    skip: int,
    steps: int,
) -> Profile:
    """Runs a script (or module) to its end on ``num_ranks`` local processes, and records ``steps`` steps after the
    first ``skip``.

    Each rank writes ``events.rank<r>`` in ``folder`` as soon as they are done, so Ctrl-C after that loses nothing.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    folder.mkdir(parents=True, exist_ok=True)
    # a rank that records nothing leaves no file, and an older run's would be taken for its own
    for old in folder.glob("events.rank*"):
        old.unlink()
    ours = ["-m", _RANK_PROGRAM, str(folder.resolve()), str(skip), str(steps), *(["-m"] if is_module else [])]
    failure = ""
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(num_ranks), *ours, target, *arguments]))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        failure = f"{target}: rank {rank} ended with exit code {first.exitcode}"
    except (KeyboardInterrupt, SignalException):
        failure = f"{target} was interrupted"
    # also after a failure: steps that were recorded are shown, beside how the script ended
    records: list[RankEvents] = [pickle.loads(path.read_bytes()) for path in folder.glob("events.rank*")]
    return Profile(sorted(records, key=lambda rank: rank.rank), failure)


# --- in the script's processes ---------------------------------------------------------------------------------------


class Recorder:
    """The listener of one wrapped model: keeps the events of ``num_steps`` steps after the first ``skip``.

    Gradients that are ready are left out: a timeline does not show them.

    Args:
        on_done: called once, when the last of these steps has ended.
    """

    def __init__(self, skip: int, num_steps: int, on_done: Callable[[], None]) -> None:
        self._skip = skip
        self._end = skip + num_steps
        self._on_done = on_done
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._events: list[Event] = []
        self._reduced_bytes: list[int] = []
        self._gathered_bytes: list[int] = []
        self._num_steps = 0
        self._is_complete = False  # the step that is going on; it lasts until the next begins
        self._has_optimizer = True
        self._clock: _CudaClock | None = None
        self.is_done = False

    def follow(self, model: DistributedDataParallel) -> None:
        """Belongs to ``model`` from now on, which may go before the record is written."""
        self._model = weakref.ref(model)
        if model.device.type == "cuda":
            self._clock = _CudaClock(model.device)
        self._note_buckets(model)

    def __call__(self, event: Event) -> None:
        if self.is_done:
            return
        model = self._model() if self._model is not None else None
        assert model is not None, "it has just told"
        self._has_optimizer = model.engine.has_optimizer
        # a step lasts until the next begins: waits for new weights come after its last own event
        if event.kind in BEGINS_STEP and self._is_complete:
            self._is_complete = False
            self._num_steps += 1
        elif completes_step(event, self._has_optimizer):
            self._is_complete = True
        # unfrozen parameters add buckets, and leave those before as they are
        elif event.kind is EventKind.LAYOUT_EXTENDED:
            self._note_buckets(model)
        elif event.kind is EventKind.LAYOUT_CHANGED:
            self._note_buckets(model)
            # bucket numbers before and after a change mean different buckets, which one table cannot show
            self._start_after_this_step()
            return
        if self._num_steps >= self._skip and event.kind is not EventKind.GRAD_READY:
            self._events.append(event)
            if self._clock is not None:
                self._clock.stamp()
        # not before the next forward has waited for the last step's gathers
        if self._num_steps >= self._end and event.kind in (EventKind.FORWARD_END, EventKind.BACKWARD_START):
            self.is_done = True
            self._on_done()

    def _start_after_this_step(self) -> None:
        """Drops the events so far, which are of other buckets, and begins again after this step."""
        later = max(0, self._num_steps + 1 - self._skip)
        self._skip += later
        self._end += later
        self._events = []
        if self._clock is not None:
            self._clock.forget()

    def _note_buckets(self, model: DistributedDataParallel) -> None:
        layout = model.layout
        buffers = [layout.buffers[bucket.buffer] for bucket in layout.buckets]
        numels = [bucket.numel for bucket in layout.buckets]
        self._reduced_bytes = [n * b.grad_wire_dtype.itemsize for n, b in zip(numels, buffers, strict=True)]
        self._gathered_bytes = [n * b.dtype.itemsize for n, b in zip(numels, buffers, strict=True)]

    def take(self) -> ModelEvents:
        """Returns the events so far."""
        events = self._events if self._clock is None else self._clock.timed(self._events)
        num_skipped = min(self._num_steps + self._is_complete, self._skip)
        return ModelEvents(
            events,
            self._reduced_bytes,
            self._gathered_bytes,
            num_skipped,
            self._has_optimizer,
        )


class _CudaClock:
    """On CUDA the host runs ahead, so an event happens when the current stream gets there. Not measured yet.

    A collective on its own stream is seen only as the time from its launch until the current stream has waited for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[torch.cuda.Event] = []
        torch.cuda.synchronize(device)
        self._start_ns = time.perf_counter_ns()
        self._start = self._record()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stamp(self) -> None:
        self._stamps.append(self._record())

    def forget(self) -> None:
        self._stamps = []

    def timed(self, events: Sequence[Event]) -> list[Event]:
        torch.cuda.synchronize(self._device)
        return [
            dataclasses.replace(event, time_ns=self._start_ns + round(self._start.elapsed_time(stamp) * 1e6))
            for event, stamp in zip(events, self._stamps, strict=True)
        ]


class Recording:
    """Gives every model that is wrapped from now on a :class:`Recorder`, until one has done its steps."""

    def __init__(self, folder: Path, rank: int, skip: int, num_steps: int) -> None:
        self._folder = folder
        self._rank = rank
        self._skip = skip
        self._num_steps = num_steps
        self._recorders: list[Recorder] = []
        self._loads: list[tuple[int, int]] = []
        self._is_done = False

    def watch_loading(self, iterator: type[Any] = _BaseDataLoaderIter) -> None:
        """Notes when the process waits for a batch of any ``DataLoader``, for the rest of the process."""
        following = iterator.__next__

        @functools.wraps(following)
        def timed_next(loader: Any) -> Any:
            if self._is_done:
                return following(loader)
            start_ns = time.perf_counter_ns()
            batch = following(loader)
            self._loads.append((start_ns, time.perf_counter_ns()))
            return batch

        iterator.__next__ = timed_next

    def install(self, wrapper: type[DistributedDataParallel] = DistributedDataParallel) -> None:
        """Patches ``wrapper`` for the rest of the process. The class stays where it is, since doors have it by
        reference and derive from it already."""
        init = wrapper.__init__

        @functools.wraps(init)
        def init_with_listener(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            if self._is_done:
                return init(model, *args, **kwargs)
            recorder = Recorder(self._skip, self._num_steps, self.finish)
            script_listener = kwargs.pop("listener", None)
            listener = combine_listeners([recorder] if script_listener is None else [script_listener, recorder])
            init(model, *args, listener=listener, **kwargs)
            recorder.follow(model)
            self._recorders.append(recorder)
            return None

        wrapper.__init__ = init_with_listener  # type: ignore[method-assign,assignment]

    def finish(self) -> None:
        """Writes the records of all models and ends the recording. A second call has no effect."""
        if self._is_done:
            return
        self._is_done = True
        for recorder in self._recorders:
            recorder.is_done = True
        offset_ns = time.time_ns() - time.perf_counter_ns()
        models = [recorder.take() for recorder in self._recorders]
        told = [event.time_ns for model in models for event in model.events]
        loads = [load for load in self._loads if told and min(told) <= load[1] and load[0] <= max(told)]
        events = RankEvents(self._rank, models, offset_ns, loads)
        path = self._folder / f"events.rank{self._rank}"
        part = self._folder / f"part.rank{self._rank}"
        part.write_bytes(pickle.dumps(events))
        part.replace(path)


def main() -> None:
    """``python -m megastrategy.tools.profiling FOLDER SKIP STEPS (SCRIPT | -m MODULE) [ARGUMENTS]``, in every rank."""
    folder, skip, steps, *command = sys.argv[1:]
    recording = Recording(Path(folder), int(os.environ["RANK"]), int(skip), int(steps))
    recording.install()
    recording.watch_loading()
    try:
        run_target(command)
    finally:
        recording.finish()


def run_target(command: list[str]) -> None:
    """Runs a script (or ``-m`` and a module) in this process, as ``python script.py`` or ``python -m module`` would."""
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    target = sys.argv[0]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:  # python -m put the working directory first
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    runpy.run_path(os.path.abspath(target), run_name="__main__")


if __name__ == "__main__":
    # by its own name: __main__ is the script's from here on
    from megastrategy.tools.profiling import main as run_rank

    run_rank()
