"""A case under megastrategy and under its reference, compared."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.layout import build as layout_build

from ..support.comparison import assert_equal
from ..support.ranks import RankError, run_ranks
from ..support.thread_checkpoints import saving_among_threads
from ..support.training import assert_same_state
from .cases import Action, Case, Freeze, Resume, Thaw
from .players import Clock, Emulation, OfTorchDDP, Ours, Player, Saved

TORCHS_FAILURES = (
    "This indicates a bug in DDP implementation",
    "Expected to have finished reduction in the prior iteration",
    "Expected to mark a variable ready only once",
)


@dataclasses.dataclass
class Outcome:
    """Holds what one script left on one rank. ``weights``: the rank's own, with module buffers."""

    weights: dict[str, Tensor]
    saved: Saved
    norms: list[Tensor]
    read: list[Any]
    clock: Clock


@dataclasses.dataclass
class Script:
    """A part of a case, up to its end or a :class:`Resume`. ``directory``: whether the next goes on from one."""

    ranks: int
    actions: list[Action] = dataclasses.field(default_factory=list)
    directory: bool = False


def scripts(case: Case) -> list[Script]:
    """Divided where the program resumes; nothing is resumed with something frozen."""
    made, frozen = [Script(case.ranks)], set[int]()
    for action in case.program:
        if isinstance(action, Resume):
            if not frozen:
                made[-1].directory = action.directory
                made.append(Script(action.ranks))
            continue
        made[-1].actions.append(action)
        if isinstance(action, Freeze) and action.layer < len(case.layers):
            frozen.add(action.layer)
        elif isinstance(action, Thaw):
            frozen.discard(action.layer)
    return made


def play(case: Case, kind: Callable[..., Any], folder: Path) -> list[list[Outcome]]:
    """Plays a case; outcomes by script and rank. ``folder``: where directories are written."""
    outcomes: list[list[Outcome]] = []
    loads: Path | None = None
    for number, script in enumerate(scripts(case)):
        before = outcomes[-1][0] if outcomes else None
        saves = folder / f"script {number}" if script.directory and kind is Ours else None

        def on_rank(
            rank: int,
            group: ProcessGroup,
            script: Script = script,
            before: Outcome | None = before,
            saves: Path | None = saves,
            loads: Path | None = loads,
        ) -> Outcome:
            player = kind(case, rank, dataclasses.replace(before.clock) if before else Clock(), group)
            if before is not None and loads is not None:
                player.load_directory(loads, before.saved)
            elif before is not None:
                player.load(before.saved)
            return finish(player, script, saves)

        if kind is Emulation:
            player = Emulation(case, dataclasses.replace(before.clock) if before else Clock(), script.ranks)
            if before is not None:
                player.load(before.saved)
            outcome = finish(player, script, None)
            own = [player.weights(rank) for rank in range(script.ranks)]
            outcomes.append([dataclasses.replace(outcome, weights=weights) for weights in own])
        else:
            outcomes.append(run_ranks(script.ranks, on_rank))
        loads = saves
    return outcomes


def finish(player: Player, script: Script, saves: Path | None) -> Outcome:
    for action in script.actions:
        player.play(action)
    if isinstance(player, Ours) and saves is not None:
        player.save_directory(saves)
    outcome = Outcome(player.weights(player.rank), player.save(), player.norms, player.read, player.clock)
    if isinstance(player, Ours):
        player.wrapped.close()
    return outcome


def several_default_buckets() -> contextlib.AbstractContextManager[Any]:
    """``bucket_size=None`` means several buckets for these small models as well."""
    return mock.patch.object(layout_build, "default_bucket_size", lambda numel, _: max(1, numel // 8))


def main_that_counts(saved: Saved, name: str) -> Tensor:
    """A load uses the weight if the main param does not round to it: the weight was changed since."""
    main = saved.main[name]
    weight = saved.weights[name]
    return torch.where(main.to(weight.dtype) == weight, main, weight.float())


def check(case: Case) -> None:
    """Raises an AssertionError that says what differs, in which script."""
    with tempfile.TemporaryDirectory() as folder, saving_among_threads(), several_default_buckets():
        ours = play(case, Ours, Path(folder))
        try:
            reference = play(case, OfTorchDDP if case.has_reference_in_ddp else Emulation, Path(folder))
        except RankError as error:
            # torch DDP's own errors, of parameters that are used now and then, after user code has dropped gradients or
            # left out a backward.
            if not any(text in str(error) for text in TORCHS_FAILURES):
                raise
            return
    for number, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        for rank, (outcome, expected) in enumerate(zip(mine, theirs, strict=True)):
            where = f"script {number}, rank {rank}"
            assert outcome.weights.keys() == expected.weights.keys(), where
            for name, value in expected.weights.items():
                assert torch.equal(outcome.weights[name], value), f"{where}: {name} differs"
            assert_same_norms(case, outcome.norms, expected.norms, where)
            assert_equal(outcome.read, expected.read, where=f"{where}, read")
        assert_same_saved(mine[0].saved, theirs[0].saved, f"script {number}")


def assert_same_norms(case: Case, ours: list[Tensor], expected: list[Tensor], where: str) -> None:
    """Within some last bits, of the coarsest dtype that any gradient may have."""
    dtypes = [torch.float32] if case.sums_in_fp32 else [getattr(torch, layer.dtype) for layer in case.layers]
    relative = 4 * max(torch.finfo(dtype).eps for dtype in dtypes)
    for mine, theirs in zip(ours, expected, strict=True):
        if bool(torch.isfinite(theirs)):
            assert torch.allclose(mine.float(), theirs, rtol=relative), f"{where}: norm {mine}, expected {theirs}"
        else:
            assert not bool(torch.isfinite(mine)), f"{where}: norm {mine}, expected {theirs}"


def assert_same_saved(ours: Saved, expected: Saved, where: str) -> None:
    for name in expected.main:
        mine, theirs = (main_that_counts(saved, name) for saved in (ours, expected))
        assert torch.equal(mine, theirs), f"{where}: main param of {name} differs"
    assert ours.scaler == expected.scaler, where
    assert_same_state(ours.optimizer, expected.optimizer)
