"""Loops of Fabric and Accelerate in a process of a replica, for tests.support.replica_processes."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from megastrategy.core import Replicas

from .replica_processes import Kill, Place, Train, logged_steps, run_with_kills
from .replicas import (
    OPTIMIZERS,
    PATIENCE_S,
    Case,
    Hook,
    HookedLink,
    Run,
    assert_equal,
    assert_replayed,
    loss_of,
    members_by_step,
)

BATCH_SIZE, SEED = 6, 11


@dataclasses.dataclass(frozen=True)
class SampledCase(Case):
    """A case whose batches come from one dataset, shuffled anew in each epoch, and divided by the door."""

    @property
    def num_samples(self) -> int:
        return self.of * self.ranks * BATCH_SIZE * self.num_batches - 3  # the last ranks get some samples again

    def samples(self) -> Tensor:
        return torch.randn(self.num_samples, 8, generator=torch.Generator().manual_seed(3)).to(self.dtype)

    def indices(self, epoch: int, number: int, place: int) -> list[int]:
        """The samples of a batch of the rank at ``place`` among all of all replicas."""
        sampler = DistributedSampler(range(self.num_samples), self.of * self.ranks, place)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        return list(sampler)[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]

    def batch(self, epoch: int, number: int, slot: int, rank: int) -> Tensor:
        return self.samples()[self.indices(epoch, number, slot * self.ranks + rank)]

    def loader(self) -> DataLoader[Any]:
        return DataLoader(list(self.samples()), batch_size=BATCH_SIZE, shuffle=True)  # type: ignore[arg-type]

    def ends(self) -> list[tuple[int, int]]:
        """The epoch and the last batch of each step."""
        return [(e, b) for e in range(self.num_epochs) for b in range(self.num_batches) if self.ends_window(b)]


def set_environment_of_torchrun(rank: int, num_ranks: int) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def replicas_at(place: Place, hook: Hook) -> Replicas:
    """Prepares a process, whose process group is there already."""
    for name in ("lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    set_environment_of_torchrun(place.rank, place.case.ranks)
    link = HookedLink(place.slot, place.address, hook, place.skew_s, PATIENCE_S)
    return Replicas(link, of=place.case.of, slot=place.slot, patience_s=PATIENCE_S)


def run_with_a_kill(
    case: SampledCase, loop: Train, kill: Kill, folder: Path, **replayed: Any
) -> list[list[dict[str, Any]]]:
    """The outcomes of a loop in which a process is killed, after the checks that hold in every door.

    ``replayed``: of :func:`~.replicas.replay`.
    """
    found = run_with_kills(case, [kill], folder, train=loop)
    for mine, theirs in zip(*found, strict=True):
        assert_equal(mine, theirs)
    steps = members_by_step(logged_steps(folder))
    assert sorted(steps) == case.ends()
    assert (1 - kill.slot,) in steps.values(), "the other one went on alone"
    assert steps[case.ends()[-1]] == (0, 1), "it came back"
    assert_replayed(case, found[0][0]["weights"], steps, **replayed)
    return found


@dataclasses.dataclass(frozen=True)
class FabricLoop:
    """A user's loop. After each epoch it saves, under a name that says which replica has written."""

    precision: Any = "32-true"
    clip_value: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, place: Place, hook: Hook) -> Any:
        from lightning.fabric import Fabric

        from megastrategy.fabric import MegatronDDPStrategy

        case, replicas = place.case, replicas_at(place, hook)
        assert isinstance(case, SampledCase)
        strategy = MegatronDDPStrategy(replicas=replicas, bucket_size=300, **self.options)
        fabric = Fabric(accelerator="cpu", devices=case.ranks, strategy=strategy, precision=self.precision)
        fabric.launch()
        module = case.module()
        model, optimizer = fabric.setup(module, OPTIMIZERS[case.optimizer](module.parameters()))
        loader = fabric.setup_dataloaders(case.loader())
        assert len(loader) == case.num_batches
        run = Run(case, place.slot, place.rank, fabric.strategy.replicas, module, model, optimizer.optimizer)
        with place.log() as log:
            for epoch in replicas.epochs(case.num_epochs):
                for batch in replicas.batches(loader):
                    is_last = case.ends_window(replicas.batch)
                    with fabric.no_backward_sync(model, enabled=not is_last):
                        fabric.backward(loss_of(model(batch)) / case.accumulate)
                    if not is_last:
                        continue
                    if self.clip_value is not None:
                        fabric.clip_gradients(model, optimizer, clip_val=self.clip_value)
                    run.steps.append((epoch, replicas.batch, replicas.members, not replicas.is_skipped))
                    optimizer.step()
                    optimizer.zero_grad()
                    log(run.steps[-1])
                    hook("after step")
                    place.wait_for_others(replicas)
                fabric.save(place.folder / f"{epoch}-{place.slot}.ckpt", {"model": model, "optimizer": optimizer})
        return run.outcome()


