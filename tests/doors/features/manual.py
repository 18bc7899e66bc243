"""Manual optimization: who backs, who steps, when gradients are sent, and over which parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ..fits import AwkwardModule, Fit, adamw, fit
from ..matrix import Beyond, Feature
from .modules import fitted


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def manual(name: str, strategy_options: dict[str, Any], kind: type[pl.LightningModule], **options: Any) -> Fit:
    return fit(name, strategy_options=strategy_options, module=kind(), **{"max_epochs": 1, **options})


class Manual(AwkwardModule):
    """One optimizer, stepped by hand."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        features, tokens, targets = batch
        loss = F.cross_entropy(self(features, tokens), targets)
        self.losses.append(loss.item())
        return loss

    def halves(self, batch: Any) -> list[list[Tensor]]:
        """A microbatch each; one of two samples at least, for BatchNorm."""
        return [[part[:2] for part in batch], [part[1:] for part in batch]]


class OncePerBatch(Manual):
    """A backward and a step in every batch. What BatchNorm has seen shows in the losses of validation."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class LocalThenSynchronised(Manual):
    """Two backwards before a step; the first one's gradients stay where they are."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first, second = self.halves(batch)
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(first))
        self.manual_backward(self.loss(second))
        optimizer.step()


class LocalOverBatches(Manual):
    """A step every third batch, and with the last; local until then."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        steps = batch_idx % 3 == 2 or self.trainer.is_last_batch
        block = self.trainer.strategy.block_backward_sync  # type: ignore[attr-defined]
        with contextlib.nullcontext() if steps else block():
            self.manual_backward(self.loss(batch))
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class TwiceSynchronised(Manual):
    """Two backwards before a step, both sent, as in code without ``no_sync``.

    SGD: in front of BatchNorm a bias has no gradient but rounding, which AdamW would make a step of. Whole batches:
    BatchNorm over two samples makes much of a rounding too.
    """

    def __init__(self) -> None:
        super().__init__(optimizer=sgd)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for factor in (1.0, 0.3):
            self.manual_backward(factor * self.loss(batch))
        optimizer.step()


class NoStepInOddBatches(TwiceSynchronised):
    """Synchronised gradients that wait for the next batch's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


class ZeroesTheModule(Manual):
    """Drops the gradients of every second batch through the module itself, after the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.zero_grad()
        self.optimizers().step()
        self.optimizers().zero_grad()


class NothingToLearn(Manual):
    """The last rank has a batch without anything to learn from, and takes part with a loss of zero.

    To return early there leaves the other rank alone in its backward, and in Lightning 2.6 both wait, under "ddp" too.
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if batch_idx == 3 and self.global_rank == self.trainer.world_size - 1:
            loss = loss * 0.0
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Closures(Manual):
    """The backward in a closure that the optimizer calls."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class ZeroesAfterEachStep(TwiceSynchronised):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class StepsTwice(ZeroesAfterEachStep):
    """With the same gradients under "ddp"."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().step()
        self.optimizers().zero_grad()


class Checkpointed(pl.LightningModule):
    """Layers behind re-entrant checkpoints; the first gradient comes from inside one.

    The inner backwards end before the outer one, whose loss the wrapped forward never returned.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.inputs = nn.Linear(5, 9)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.head = nn.Linear(9, 11)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, _, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.inputs(features)
        for layer in (*self.layers, self.head):
            hidden = checkpoint(lambda x, layer=layer: layer(torch.tanh(x)), hidden, use_reentrant=True)
        loss = F.cross_entropy(hidden, targets)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Optimizer:
        return adamw(self.parameters())


def checkpointed(name: str, strategy_options: dict[str, Any]) -> Fit:
    return fitted(name, strategy_options, Checkpointed(), all_used=True)


# --- two optimizers --------------------------------------------------------------------------------------------------


class TwoOptimizers(Manual):
    """One for the trunk and one for the rest, the second in every other batch; toggled by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for number, optimizer in enumerate(self.optimizers()):
            if number == 0 or batch_idx % 2 == 1:
                self.toggle_optimizer(optimizer)
                self.step_with(optimizer, batch)
                self.untoggle_optimizer(optimizer)

    def step_with(self, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        trunk = [*self.inputs.parameters(), *self.norm.parameters()]
        rest = [*self.side.parameters(), *self.out.parameters(), *self.embed.parameters(), self.scale]
        return adamw(trunk), sgd(rest)


class NotToggled(TwoOptimizers):
    """Each backward reaches the other's parameters as well, whose gradients add up until they are zeroed."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            self.step_with(optimizer, batch)


class ToggledModel(TwoOptimizers):
    """Lightning's recipe for accumulation with two optimizers: ``toggle_model(sync_grad=...)`` around a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        steps = batch_idx % 2 == 1 or self.trainer.is_last_batch
        for optimizer in self.optimizers():
            with optimizer.toggle_model(sync_grad=steps):
                self.manual_backward(self.loss(batch))
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        adam, other = super().configure_optimizers()
        return sgd(adam.param_groups[0]["params"]), other


class SharedBothStep(TwoOptimizers):
    """Both optimizers hold every parameter, and step with the gradients of one backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters()), sgd(self.parameters())


# --- Lightning's GAN -------------------------------------------------------------------------------------------------


class GAN(pl.LightningModule):
    """The recipe of Lightning's documentation ("Use Multiple Optimizers (like GANs)"): one step each, nothing toggled.

    The generator's backward leaves gradients in the discriminator, which are zeroed before its next backward.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def noise(self, rank: int, batch_idx: int, size: int) -> Tensor:
        return torch.randn(size, 3, generator=torch.Generator().manual_seed(100 * rank + batch_idx))

    def loss_d(self, real: Tensor, fake: Tensor) -> Tensor:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        return F.binary_cross_entropy_with_logits(self.discriminator(real), ones) + F.binary_cross_entropy_with_logits(
            self.discriminator(fake.detach()), zeros
        )

    def loss_g(self, fake: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.discriminator(fake), torch.ones(len(fake), 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_g, opt_d = self.optimizers()
        real = batch[0]
        fake = self.generator(self.noise(self.global_rank, batch_idx, len(real)))
        loss_d = self.loss_d(real, fake)
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        loss_g = self.loss_g(fake)
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.losses += [loss_d.item(), loss_g.item()]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.5, 0.999))
            for network in (self.generator, self.discriminator)
        ]


