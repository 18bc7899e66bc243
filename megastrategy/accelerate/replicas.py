"""The replicas of an Accelerator: what they divide and save, and what one that comes back takes over.

[Note: an Accelerator is a replica's]
Everything of an Accelerator is that of one replica: ``num_processes``, ``is_main_process``, ``gather``, ``reduce``.
Only the prepared loaders are divided among the processes of all replicas, and prepared schedules make as many steps as
with so many processes in one world. ``is_main_process`` is true in each replica: scripts read it before there is a
leader, to open a tracker for example, and the leader changes.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import IterableDataset

from ..data import check_order, follow_epochs, samplers_of

_OPTION = "MegatronDDPPlugin(replicas=...)"


class AcceleratorReplicas:
    """The replicas of one Accelerator, or none.

    Args:
        accelerator: with its plugin.

    Attributes:
        replicas: those of the plugin; None for one job.

    Raises:
        ValueError: for a ``ParallelismConfig``.
    """

    def __init__(self, accelerator: Any) -> None:
        self.replicas = accelerator.megatron_ddp_plugin.replicas
        self._accelerator = weakref.ref(accelerator)
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._divided = weakref.WeakSet[Any]()
        self._step_before = 0
        if self.replicas is not None and accelerator.parallelism_config is not None:
            raise ValueError(
                f"{_OPTION} and a ParallelismConfig are not supported together: leave one of them "
                "out (parallelism_config=, or PARALLELISM_CONFIG_... in the environment)"
            )

    # --- model and schedules -----------------------------------------------------------------------------------------

    def add_accelerator(self) -> None:
        """Adds the Accelerator's counters and its scaler to the state that a replica takes over."""
        accelerator = self._accelerator()
        if self.replicas is None or accelerator is None:
            return
        configuration = accelerator.project_configuration

        def get() -> tuple[int, int]:
            self._step_before = accelerator.step - 1  # accumulate() has counted the present batch
            return self._step_before, configuration.iteration

        def put(counters: tuple[int, int]) -> None:
            # Of one that comes back the batches of its first step count as those of the others' step.
            is_counted = self.replicas.healed and not self.replicas.dropped
            num_batches = accelerator.step - self._step_before if is_counted else 0
            accelerator.step = counters[0] + num_batches
            configuration.iteration = counters[1]

        self.replicas.register("accelerator", get, put)
        if accelerator.scaler is not None:
            self.add("scaler", accelerator.scaler)

    def add(self, kind: str, *objects: Any) -> None:
        """Lets a replica that comes back take over the state of these objects, which it finds by their order."""
        for one in objects if self.replicas is not None else ():
            self.replicas.register(f"{kind} {next(self._numbers[kind])}", one.state_dict, one.load_state_dict)

    def schedule(self, prepared: Any) -> Any:
        """Returns the schedule that steps for all replicas."""
        if self.replicas is None:
            return prepared
        prepared.__class__ = ScheduleOfReplicas
        prepared.num_replicas = self.replicas.of
        self.add("schedule", prepared)
        return prepared

    # --- loaders -----------------------------------------------------------------------------------------------------

    def divides(self, loader: Any) -> bool:
        """Whether there are replicas to divide a loader, which is not prepared yet."""
        return self.replicas is not None and not getattr(loader, "_is_accelerate_prepared", False)

    def prepare_data_loader(self, loader: Any, put_on_device: bool | None) -> Any:
        """Divides a loader among the processes of all replicas.

        Raises:
            ValueError: for data that cannot be divided so, or whose place a replica that comes back would not have.
        """
        accelerator = self._accelerator()
        assert accelerator is not None, "it prepares the loader"
        check_order(_OPTION, *samplers_of(loader))
        _check_batches(loader, accelerator)
        ranks = self.replicas.sampler_ranks(accelerator.num_processes, accelerator.process_index)
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks["num_replicas"],
            process_index=ranks["rank"],
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if put_on_device is None else put_on_device,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=True,  # an order that follows from the epoch's number
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )
        follow_epochs(functools.partial(getattr, self.replicas, "epoch"), prepared)
        accelerator._dataloaders.append(prepared)
        self._divided.add(prepared)
        return prepared

    def check_is_whole(self, loader: Any, call: str, way_out: str) -> None:
        """Raises ValueError for a ``call`` that needs all batches of a loader that all replicas divide."""
        if loader in self._divided:
            raise ValueError(f"{call} with a loader that is divided among all replicas: {way_out}")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def writes_in(self, call: str) -> bool:
        """Returns whether this replica writes the files of a call. Raises ValueError before the first batch, when there
        is no leader yet."""
        return self.replicas is None or self.replicas.writes_in(call)

    def skip_save(self, output_dir: str | None) -> Path:
        """Returns the folder in which the leader saves a state, and counts it."""
        accelerator = self._accelerator()
        assert accelerator is not None, "it saves"
        configuration = accelerator.project_configuration
        if not configuration.automatic_checkpoint_naming:
            return Path(str(output_dir))
        configuration.iteration += 1
        return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{configuration.iteration - 1}")

    def close(self) -> None:
        """Leaves the other replicas, if there are any."""
        if self.replicas is not None:
            self.replicas.close()


class ScheduleOfReplicas(AcceleratedScheduler):  # type: ignore[misc]
    """Steps once for each process of all replicas, since loaders are shorter by that: accelerate's would step for those
    of one replica."""

    num_replicas: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        steps_for_each = self.step_with_optimizer and not self.split_batches and self.gradient_state.sync_gradients
        for _ in range(self.num_replicas if steps_for_each else 1):
            super().step(*args, **kwargs)


def _check_batches(loader: Any, accelerator: Any) -> None:
    is_stream = isinstance(loader.dataset, IterableDataset)
    dispatches = accelerator.dispatch_batches
    drops_last = loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    refused = {
        "a loader that one process reads for others: pass DataLoaderConfiguration(dispatch_batches=False)": (
            is_stream if dispatches is None else dispatches
        ),
        "even_batches=False, with which replicas get different numbers of batches: leave it out, or build the "
        "DataLoader with drop_last=True": not (accelerator.even_batches or is_stream or drops_last),
        "use_stateful_dataloader=True: leave it out, since a replica that comes back finds its place by counting": (
            accelerator.use_stateful_dataloader
        ),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ValueError(f"{_OPTION} and {what}")
