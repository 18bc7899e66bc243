"""``check_for_nan_in_grad``: the fit ends on all ranks and names the place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from megastrategy import MegatronDDPStrategy
from megastrategy.core.errors import NonFiniteGradError

from ..fits import BATCHES_PER_EPOCH, AwkwardModule, Fit, assert_same_fit, fit, loader, make_trainer
from ..monitored_fits import MODES, Net, half_precision
from ..rank_processes import Ranks


class BecomesNaN(AwkwardModule):
    """On rank 1 one element of a gradient is NaN in the fourth batch, and nothing else is, on any rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 3:
            self.out.bias.register_hook(poison)
        return loss


def poison(grad: Tensor) -> Tensor:
    spoiled = grad.clone()
    spoiled[2] = float("nan")
    return spoiled


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_nan_on_one_rank_ends_the_fit_on_all_with_its_place(ranks: Ranks, mode: str, accumulate: int) -> None:
    """Also if it came in a microbatch that was not sent; and the next fit in the same processes works."""
    (message, bucket, clean), (other, _, other_clean) = ranks.run(fit_until_nan, MODES[mode], accumulate)
    assert message == other
    assert f"before they were reduced: rank 1, parameter 'out.bias' (bucket {bucket}): 1 of 7 elements. Look" in message
    assert_same_fit(clean, ranks.run(fit, "megatron_ddp", strategy_options=MODES[mode])[0])
    assert all(torch.equal(clean.weights[name], weight) for name, weight in other_clean.weights.items())


def fit_until_nan(mode: dict[str, Any], accumulate: int) -> tuple[str, int, Fit]:
    options = {**mode, "check_for_nan_in_grad": True}
    places = FindsBucket()
    with pytest.raises(NonFiniteGradError) as caught:
        fit(
            "megatron_ddp",
            strategy_options=options,
            module=BecomesNaN(),
            accumulate_grad_batches=accumulate,
            callbacks=[places],
        )
    return str(caught.value), places.bucket, fit("megatron_ddp", strategy_options=options)


class FindsBucket(pl.Callback):
    """The bucket of ``out.bias``, which the first step's order of arrival may change."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        layout: Any = trainer.strategy.model.layout  # type: ignore[union-attr]
        [self.bucket] = [
            slot.bucket for spec, slot in zip(layout.params, layout.slots, strict=True) if spec.name == "out.bias"
        ]


def test_looking_for_nan_is_refused_beside_a_grad_scaler(ranks: Ranks) -> None:
    """The scaler provokes infinite gradients and skips their steps; the check would end the fit at the first."""
    ranks.run(fit_with_check_and_scaler)


def fit_with_check_and_scaler() -> None:
    plugin = half_precision()
    scaler = plugin.scaler
    trainer = make_trainer(MegatronDDPStrategy(check_for_nan_in_grad=True), plugins=[plugin])
    with pytest.raises(ValueError, match="check_for_nan_in_grad=True contradicts the GradScaler of MixedPrecision"):
        trainer.fit(Net(), loader())
    assert plugin.scaler is scaler
    assert type(plugin) is MixedPrecision
    for allowed in ({"precision": "bf16-mixed"}, {"plugins": [half_precision(enabled=False)]}):
        trainer = make_trainer(MegatronDDPStrategy(check_for_nan_in_grad=True), max_epochs=1, **allowed)
        trainer.fit(Net(), loader())
        assert trainer.global_step == BATCHES_PER_EPOCH
