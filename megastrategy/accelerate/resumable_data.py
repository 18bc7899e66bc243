"""Saves the place of an Accelerator's :class:`~megastrategy.data.ResumableSampler`, and restores it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from .._checkpoints.files import load_file, save_file
from ..data import CountedLoader, ResumableSampler, batch_size_of, sampler_of

SAMPLERS_FILE = "megatron_ddp_samplers.bin"
"""Holds the places of the samplers, in the order in which their loaders were prepared."""


class ResumableLoaders:
    """The prepared loaders of one Accelerator whose samplers can resume, in the order in which they were prepared.

    [Note: which object divides the samples]
    Accelerate takes whole batches for each process, out of a batch sampler over all samples. So the sampler yields the
    full order here. It pads the order itself: accelerate would take the first samples since the resume.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[weakref.ref[Any], ResumableSampler]] = []

    def add(self, prepared: Any, data_loader: Any, *, pads: bool) -> None:
        """Counts the batches that a loop takes from a prepared loader, if the loader's sampler can resume.

        ``pads`` says whether accelerate makes the batches of all processes even.

        Raises:
            ValueError: if only the main process reads batches, or torchdata's loader counts them as well.
        """
        sampler = sampler_of(data_loader)
        if sampler is None or any(loader is prepared for loader, _ in self._alive()):
            return
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
        batch_size_of(data_loader)  # refuses batches that cannot be counted
        samples_per_batch = prepared.total_batch_size
        sampler.divide_by_batches(samples_per_batch if pads and not prepared.batch_sampler.drop_last else 1)
        loader = weakref.ref(prepared)
        prepared.base_dataloader = CountedLoader(
            prepared.base_dataloader, sampler, samples_per_batch, lambda: _num_waiting(loader())
        )
        self._pairs.append((loader, sampler))

    def skips_itself(self, dataloader: Any, num_batches: int) -> bool:
        """Whether a loader's sampler can resume, so that a checkpoint has put it behind ``num_batches`` already.

        Raises:
            ValueError: if no checkpoint has.
        """
        sampler = next((sampler for loader, sampler in self._alive() if loader is dataloader), None)
        if sampler is not None and num_batches and not sampler.consumed:
            raise ValueError(
                f"skip_first_batches({num_batches}): this loader has a ResumableSampler, which skips by itself after "
                "accelerator.load_state(...), and stands at the beginning of an epoch. Load a checkpoint that was "
                "saved with it, or set the place by sampler.load_state_dict(sampler.state_at(epoch, consumed))"
            )
        return sampler is not None

    def save(self, folder: Path) -> None:
        """Writes the places of the samplers, if there are any."""
        if states := [sampler.state_dict() for _, sampler in self._alive()]:
            save_file(states, folder / SAMPLERS_FILE)

    def load(self, folder: Path) -> None:
        """Restores the places that any number of processes has saved."""
        path = folder / SAMPLERS_FILE
        # an older checkpoint has none: the epoch begins anew, as with another sampler
        states = load_file(path, weights_only=True) if path.is_file() else []
        for (loader, sampler), state in zip(self._alive(), states, strict=False):
            sampler.load_state_dict(state)
            loader.iteration = sampler.epoch  # accelerate sets the sampler's epoch to it at its next pass

    def _alive(self) -> list[tuple[Any, ResumableSampler]]:
        pairs = [(loader(), sampler) for loader, sampler in self._pairs]
        return [(loader, sampler) for loader, sampler in pairs if loader is not None]


def _num_waiting(prepared: Any) -> int:
    """Counts batches that accelerate has read ahead: one, in order to know the last."""
    return 0 if prepared is None or prepared.end_of_dataloader else 1
