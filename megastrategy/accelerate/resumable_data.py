"""Accelerate's part of a :class:`~megastrategy.data.ResumableSampler`: ``save_state`` writes its place."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from .._checkpoints.files import load_file, save_file
from ..data import CountedLoader, ResumableSampler, batch_size_of, sampler_of

SAMPLERS_FILE = "megatron_ddp_samplers.bin"
"""Holds the places of the samplers, in the order in which their loaders were prepared."""


class ResumesData:
    """Lets an Accelerator save and load the places of samplers; comes before accelerate's own class.

    [Note: who divides]
    Accelerate takes whole batches for each process, out of a batch sampler over all samples. So the sampler gives the
    whole order here. It fills the order up itself: accelerate would take the first samples since the resume.
    """

    _samplers: tuple[tuple[weakref.ref[Any], ResumableSampler], ...] = ()
    """Prepared loaders and their samplers, in the order in which they were prepared."""

    # accelerate's
    num_processes: int
    even_batches: bool
    is_main_process: bool
    is_local_main_process: bool
    project_configuration: Any

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares as accelerate's does, and counts what the loop takes for a sampler that can resume.

        Raises:
            ValueError: if batches are read by the main process alone, or counted by torchdata's loader as well.
        """
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)  # type: ignore[misc]
        sampler = sampler_of(data_loader)
        if sampler is None or any(loader is prepared for loader, _ in self._resumable()):
            return prepared
        if hasattr(prepared.base_dataloader, "state_dict"):
            raise ValueError(
                "DataLoaderConfiguration(use_stateful_dataloader=True) and a ResumableSampler both keep the place in "
                "the data. Leave the first out to resume on any number of processes, or use another sampler"
            )
        if hasattr(prepared, "slice_fn"):
            raise ValueError(
                "DataLoaderConfiguration(dispatch_batches=True) reads on the main process alone, and a "
                "ResumableSampler counts on each: leave the first out"
            )
        batch_size_of(data_loader)  # refuses what cannot be counted
        fills_up = self.num_processes > 1 and self.even_batches and not prepared.batch_sampler.drop_last
        samples_per_batch = prepared.total_batch_size
        sampler.divide_by_batches(samples_per_batch if fills_up else 1)
        loader = weakref.ref(prepared)
        prepared.base_dataloader = CountedLoader(
            prepared.base_dataloader, sampler, samples_per_batch, lambda: _num_waiting(loader())
        )
        self._samplers = (*self._samplers, (loader, sampler))
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skips as accelerate's does; a loader that a checkpoint put behind these batches is returned as it is.

        Raises:
            ValueError: if the loader's sampler can resume, and has not.
        """
        sampler = next((sampler for loader, sampler in self._resumable() if loader is dataloader), None)
        if sampler is None:
            return super().skip_first_batches(dataloader, num_batches)  # type: ignore[misc]
        if num_batches and not sampler.consumed:
            raise ValueError(
                f"skip_first_batches({num_batches}): this loader has a ResumableSampler, which skips by itself after "
                "accelerator.load_state(...), and stands at the beginning of an epoch. Load a checkpoint that was "
                "saved with it, or set the place by sampler.load_state_dict(sampler.state_at(epoch, consumed))"
            )
        return dataloader

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Saves as accelerate's does, and the places beside it."""
        location = super().save_state(*args, **kwargs)  # type: ignore[misc]
        on_each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if on_each_node else self.is_main_process
        if writes and (states := [sampler.state_dict() for _, sampler in self._resumable()]):
            save_file(states, Path(location) / SAMPLERS_FILE)
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Loads as accelerate's does, and goes to the places that any number of processes has saved."""
        super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        path = None if input_dir is None else Path(input_dir) / SAMPLERS_FILE
        # a checkpoint from before has none: the epoch begins anew, as with another sampler
        states = load_file(path, weights_only=True) if path is not None and path.is_file() else []
        for (loader, sampler), state in zip(self._resumable(), states, strict=False):
            sampler.load_state_dict(state)
            loader.iteration = sampler.epoch  # the epoch that accelerate gives the sampler at its next pass

    def _resumable(self) -> list[tuple[Any, ResumableSampler]]:
        pairs = [(loader(), sampler) for loader, sampler in self._samplers]
        return [(loader, sampler) for loader, sampler in pairs if loader is not None]


def _num_waiting(prepared: Any) -> int:
    """Counts what accelerate has taken ahead: one, in order to know the last."""
    return 0 if prepared is None or prepared.end_of_dataloader else 1
