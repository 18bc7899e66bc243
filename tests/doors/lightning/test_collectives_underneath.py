"""The choice of ``--collectives`` applies under the doors too, in the processes of their ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from megastrategy import DistributedDataParallel
from tests.support.chosen_collectives import Choice, choosing
from tests.support.lazy_collectives import LazyCollectives

from ..fits import AwkwardModule, loader, make_strategy, make_trainer
from ..rank_processes import Ranks


def kinds_under_a_fit() -> tuple[str, str, int]:
    """The class that reduces, the class around it, and its number of started collectives."""
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            assert isinstance(trainer.model, DistributedDataParallel)
            seen.append(trainer.model.engine.collectives)

    trainer = make_trainer(make_strategy("megatron_ddp"), callbacks=[Look()], max_steps=2)
    trainer.fit(AwkwardModule(), loader())
    collectives = seen[-1]
    assert isinstance(collectives, LazyCollectives)
    return type(collectives.real).__name__, type(collectives).__name__, collectives.progress.num_started


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["rings", "process-group"])
def test_a_fit_goes_through_them(backend: str) -> None:
    with choosing(Choice("at-random", backend)):
        pool = Ranks()
        try:
            outcomes = pool.run(kinds_under_a_fit)
        finally:
            pool.close()
    for real, around, num_started in outcomes:
        assert real == {"rings": "GlooCollectives", "process-group": "BackendCollectives"}[backend]
        assert around == "LazyCollectives"
        assert num_started > 4
