"""``SkipOutlierSteps``: an outlier changes nothing, on all ranks alike."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from megastrategy import SkipOutlierSteps

from ..fits import make_strategy, make_trainer
from ..rank_processes import Ranks, number_of_ranks
from ..resumed_fits import Regression


class Spiky(Regression):
    """``factors``: of the losses, by step; ``bad_rank``: the only rank with them, or None for all."""

    def __init__(self, size: int, factors: dict[int, float], bad_rank: int | None) -> None:
        super().__init__(size)
        self.factors, self.bad_rank = factors, bad_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_bad = self.bad_rank in (None, self.global_rank)
        return loss * self.factors.get(self.trainer.global_step, 1.0) if is_bad else loss


class Watches(pl.Callback):
    """The norms before anything is skipped, and the weights after each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights.append(self._weights(pl_module))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if hasattr(optimizer, "grad_norm"):
            self.norms.append(float(optimizer.grad_norm()))
        else:
            grads = [param.grad for param in pl_module.parameters() if param.grad is not None]
            self.norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.weights.append(self._weights(pl_module))

    def _weights(self, module: Any) -> Tensor:
        return torch.cat([param.detach().flatten() for param in module.parameters()])


@dataclasses.dataclass
class Skipping:
    """The training of one rank.

    Attributes:
        skipped: the steps that left the weights alone, from 0.
        num_skipped: what the callback says.
        num_updates: what the optimizer's state says.
    """

    norms: list[float]
    skipped: list[int]
    num_skipped: int
    num_updates: int
    weights: Tensor


def fit_skipping(
    name: str,
    factors: dict[int, float],
    *,
    size: int = 36,
    bad_rank: int | None = None,
    save: str | None = None,
    resume: str | None = None,
    strategy_options: dict[str, Any] | None = None,
    rule: dict[str, Any],
    **options: Any,
) -> Skipping:
    module, watches, skipper = Spiky(size, factors, bad_rank), Watches(), SkipOutlierSteps(**rule)
    strategy = make_strategy(name, **strategy_options or {})
    trainer = make_trainer(strategy, callbacks=[watches, skipper], devices=number_of_ranks(), **options)
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    pairs = zip(watches.weights, watches.weights[1:], strict=False)
    skipped = [step for step, (before, after) in enumerate(pairs) if torch.equal(before, after)]
    [optimizer] = trainer.optimizers
    steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()} if name == "ddp" else set()
    return Skipping(watches.norms, skipped, skipper.num_skipped, max(steps, default=0), watches.weights[-1])


NUM_STEPS = 18  # three epochs of 36 samples, batches of 3 on 2 ranks
SPIKES = {9: 1e4, 13: 1e5}


def outliers(norms: list[float], sigmas: float, window: int) -> list[int]:
    """By the definition."""
    found = []
    for step, norm in enumerate(norms):
        before = norms[max(0, step - window) : step]
        if len(before) >= window // 2 and norm > statistics.mean(before) + sigmas * statistics.stdev(before):
            found.append(step)
    return found


def on_both(ranks: Ranks, factors: dict[int, float], **options: Any) -> list[Skipping]:
    """The training of our ranks: alike, and as under "ddp"."""
    ddp = ranks.run(fit_skipping, "ddp", factors, max_epochs=3, **options)
    ours = ranks.run(fit_skipping, "megatron_ddp", factors, max_epochs=3, **options)
    for one, expected in zip(ours, ddp, strict=True):
        assert one.skipped == ddp[0].skipped
        assert one.num_skipped == expected.num_skipped == len(one.skipped)
        assert torch.equal(one.weights, expected.weights)
        assert one.norms == pytest.approx(expected.norms, rel=1e-5, nan_ok=True)
        assert one.norms == pytest.approx(ours[0].norms, rel=0, abs=0, nan_ok=True), "to the bit"
    assert ddp[0].num_updates == NUM_STEPS - len(ddp[0].skipped), "nor has the optimizer's state changed"
    return ours


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_norm_over_the_limit(ranks: Ranks, sharded: bool) -> None:
    options = {"strategy_options": None if sharded else {"use_distributed_optimizer": False}}
    rule = {"max_norm": 100.0, "sigmas": None}
    ddp = ranks.run(fit_skipping, "ddp", SPIKES, max_epochs=3, rule=rule)
    ours = ranks.run(fit_skipping, "megatron_ddp", SPIKES, max_epochs=3, rule=rule, **options)
    for one, expected in zip(ours, ddp, strict=True):
        assert one.skipped == expected.skipped == [9, 13]
        assert torch.equal(one.weights, expected.weights)
    assert ddp[0].num_updates == NUM_STEPS - 2


def test_one_that_stands_out(ranks: Ranks) -> None:
    """The second spike does not, beside the first: until that has left the window."""
    [one, _] = on_both(ranks, SPIKES, rule={"sigmas": 4.0, "window": 8})
    assert one.skipped == outliers(one.norms, 4.0, 8)
    assert 9 in one.skipped


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_that_is_not_finite_on_one_rank(ranks: Ranks, bad: float) -> None:
    [one, _] = on_both(ranks, {9: bad}, bad_rank=1, rule={"sigmas": 50.0, "window": 8})
    assert one.skipped == [9]
    assert not math.isfinite(one.norms[9])


def test_clipping_and_accumulation(ranks: Ranks) -> None:
    rule = {"max_norm": 100.0, "sigmas": None}
    options = {"max_epochs": 3, "gradient_clip_val": 0.01, "accumulate_grad_batches": 3, "rule": rule}
    ddp = ranks.run(fit_skipping, "ddp", {2: 1e5}, **options)
    ours = ranks.run(fit_skipping, "megatron_ddp", {2: 1e5}, **options)
    for one, expected in zip(ours, ddp, strict=True):
        assert one.num_skipped == expected.num_skipped == 1
        torch.testing.assert_close(one.weights, expected.weights, rtol=1e-5, atol=1e-7)


def test_a_resumed_run_skips_what_the_whole_run_does(ranks: Ranks, tmp_path: Path) -> None:
    rule = {"sigmas": 4.0, "window": 8}
    whole = ranks.run(fit_skipping, "megatron_ddp", SPIKES, max_epochs=3, rule=rule)
    path = str(tmp_path / "half.ckpt")
    half = ranks.run(fit_skipping, "megatron_ddp", SPIKES, max_epochs=1, rule=rule, save=path)
    rest = ranks.run(fit_skipping, "megatron_ddp", SPIKES, max_epochs=3, rule=rule, resume=path)
    for first, second, expected in zip(half, rest, whole, strict=True):
        assert first.norms + second.norms == expected.norms
        assert second.num_skipped == expected.num_skipped > 0
        assert torch.equal(second.weights, expected.weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_norm": 0.0}, "max_norm=0.0"), ({"sigmas": -1.0}, "sigmas=-1.0"), ({"window": 3}, "window=3")],
)
def test_what_makes_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SkipOutlierSteps(**options)


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("not reached")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_manual_optimization_decides_itself() -> None:
    trainer = pl.Trainer(
        callbacks=[SkipOutlierSteps()],
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(MisconfigurationException, match="decides itself"):
        trainer.fit(Manual(), torch.utils.data.DataLoader(torch.ones(2, 2)))
