"""Saves the place of a Trainer's :class:`~megastrategy.data.ResumableSampler` in checkpoints, and restores it.

[Note: which samples are consumed]
Lightning's own counters say which batches of an epoch are done, and on a resume the loop goes on from them. The place
is computed from the same counters, so that both agree wherever the checkpoint was written: in a hook of a batch, in
validation, at an epoch's end. None of them counts batches that workers have read ahead.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from ..data import ResumableSampler, sampler_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

SAMPLER_KEY = "megatron_ddp_sampler"
"""Key in a checkpoint: the place in the training data. "ddp" ignores it."""


class DataPlace:
    """Saves and restores the place of a Trainer's sampler. The epoch's batches come from one loader."""

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None  # the place in the checkpoint that this run goes on from

    def restore(self, dataloader: object, trainer: pl.Trainer, ranks: dict[str, Any]) -> object:
        """Restores the place before the loader is iterated: workers read ahead from the first iterator on."""
        sampler = sampler_of(dataloader)
        if sampler is None or not isinstance(dataloader, DataLoader) or not trainer.training:
            return dataloader
        sampler.divide(ranks["num_replicas"], ranks["rank"])
        loaded = self._loaded
        if loaded is not None and not loaded.is_restored:
            loaded.is_restored = True  # loaders may be made anew in each epoch
            sampler.load_state_dict(loaded.place)
        else:
            # a fit before may have gone on within the epoch that this one begins
            sampler.load_state_dict(sampler.state_at(sampler.epoch, 0))
        if hasattr(dataloader, "state_dict"):
            return dataloader  # torchdata's, whose state has more, and the sampler's place too
        resumable = copy.copy(dataloader)
        # Lightning warns of a loader that does not resume, unless it has these
        resumable.state_dict = dict
        resumable.load_state_dict = _ignore
        return resumable

    def correct_progress(self, trainer: pl.Trainer) -> None:
        """Counts the epoch's trained batches in batches of these ranks, where a resume begins within an epoch."""
        loader, sampler = _only_loader(trainer)
        loop = trainer.fit_loop.epoch_loop
        # a checkpoint without a place, such as that of "ddp", is gone on with as there
        if self._loaded is None or loader is None or sampler is None or not loop.restarting:
            return
        progress = loop.batch_progress
        done: Any = progress.current
        if self._loaded.is_at_end:
            num_done = trainer.num_training_batches
        else:
            num_done = sampler.num_batches_before(loader)
            progress.is_last_batch = False  # of the epoch before: a checkpoint of an epoch's start still has it
        difference = int(num_done) - done.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(done, name, getattr(done, name) + difference)

    def load(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Keeps the place in a checkpoint until the loader is made, and returns the checkpoint."""
        self._loaded = None
        if (place := checkpoint.get(SAMPLER_KEY)) is not None:
            loop = checkpoint["loops"]["fit_loop"]
            num_batches = loop["epoch_loop.batch_progress"]["total"]["ready"]
            self._loaded = _Loaded(place, num_batches, place["epoch"] > loop["epoch_progress"]["current"]["processed"])
        return checkpoint

    def forget(self) -> None:
        """Drops a loaded place. An evaluation has loaded one, too, with the weights."""
        self._loaded = None

    def save(self, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        """Adds the place to a checkpoint that has the loops' counters."""
        loader, sampler = _only_loader(trainer)
        if loader is None or sampler is None or "loops" not in checkpoint:
            return
        loop = checkpoint["loops"]["fit_loop"]
        # states of loaders like ours: under "ddp" no loader could load them
        loop["state_dict"] = {key: value for key, value in loop["state_dict"].items() if value != [{}]}
        num_batches = loop["epoch_loop.batch_progress"]["total"]["ready"]
        if self._loaded is not None and num_batches == self._loaded.num_batches:
            checkpoint[SAMPLER_KEY] = self._loaded.place  # no batch was trained since
        else:
            checkpoint[SAMPLER_KEY] = sampler.state_at(*_place(loop, loader, sampler))


@dataclasses.dataclass
class _Loaded:
    """The place in a checkpoint.

    Attributes:
        place: the sampler's state.
        num_batches: batches that all epochs together had begun by then.
        is_at_end: whether the epoch's last batch was trained, and Lightning had not ended the epoch yet.
        is_restored: whether a sampler has loaded it.
    """

    place: dict[str, Any]
    num_batches: int
    is_at_end: bool
    is_restored: bool = False


def _place(loop: dict[str, Any], loader: DataLoader[Any], sampler: ResumableSampler) -> tuple[int, int]:
    """Computes the epoch and its consumed samples. Lightning numbers a sampler's epochs by those processed."""
    epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
    epoch, done = epochs["processed"], batches["current"]
    # from an epoch's end to the next one's first batch the counters of batches are those of the epoch before
    if epoch > sampler.epoch or epochs["started"] < epochs["ready"]:
        return epoch, 0
    if batches["is_last_batch"] and done["processed"] == done["ready"]:
        return epoch + 1, 0
    return epoch, sampler.consumed_after(done["processed"], loader)


def _only_loader(trainer: pl.Trainer) -> tuple[DataLoader[Any] | None, ResumableSampler | None]:
    """Returns the training loader and its sampler. Of several loaders batches are mixed in ways of their own."""
    loader = trainer.train_dataloader
    return (loader, sampler_of(loader)) if isinstance(loader, DataLoader) else (None, None)


def _ignore(state: dict[str, Any]) -> None:
    """Ignores the empty state of a loader."""
