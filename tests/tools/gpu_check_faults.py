"""Runs gpu_check with sections that fail in every way, and with sections of its own on an engine that is broken.

A program of its own, since the check forks: ``python -m tests.tools.gpu_check_faults RESULTS PIDS [cut | lanes]``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_check import children, command, via_host
from benchmarks.gpu_check.context import Context
from benchmarks.gpu_check.lines import Line, Verdict
from benchmarks.gpu_check.ranks import Rank
from benchmarks.gpu_check.sections import Section, failures, parity, work
from megastrategy.core.collectives import BackendCollectives
from megastrategy.core.collectives.fake import FakeCollectives
from megastrategy.core.collectives.interface import Collectives
from megastrategy.core.collectives.single_rank import Done
from megastrategy.core.distributed_optimizer import DistributedOptimizer

BOX_S = 6.0


def passes(context: Context) -> None:
    context.check("small", 1, 2)
    context.measure("seen", 3.5, "ms")
    context.skip("other", "there is none")


def raises(context: Context) -> None:
    context.check("before", 0, 0)
    with context.attempt("inside"):
        raise ValueError("caught, and said")
    raise RuntimeError("not caught")


def crashes(context: Context) -> None:
    ctypes.string_at(0)


def hangs(context: Context) -> None:
    context.ranks(wait_for_the_other)


def wait_for_the_other(rank: Rank) -> None:
    _note_pid()
    if rank.number == 0:
        dist.barrier()
    else:
        _sleep_in_a_named_place()


def _sleep_in_a_named_place() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _note_pid() -> None:
    with Path(sys.argv[2]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def leaves_early(context: Context) -> None:
    os._exit(3)


def says_nothing(context: Context) -> None:
    """As a section would that has forgotten its lines."""


def exceeds(context: Context) -> None:
    context.check("large", 3, 2, detail="by one")
    context.check("unknown", float("nan"), 2)
    context.check("slow", 3, 4, at_least=True)


def loses_a_rank(context: Context) -> None:
    with context.attempt("killed"):
        context.ranks(kill_the_last)
    with context.attempt("raised"):
        context.ranks(raise_on_the_last)


def kill_the_last(rank: Rank) -> None:
    if rank.number == rank.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_on_the_last(rank: Rank) -> None:
    if rank.number == rank.size - 1:
        raise KeyError("the last rank's own words")


# --- the check's own sections, on an engine that is broken -----------------------------------------------------------


def _wait_for_nothing(handle: via_host._ViaHostHandle) -> None:
    """The fault."""


def _without_waits(context: Context) -> None:
    with mock.patch.object(via_host._ViaHostHandle, "wait", _wait_for_nothing):
        parity._compare_on(context, "contiguous", parity.RECIPES["contiguous"], context.place())


def _with_a_read(context: Context) -> None:
    clip = DistributedOptimizer.clip_grad_norm_
    namespace: dict[str, Any] = {"__name__": "megastrategy.core.made_up"}
    exec("def read(norm): return norm.item()", namespace)

    def clip_and_read(self: DistributedOptimizer, *arguments: Any) -> Tensor:
        norm = clip(self, *arguments)
        namespace["read"](norm)
        return norm

    with mock.patch.object(DistributedOptimizer, "clip_grad_norm_", clip_and_read):
        found = context.ranks(work.reads_in_steady_steps, {}, True, place=context.place("alone"))
        context.check_equal("read", "6 steps", found[0])


def _with_a_kernel_for_a_thousand_elements(context: Context) -> None:
    start = BackendCollectives.all_gather

    def in_pieces(self: BackendCollectives, tensor: Tensor) -> Any:
        for piece in tensor.split(1000):
            piece.add_(0)
        return start(self, tensor)

    with mock.patch.object(BackendCollectives, "all_gather", in_pieces):
        found = context.ranks(work.count_launches, (128, 256), {}, place=context.place("backend", 2))[0]
        context.check("more", found[1][0] - found[0][0], 0)


def _with_other_shards(context: Context) -> None:
    """A rank without peers that gathers nothing has other weights than the reference."""
    with mock.patch.object(FakeCollectives, "all_gather", return_value=Done()):
        found = context.ranks(parity.compare_fake, place=context.place("fake"))[0]
        context.check("contiguous", found["adamw-fused"][0], 0)


def _without_a_reason(context: Context) -> None:
    exchange = Collectives.max_of_bytes

    def bare(self: Collectives, numbers: Any) -> Any:
        try:
            return exchange(self, numbers)
        except RuntimeError as error:
            raise ValueError("something") from error

    with mock.patch.object(Collectives, "max_of_bytes", bare), mock.patch.object(failures, "_CONFIGS", {"default": {}}):
        failures.run(context)


_FAULTS: dict[str, Callable[[Context], None]] = {
    "A": passes,
    "B": raises,
    "C": crashes,
    "D": hangs,
    "E": leaves_early,
    "F": says_nothing,
    "G": exceeds,
    "H": loses_a_rank,
    "I": _without_waits,
    "J": _with_a_read,
    "K": _with_a_kernel_for_a_thousand_elements,
    "L": _without_a_reason,
    "M": _with_other_shards,
    "Z": passes,
}


def _sections() -> Iterator[tuple[str, Section]]:
    for letter, run in _FAULTS.items():
        yield letter, dataclasses.replace(Section(run.__name__, run, 60.0), about=run.__name__)


def _says_and_waits(context: Context) -> None:
    context.check("said before", 0, 0)
    time.sleep(600)


def _cut() -> None:
    section = Section("killed in the middle", _says_and_waits, 600.0)
    with mock.patch.object(command, "SECTIONS", MappingProxyType({"Y": section})):
        command.main(["--device", "cpu", "--json", sys.argv[1]])


def _meet(say: Callable[[Line], None], mine: str, other: str) -> None:
    folder = Path(sys.argv[2])
    (folder / mine).touch()
    while not (folder / other).exists():
        time.sleep(0.01)
    say(Line(verdict=Verdict.PASS, name=mine))


def _lanes() -> None:
    def job(mine: str, other: str) -> children.Job:
        return children.Job(
            name=mine,
            run=_meet,
            arguments=(mine, other),
            box_s=60.0,
            on_line=lambda line: print(line.name, flush=True),  # noqa: T201
        )

    children.run_lanes(children.FORK, [[job("one", "two"), job("three", "one")], [job("two", "one")]])


def _faults() -> None:
    sections = MappingProxyType(dict(_sections()))
    with mock.patch.object(command, "SECTIONS", sections):
        quick = [letter for letter in sections if letter != "D"]
        arguments = ["--device", "cpu", "--json", sys.argv[1]]
        first = command.main([*arguments, "--only", ",".join(quick)])
        second = command.main(
            ["--device", "cpu", "--json", f"{sys.argv[1]}.hang", "--only", "D,Z", "--box", str(BOX_S)]
        )
        third = command.main(["--device", "cpu", "--json", f"{sys.argv[1]}.pass", "--only", "A"])
    print("statuses", first, second, third)  # noqa: T201


if __name__ == "__main__":
    {"faults": _faults, "cut": _cut, "lanes": _lanes}[sys.argv[3] if len(sys.argv) > 3 else "faults"]()