# --- optimizers that need a closure ----------------------------------------------------------------------------------


class LBFGS(pl.LightningModule):
    """Without BatchNorm, since a step evaluates the module several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 11))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, _, targets = batch
        loss = F.cross_entropy(self.net(features), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class ManualLBFGS(LBFGS):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = LBFGS.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def row(name: str, kind: type[pl.LightningModule], **options: Any) -> Feature:
    return Feature("Manual optimization", name, manual, {"kind": kind}, **options)


SEVERAL = "several synchronised backwards before a step"
UNUSED = 'under `"ddp"` only with `find_unused_parameters=True`, which it asks for in the second backward'
REFUSED = "LBFGS cannot be sharded"

FEATURES = [
    Feature(
        "Manual optimization",
        "BatchNorm's statistics and the metrics of validation",
        manual,
        {"kind": OncePerBatch, "max_epochs": 2, "val_check_interval": 3},
        note="module buffers are broadcast before the first forward and never again: each rank has its own "
        'statistics, as under `"ddp"`; `Trainer(sync_batchnorm=True)` makes them one',
    ),
    row("two backwards, the first in block_backward_sync", LocalThenSynchronised),
    row("a step every third batch, block_backward_sync before", LocalOverBatches),
    row("a step every other batch, all synchronised", NoStepInOddBatches, rtol=1e-6, note=SEVERAL, often=True),
    Feature(
        "Manual optimization",
        "a step every other batch, validation between",
        manual,
        {"kind": NoStepInOddBatches, "val_check_interval": 2},
        note="before validation Lightning zeroes gradients, including those that wait for a step",
    ),
    row("optimizer.step(closure)", Closures, often=True),
    row("zero_grad() of the module between backward and step", ZeroesTheModule),
    row("a loss of zero on one rank", NothingToLearn, often=True),
    Feature(
        "Manual optimization",
        "layers behind re-entrant activation checkpoints",
        checkpointed,
        note='under `"ddp"` with `find_unused_parameters=False` only',
        often=True,
    ),
    row("two steps after one backward", StepsTwice),
    row("two optimizers, toggle_optimizer", TwoOptimizers),
    row(
        "two optimizers, toggle_model(sync_grad=...)",
        ToggledModel,
        rtol=1e-6,
        note="gradients accumulated for one are sent with the other's synchronised backward, and again with its own",
        often=True,
    ),
    row("two optimizers, not toggled", NotToggled),
    row("two optimizers over the same parameters, both step", SharedBothStep),
    row("the documentation's GAN", GAN, note=UNUSED, often=True),
    row("LBFGS", ManualLBFGS, refused=REFUSED),
    Feature("Training", "LBFGS", manual, {"kind": LBFGS}, refused=REFUSED, often=True),
]

BEYOND = [
    Beyond(
        "`loss.backward()` in manual optimization, without `self.manual_backward`: synchronised; under "
        '`"ddp"` the ranks diverge',
        "lightning/test_lightning_parity.py::test_backward_of_the_loss_itself_is_synchronised",
    ),
]
