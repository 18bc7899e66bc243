"""Precisions: what differs from ``"ddp"`` on purpose equals a loop written by hand, and plugins stay the user's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.doors.features.precision import RecordScales, half_precision, scaled

from ..fits import (
    BATCHES_PER_EPOCH,
    AwkwardModule,
    Fit,
    assert_same_tensors,
    batches,
    fit,
    loader,
    make_strategy,
    make_trainer,
    weights_of,
)
from ..rank_processes import Ranks

MODES = pytest.mark.parametrize("sharded", [True, False], ids=["reduce_scatter", "all_reduce"])

# --- 16-bit weights --------------------------------------------------------------------------------------------------


class OneWeight(pl.LightningModule):
    """Eight weights of 1 that should become 1.1, by steps of 0.001: bf16 has nothing between 1 and 1.0078."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = ((self.weight - 1.1) * x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit_one_weight(name: str, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    module = OneWeight()
    trainer = make_trainer(make_strategy(name, **options), precision="bf16-true", max_epochs=50)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=1))
    return module.losses, weights_of(module)


@pytest.mark.long
@pytest.mark.sample(1)
@MODES
def test_bf16_weights_stall_under_ddp_and_learn_here(ranks: Ranks, sharded: bool) -> None:
    """200 steps of 0.001 are enough by far; without fp32 main params each of them rounds to nothing."""
    for losses, weights in ranks.run(fit_one_weight, "ddp"):
        assert len(losses) == 200
        assert set(losses) == {losses[0]}, "no step changed anything"
        assert torch.equal(weights["weight"], torch.ones(8, dtype=torch.bfloat16))
    for losses, weights in ranks.run(fit_one_weight, "megatron_ddp", use_distributed_optimizer=sharded):
        assert losses[-1] < 0.01 * losses[0]
        assert weights["weight"].dtype == torch.bfloat16
        assert torch.equal(weights["weight"], torch.full((8,), 1.1).bfloat16())


class SmallNet(pl.LightningModule):
    """Without BatchNorm, so that a loop of a few lines is all that a fit computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 11))
        self.losses: list[float] = []

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(features), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0], batch[2])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_small_net(precision: Any, accumulate: int, **strategy_options: Any) -> Fit:
    return fit(
        "megatron_ddp",
        module=SmallNet(),
        precision=precision,
        strategy_options=strategy_options,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )


def by_hand(dtype: torch.dtype, accumulate: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The same training in one process: the two ranks' gradients, added up and averaged in fp32, step fp32 copies."""
    module = SmallNet().to(dtype)
    main = [nn.Parameter(param.detach().float()) for param in module.parameters()]
    optimizer = torch.optim.AdamW(main, lr=1e-3)
    losses: list[list[float]] = [[], []]
    for epoch in range(2):
        sums = [[torch.zeros_like(param) for param in main] for _ in range(2)]
        for index, pair in enumerate(batches(epoch)):
            for rank, (features, _, targets) in enumerate(pair):
                loss = module.loss(features.to(dtype), targets)
                losses[rank].append(loss.item())
                grads = torch.autograd.grad(loss / accumulate, list(module.parameters()))
                for total, grad in zip(sums[rank], grads, strict=True):
                    total += grad.float()
            if (index + 1) % accumulate == 0 or index + 1 == BATCHES_PER_EPOCH:
                for param, first, second in zip(main, *sums, strict=True):
                    param.grad = (first + second) / 2
                optimizer.step()
                for weight, param in zip(module.parameters(), main, strict=True):
                    weight.data.copy_(param)
                sums = [[torch.zeros_like(param) for param in main] for _ in range(2)]
    return weights_of(module), losses


@MODES
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_16_bit_weights_equal_a_loop_by_hand_with_fp32_main_params(
    ranks: Ranks, precision: str, dtype: torch.dtype, accumulate: int, sharded: bool
) -> None:
    """To the bit, microbatches accumulated in fp32 included; "ddp" does neither."""
    weights, losses = by_hand(dtype, accumulate)
    results = ranks.run(fit_small_net, precision, accumulate, use_distributed_optimizer=sharded)
    for rank, result in enumerate(results):
        assert result.losses == losses[rank]
        assert_same_tensors(result.weights, weights)


