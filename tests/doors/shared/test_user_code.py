"""User code between wrap and close, row by row against "ddp", through Fabric, Accelerate and a Trainer."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megastrategy.errors import MegastrategyError
from tests.support.user_code import ACTING_STEPS, ROWS, STEPS, UserCode
from tests.support.user_code_training import Ended, Net, compare, make_optimizer, play, site_of

from ..accelerate_loops import make_accelerator
from ..fabric_loops import make_fabric
from ..fits import make_strategy, make_trainer
from ..rank_processes import Ranks, number_of_ranks

MODES: dict[str, dict[str, Any]] = {"shards": {}, "all-reduce": {"use_distributed_optimizer": False}}
Refusal = type[MegastrategyError]
Train = Callable[[str, dict[str, Any], "UserCode | None", "Refusal | None"], Ended]
"""A training of one row under "ddp" or "megatron_ddp", with the engine's options, and the refusal that is expected."""


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def in_a_loop(
    make: Callable[..., Any], name: str, options: dict[str, Any], code: UserCode | None, refusal: Refusal | None
) -> Ended:
    """Through Fabric or Accelerate, which ``make`` makes: they differ in the names of what they do."""
    door = make(name, options)
    set_up, no_sync = (door.prepare, door.no_sync) if make is make_accelerator else (door.setup, door.no_backward_sync)
    net = Net()
    model, optimizer = set_up(net, make_optimizer(net))
    ended = play(site_of(net, model, optimizer, rank(), door.backward, lambda: no_sync(model)), code, refusal)
    if make is make_accelerator:
        door.free_memory()
    return ended


class Module(pl.LightningModule):
    """Plays a row in the hooks of an automatic optimisation."""

    def __init__(self, code: UserCode | None, refusal: Refusal | None) -> None:
        super().__init__()
        self.net = Net()
        self.code, self.refusal = code, refusal
        self.ended: Ended | None = None

    def act(self, place: str) -> Any:
        if self.code is None or self.code.place != place or self.global_step not in self.acting:
            return None
        if self.refusal is None:
            return self.code.run(self.site)
        with pytest.raises(self.refusal):
            self.code.run(self.site)
        return None

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        backward = functools.partial(strategy.backward, optimizer=None)
        self.site = site_of(self.net, strategy.model, self.optimizers(use_pl_optimizer=False), rank(), backward)
        self.site.forward = self.site.direct  # as a LightningModule calls its parts

    @property
    def acting(self) -> Sequence[int]:
        # global_step counts the step that has been made
        return [step + (self.code is not None and self.code.place == "after step") for step in ACTING_STEPS]

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.site.forward()
        other = self.act("before backward")
        return loss if other is None else loss + other

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.act("before step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.act("after step")

    def on_train_end(self) -> None:
        self.ended = Ended.of(self.site)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


def with_trainer(name: str, options: dict[str, Any], code: UserCode | None, refusal: Refusal | None) -> Ended:
    module = Module(code, refusal)
    trainer = make_trainer(
        make_strategy(name, **options), max_steps=STEPS, use_distributed_sampler=False, max_epochs=-1
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(STEPS, 1)))
    assert module.ended is not None
    return module.ended


DOORS: dict[str, Train] = {
    "fabric": functools.partial(in_a_loop, make_fabric),
    "accelerate": functools.partial(in_a_loop, make_accelerator),
    "trainer": with_trainer,
}


def train_rows(door: str, mode: str, codes: Sequence[UserCode]) -> list[tuple[Ended, Ended] | str | None]:
    """Ours and the reference's, by row; or how ours ended otherwise. The reference of a row that is refused is played
    without it. A row whose method the door's own optimizer has not is left out."""
    train, plain, outcomes = DOORS[door], None, list[tuple[Ended, Ended] | str | None]()
    for code in codes:
        refusal = code.refused if mode == "shards" and number_of_ranks() > 1 else None
        reference = None
        with contextlib.suppress(AttributeError):  # the door's own optimizer has no such method
            reference = train("ddp", {}, code, None) if refusal is None else None
        if refusal is not None:
            reference = plain = plain or train("ddp", {}, None, None)
        elif reference is None:
            outcomes.append(None)
            continue
        try:
            outcomes.append((train("megatron_ddp", MODES[mode], code, refusal), reference))
        except Exception:  # noqa: BLE001 - shown with the row's name
            outcomes.append(traceback.format_exc())
    return outcomes


def rows_of(door: str, mode: str, size: int) -> list[UserCode]:
    def is_left_out(code: UserCode) -> bool:
        at_this_door = code.drives if door == "trainer" else door == "fabric" and code.ignored_by_fabric
        whole = code.needs_whole_grads and mode == "shards" and size > 1
        return code.parts_torch_ddp or code.torch_ddp_refuses or at_this_door or whole

    return [code for code in ROWS if not is_left_out(code)]


ONE_WAY = {"fabric": ("shards", 2), "accelerate": ("all-reduce", 2), "trainer": ("shards", 2)}


def rows_in_turn() -> dict[str, list[UserCode]]:
    """Deals the rows to the doors, each to one of the doors that play it, the same number to each."""
    played = {door: rows_of(door, *way) for door, way in ONE_WAY.items()}
    dealt: dict[str, list[UserCode]] = {door: [] for door in DOORS}
    for code in ROWS:
        if doors := [door for door in DOORS if code in played[door]]:
            dealt[min(doors, key=lambda door: len(dealt[door]))].append(code)
    return dealt


def assert_as_under_ddp(request: pytest.FixtureRequest, door: str, mode: str, size: int, codes: list[UserCode]) -> None:
    if door == "accelerate":
        by_rank = request.getfixturevalue("worlds").run(train_rows, door, mode, codes, size=size)
    else:
        pool: Ranks = request.getfixturevalue("ranks" if size == 2 else "one_rank")
        by_rank = pool.run(train_rows, door, mode, codes)
    failed = dict[str, str]()
    for code, *outcomes in zip(codes, *by_rank, strict=True):
        if raised := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            failed[code.name] = raised[0]
            continue
        if outcomes[0] is None:
            continue
        ours, reference = zip(*outcomes, strict=True)
        try:
            compare(ours, reference, rtol=1e-5 if code.rounds else 0.0)
        except AssertionError as error:
            failed[code.name] = str(error)
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("door", DOORS)
def test_row_is_as_under_ddp_through_one_door(request: pytest.FixtureRequest, door: str, every: int) -> None:
    """``every``: the sixth of them in ``make test``, which has all rows in a plain loop."""
    assert_as_under_ddp(request, door, *ONE_WAY[door], rows_in_turn()[door][::every])