@dataclasses.dataclass(frozen=True)
class AcceleratedCase(SampledCase):
    """Accelerate divides batches, not samples: those of a step go to the ranks one after another."""

    def indices(self, epoch: int, number: int, place: int) -> list[int]:
        generator = torch.Generator().manual_seed(epoch + SEED)
        order = torch.randperm(self.num_samples, generator=generator).tolist()
        order += order[:BATCH_SIZE]  # the last batch is made full
        first = (number * self.of * self.ranks + place) * BATCH_SIZE
        return order[first : first + BATCH_SIZE]

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """A schedule over all batches of the dataset, as scripts make it of a loader that is not prepared yet."""
        total = self.num_epochs * self.num_batches * self.of * self.ranks
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)


class Counter:
    """An object of the user's that is registered for checkpoints."""

    def __init__(self) -> None:
        self.num_batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_batches = state["num_batches"]


@dataclasses.dataclass(frozen=True)
class AcceleratedLoop:
    """A user's loop, which saves its state after each epoch."""

    mixed_precision: str = "no"
    clip_value: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, place: Place, hook: Hook) -> Any:
        from accelerate.utils import ProjectConfiguration

        from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

        case, replicas = place.case, replicas_at(place, hook)
        assert isinstance(case, AcceleratedCase)
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if case.ranks == 1:
            del os.environ["LOCAL_RANK"]  # as a script that is started without a launcher
        accelerator = Accelerator(
            megatron_ddp_plugin=MegatronDDPPlugin(replicas=replicas, bucket_size=300, **self.options),
            mixed_precision=self.mixed_precision,
            gradient_accumulation_steps=case.accumulate,
            project_config=ProjectConfiguration(str(place.folder), automatic_checkpoint_naming=True),
        )
        torch.manual_seed(SEED)
        module, counter = case.module(), Counter()
        torch.manual_seed(SEED)
        optimizer = OPTIMIZERS[case.optimizer](module.parameters())
        # the scheduler first: any order is allowed
        schedule, loader, model, optimizer = accelerator.prepare(
            case.schedule(optimizer), case.loader(), module, optimizer
        )
        accelerator.register_for_checkpointing(counter)
        assert len(loader) == case.num_batches
        run = Run(case, place.slot, place.rank, replicas, module, model, optimizer.optimizer)
        saved = []
        with place.log() as log:
            for epoch in replicas.epochs(case.num_epochs):
                for batch in replicas.batches(loader):
                    counter.num_batches += 1
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_of(model(batch)))
                        if accelerator.sync_gradients and self.clip_value is not None:
                            accelerator.clip_grad_value_(model.parameters(), self.clip_value)
                        steps = accelerator.sync_gradients
                        assert steps == case.ends_window(replicas.batch)
                        if steps:
                            run.steps.append((epoch, replicas.batch, replicas.members, not replicas.is_skipped))
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                    if steps:
                        log(run.steps[-1])
                        hook("after step")
                        place.wait_for_others(replicas)
                saved.append(str(accelerator.save_state()))
                if replicas.is_leader:
                    (place.folder / f"{epoch}-{place.slot}.saved").touch()
        return run.outcome() | {
            "loop": (counter.num_batches, schedule.get_last_lr(), accelerator.save_iteration, saved[-1])
        }