# --- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@MODES
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.5}], ids=["unclipped", "clipped"])
def test_an_infinite_gradient_on_one_rank_skips_one_step_on_both_and_halves_the_scale_once(
    ranks: Ranks, sharded: bool, clip: dict[str, Any]
) -> None:
    """After the reduce-scatter the infinity is in one rank's shard, and all must agree: else weights diverge."""
    results = ranks.run(scaled, "megatron_ddp", {"use_distributed_optimizer": sharded}, overflow=True, **clip)
    for result in results:
        assert result.moved == [True] * 3 + [False] + [True] * 10
        # halved by the fourth batch; doubled after each five good ones from there
        assert result.scales == [1024.0] * 3 + [512.0] * 5 + [1024.0] * 5 + [2048.0]
    for name, value in results[0].fit.weights.items():
        assert bool(torch.isfinite(value).all()), name
        if "running" not in name:
            assert torch.equal(value, results[1].fit.weights[name]), name


def fit_two_scaled_optimizers(name: str, **options: Any) -> list[float]:
    recorder = RecordScales()
    fit(name, module=TwoScaled(), plugins=[half_precision()], callbacks=[recorder], strategy_options=options)
    return recorder.scales


class TwoScaled(AwkwardModule):
    """Two optimizers by hand, one loss scale: the first one's step is skipped in one batch, the second one's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        features, tokens, targets = batch
        overflows = self.trainer.global_rank == 1 and batch_idx == 3 and self.current_epoch == 0
        before = self.scale.detach().clone(), self.inputs.weight.detach().clone()
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = F.cross_entropy(self(features, tokens), targets)
            self.manual_backward(loss * (float("inf") if number == 0 and overflows else 1.0))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        assert torch.equal(before[1], self.inputs.weight) == (batch_idx == 3 and self.current_epoch == 0)
        assert not torch.equal(before[0], self.scale)

    def configure_optimizers(self) -> Any:
        trunk = [*self.inputs.parameters(), *self.norm.parameters()]
        rest = [*self.side.parameters(), *self.out.parameters(), *self.embed.parameters(), self.scale]
        return torch.optim.SGD(trunk, lr=0.01), torch.optim.SGD(rest, lr=0.01)


@MODES
def test_one_of_two_optimizers_is_skipped_alone(ranks: Ranks, sharded: bool) -> None:
    ours = ranks.run(fit_two_scaled_optimizers, "megatron_ddp", use_distributed_optimizer=sharded)
    assert ours[0] == ours[1] == [1024.0] * 3 + [512.0] * 11


# --- plugins ---------------------------------------------------------------------------------------------------------


class Own:
    class Half(HalfPrecision):
        """A plugin of a user's, derived from one of Lightning's, whose qualified name is not its name."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Precision, HalfPrecision, Own.Half], ids=lambda kind: kind.__qualname__)
def test_a_plugin_keeps_its_name_in_a_fit_and_its_class_after_it(ranks: Ranks, kind: type[Precision]) -> None:
    """Checkpoints store its state under the name, isinstance is what users ask, and another Trainer may have it."""
    ranks.run(check_plugin, kind)


def check_plugin(kind: type[Precision]) -> None:
    plugin = kind()
    during: list[Any] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            here = trainer.precision_plugin
            during.append((here is plugin, isinstance(here, kind), type(here).__qualname__, type(here).__module__))

    for _ in range(2):
        trainer = make_trainer(make_strategy("megatron_ddp"), plugins=[plugin], callbacks=[Look()], max_epochs=1)
        trainer.fit(AwkwardModule(), loader())
        assert during.pop() == (True, True, kind.__qualname__, kind.__module__)
        assert type(plugin) is kind
        assert vars(plugin) == vars(kind())


def test_a_loss_scaler_of_the_users_own_is_lent_and_given_back(ranks: Ranks) -> None:
    ranks.run(check_scaler)


def check_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = make_trainer(make_strategy("megatron_ddp"), plugins=[plugin], max_epochs=1)
    trainer.fit(AwkwardModule(), loader())
    assert plugin.scaler is scaler
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 128.0, "seven steps of the fit count for the user's scaler"
