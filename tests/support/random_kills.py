"""Trainings with replicas, of random forms, in which random processes are killed or stopped, compared with a replay."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megastrategy.core import Replicas

from .replica_processes import POINTS, Kill, Place, logged_steps, run_with_kills, train_plainly
from .replicas import Case, Hook, assert_equal, assert_replayed, members_by_step

RARE_POINTS = ("question", "before meeting again", "after meeting again", "serving", "asking", "taking")
"""Only where a replica is missing, or comes back."""
SKEW_S, STOPPED_S = 20.0, (1.0, 45.0)
"""A replica that is stopped for the shorter time goes on; after the longer one it ends and comes back."""
ABSENCE_S = 12.0
"""A replica that was killed is mostly started again sooner. Others that waited for ``SKEW_S`` would go on without those
that wait for it."""
NUM_EPOCHS, NUM_BATCHES = 2, 24

OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"use_distributed_optimizer": False, "bucket_size": 10_000},
    {"overlap_param_gather": True},
    {"offload_optimizer_states": True},
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training, and what happens to its processes."""

    case: Case
    kills: tuple[Kill, ...]

    @property
    def is_replayed(self) -> bool:
        """Whether a replay has the same bits: sums of three replicas have another order."""
        return self.case.of == 2

    @classmethod
    def draw(cls, seed: int) -> Program:
        draw = random.Random(seed)
        of, ranks = draw.choice([2, 2, 3]), draw.choice([1, 1, 2])
        case = Case(
            draw.choice(["adam", "momentum", "muon"]),
            dtype=draw.choice([torch.float32, torch.float32, torch.bfloat16]),
            of=of,
            ranks=ranks,
            num_epochs=NUM_EPOCHS,
            num_batches=NUM_BATCHES,
            options=draw.choice(OPTIONS),
            accumulate=draw.choice([1, 1, 2]),
            minimum=draw.choice([1, 1, 2]),
        )
        kills: list[Kill] = []
        for number in range(draw.choice([1, 2, 2, 3])):
            slot = draw.randrange(of)
            life = sum(kill.slot == slot and kill.stopped_s != STOPPED_S[0] for kill in kills)
            point = draw.choice(POINTS if number == 0 else POINTS + RARE_POINTS)
            step = 0 if point in RARE_POINTS else draw.randint(1 if life else 2, 6)
            stopped_s = draw.choice(STOPPED_S) if draw.random() < 0.2 else 0.0
            kills.append(Kill(slot, draw.randrange(ranks), point, step=step, life=life, stopped_s=stopped_s))
        return cls(case, tuple(kills))


def check(program: Program, folder: Path) -> str:
    """Runs a program, and returns which replicas stepped together.

    Raises:
        AssertionError: if replicas end with different bits, if a batch is lost, or if a replay has other weights.
    """
    case = program.case
    found = run_with_kills(case, program.kills, folder, skew_s=SKEW_S, train=train)
    for by_rank in found[1:]:
        for mine, theirs in zip(found[0], by_rank, strict=True):
            assert_equal(mine, theirs)
    steps = members_by_step(logged_steps(folder))
    ends = {(e, b) for e in range(case.num_epochs) for b in range(case.num_batches) if case.ends_window(b)}
    assert all(len(members) >= case.minimum for members in steps.values())
    assert case.minimum > 1 or set(steps) == ends, "a batch was lost"
    if program.is_replayed:
        assert_replayed(case, found[0][0]["weights"], steps)
    return f"{sorted(set(steps.values()))}, {len(ends) - len(steps)} batches dropped"


def train(place: Place, hook: Hook) -> Any:
    """Trains, and waits for a replica each time that one is missing."""
    num_starts: dict[int, int] = {}

    def count_starts(slot: int) -> int:
        return len(list(place.folder.glob(f"ready-{slot}-0-*")))

    def wait_for_others(place: Place, replicas: Replicas) -> None:
        num_starts.update({slot: count_starts(slot) for slot in replicas.members})
        missing = set(range(place.case.of)) - set(replicas.members)
        deadline = time.monotonic() + ABSENCE_S
        while any(count_starts(slot) <= num_starts.get(slot, 0) for slot in missing):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        time.sleep(0.3 if missing else 0.0)

    return train_plainly(place, hook, wait_for_others)
