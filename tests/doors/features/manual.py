"""Manual optimization: who backs, who steps, when gradients are sent, and over which parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..fits import AwkwardModule, Fit, adamw, fit
from ..matrix import Beyond, Feature


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


class StepsWithoutZeroing(TwiceSynchronised):
    """Gradients of all batches add up under "ddp"."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class ZeroesAfterEachStep(StepsWithoutZeroing):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()


class StepsTwice(ZeroesAfterEachStep):
    """With the same gradients under "ddp"."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().step()
        self.optimizers().zero_grad()


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


class ToggledInContext(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
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


class StepsToggledOff(TwoOptimizers):
    """One backward for both; the second optimizer steps while its parameters are frozen by the first one's toggle."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        with self.toggled_optimizer(first):
            first.step()
            second.step()
        first.zero_grad()
        second.zero_grad()


class SharedInTurn(TwoOptimizers):
    """Both optimizers hold every parameter."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.step_with(self.optimizers()[batch_idx % 2], batch)

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters()), sgd(self.parameters())


class SharedBothStep(SharedInTurn):
    """One backward, and both optimizers step with its gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()


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


class ToggledGAN(GAN):
    """The same with each network frozen while the other is trained, and samples made anew for the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_g, opt_d = self.optimizers()
        real = batch[0]
        noise = self.noise(self.global_rank, batch_idx, len(real))
        with self.toggled_optimizer(opt_d):
            loss_d = self.loss_d(real, self.generator(noise))
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            opt_d.step()
        with self.toggled_optimizer(opt_g):
            loss_g = self.loss_g(self.generator(noise))
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
        self.losses += [loss_d.item(), loss_g.item()]


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
UNUSED = 'under `"ddp"` only with `find_unused_parameters=True`'
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
    row("two backwards, both synchronised", TwiceSynchronised, rtol=1e-6, note=SEVERAL),
    row("a step every other batch, all synchronised", NoStepInOddBatches, rtol=1e-6, note=SEVERAL),
    Feature(
        "Manual optimization",
        "a step every other batch, validation between",
        manual,
        {"kind": NoStepInOddBatches, "val_check_interval": 2},
        note="before validation Lightning zeroes gradients, including those that wait for a step",
    ),
    row("optimizer.step(closure)", Closures),
    row(
        "a step without zero_grad",
        StepsWithoutZeroing,
        rtol=1e-4,
        note="gradients of the whole epoch add up, and with them the rounding of several synchronised backwards",
    ),
    row("two steps after one backward", StepsTwice),
    row("two optimizers, toggle_optimizer", TwoOptimizers),
    row("two optimizers, toggled_optimizer", ToggledInContext),
    row(
        "two optimizers, toggle_model(sync_grad=...)",
        ToggledModel,
        rtol=1e-6,
        note="gradients accumulated for one are sent with the other's synchronised backward, and again with its own",
    ),
    row("two optimizers, not toggled", NotToggled),
    row("an optimizer's step while its parameters are toggled off", StepsToggledOff),
    row("two optimizers over the same parameters, in turn", SharedInTurn),
    row("two optimizers over the same parameters, both step", SharedBothStep),
    row("the documentation's GAN", GAN, note=UNUSED),
    row("a GAN with toggled_optimizer", ToggledGAN, note=UNUSED),
    row("LBFGS", ManualLBFGS, refused=REFUSED),
    Feature("Training", "LBFGS", manual, {"kind": LBFGS}, refused=REFUSED),
]

BEYOND = [
    Beyond(
        'The GAN of Lightning\'s documentation trains unchanged; `strategy="ddp"` raises in its second backward and '
        "asks for `find_unused_parameters=True`",
        "lightning/test_lightning_manual.py::test_the_documentations_gan_trains_which_it_does_not_under_ddp",
    ),
    Beyond(
        "`loss.backward()` in manual optimization, without `self.manual_backward`: synchronised; under "
        '`"ddp"` the ranks diverge',
        "lightning/test_lightning_manual.py::test_a_backward_that_is_not_lightnings_is_synchronised_which_it_is_not_under_ddp",
    ),
]
