"""A Trainer's fit in a process of a replica: a door for :func:`tests.support.replica_processes.run_with_kills`."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from megastrategy.core import DistributedOptimizer, Replicas
from megastrategy.lightning import MegatronDDPStrategy

from .replica_loops import replicas_at
from .replica_processes import Place
from .replicas import OPTIMIZERS, Case, Hook, loss_of, outcome_of


class EpochOnly:
    """Takes the number of the epoch from Lightning, as a sampler does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Batches:
    """A rank's batches of the present epoch, by number: one that is read at the wrong place changes the result."""

    def __init__(self, case: Case, slot: int, rank: int) -> None:
        self.case, self.slot, self.rank = case, slot, rank
        self.sampler = EpochOnly()

    def __len__(self) -> int:
        return self.case.num_batches

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.case.num_batches):
            yield self.case.batch(self.sampler.epoch, number, self.slot, self.rank)


class Module(pl.LightningModule):
    """Trains the network of a case. Its validation has the same batches in all replicas."""

    def __init__(self, case: Case, slot: int, rank: int) -> None:
        super().__init__()
        self.case, self.slot, self.rank = case, slot, rank
        self.folder = Path()  # of the test
        self.module = case.module()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.module(inputs)
        return outputs

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self(batch))

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", loss_of(self(batch)).float(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.case.optimizer](self.module.parameters())

    def train_dataloader(self) -> Any:
        return Batches(self.case, self.slot, self.rank)

    def val_dataloader(self) -> Any:
        batches = [self.case.batch(90, number, 0, self.rank) for number in range(2)]
        return DataLoader(batches, batch_size=None)


class Log(pl.Callback):
    """Logs each step and its members, waits for those that are gone, and names points at which tests interfere."""

    def __init__(self, place: Place, replicas: Replicas, hook: Hook, write: Any, waits: bool) -> None:
        self.place, self.replicas, self.hook, self.write, self.waits = place, replicas, hook, write, waits
        self.steps: list[tuple[int, int, tuple[int, ...], bool]] = []
        self.outcome: dict[str, Any] = {}
        self._num_steps = 0

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, DistributedOptimizer)]
        assert len(optimizers) == len(trainer.optimizers)
        self.outcome = {
            **outcome_of(module, *optimizers),
            "counters": (trainer.current_epoch, trainer.global_step),
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": {one.state_key: one.state_dict() for one in trainer.callbacks},
        }

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._num_steps = trainer.global_step

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.hook("after backward")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._num_steps:
            return  # a microbatch
        if module.automatic_optimization:
            self.note(trainer.current_epoch, batch_idx)
        if self.waits:
            self.place.wait_for_others(self.replicas)

    def note(self, epoch: int, place: int) -> None:
        """Logs a step, with its place in the epoch."""
        step = epoch, place, self.replicas.members, not self.replicas.is_skipped
        self.steps.append(step)
        self.write(step)
        self.hook("after step")

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.hook("validating")


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a test trains; picklable, since it is sent to each process.

    Attributes:
        module: made with the case, the slot and the rank.
        callbacks: made with the folder of the test.
    """

    module: Any = Module
    callbacks: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ckpt_path: Path | None = None
    """Loaded by a process that comes back."""
    waits: bool = True
    """Whether a replica waits for those that are gone, after its step."""

    def __call__(self, place: Place, hook: Hook) -> Any:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # for loaders' workers
        case, replicas = place.case, replicas_at(place, hook)
        os.environ["REPLICA_GROUP_ID"] = str(place.slot)
        module = self.module(case, place.slot, place.rank)
        module.folder = place.folder
        with place.log() as write:
            log = Log(place, replicas, hook, write, self.waits)
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=case.ranks,
                strategy=MegatronDDPStrategy(replicas=replicas, bucket_size=300, **case.options),
                max_epochs=case.num_epochs,
                default_root_dir=place.folder,
                enable_progress_bar=False,
                enable_model_summary=False,
                # Before the log: what a callback of a test saves or stops is done when the log names the point.
                callbacks=[*(self.callbacks(place.folder) if self.callbacks is not None else ()), log],
                **{
                    "logger": False,
                    "use_distributed_sampler": False,
                    "enable_checkpointing": self.callbacks is not None,
                    "num_sanity_val_steps": 0,
                    **self.options,
                },
            )
            trainer.fit(module, ckpt_path=self.ckpt_path if place.life else None)
        return {**log.outcome, "steps": log.steps}
