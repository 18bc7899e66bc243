"""A Trainer's run that is cut trains each sample of an epoch once, on whatever number of ranks it goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megastrategy._lightning.resumable_data import SAMPLER_KEY

from ..rank_processes import Ranks
from ..resumed_fits import BATCH_SIZE, Part, Pools, by_epoch, fit_part, path

SIZE = 36  # 6 batches of 2 ranks, 12 of one, 4 of three, 3 of four
ONCE = Counter(range(SIZE))


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def assert_same_training(parts: list[list[Part]], whole: list[Part]) -> None:
    """Rank by rank, to the bit."""
    for ranks in zip(*parts, whole, strict=True):
        *mine, expected = ranks
        assert [batch for part in mine for batch in part.trained] == expected.trained
        assert [number for part in mine for number in part.batches] == expected.batches
        assert [loss for part in mine for loss in part.losses] == expected.losses


HOOKS = [
    ("on_train_batch_start", 3),
    ("on_after_backward", 3),
    ("on_before_optimizer_step", 9),
    ("on_train_batch_end", 1),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", 6),  # the epoch's last
    ("on_validation_end", 1),  # in the middle of the epoch
    ("on_validation_end", 2),  # at its end
    ("on_train_epoch_end", 1),
    ("on_train_epoch_start", 2),
    ("on_train_batch_end", 8),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("hook", "number"), HOOKS)
def test_a_cut_run_equals_one_that_was_not(ranks: Ranks, tmp_path: Path, hook: str, number: int) -> None:
    options = {"val_check_interval": 0.5, "max_epochs": 2}
    whole = ranks.run(fit_part, SIZE, **options)
    first = ranks.run(fit_part, SIZE, cut=(hook, number, path(tmp_path)), **options)
    second = ranks.run(fit_part, SIZE, resume=path(tmp_path), **options)
    assert by_epoch([whole]) == {0: ONCE, 1: ONCE}
    assert_same_training([first, second], whole)
    assert not [text for part in second for text in part.warnings if "resum" in text]


@pytest.mark.sample(1)
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_batch_end"])
def test_max_steps(ranks: Ranks, tmp_path: Path, hook: str) -> None:
    """Lightning goes on as if within an epoch, and calls the next one by the number of the last."""
    options = {"max_epochs": -1, "max_steps": 14, "limit_val_batches": 0}
    whole = ranks.run(fit_part, SIZE, **options)
    first = ranks.run(fit_part, SIZE, cut=(hook, 1, path(tmp_path)), **options)
    second = ranks.run(fit_part, SIZE, resume=path(tmp_path), **options)
    for begun, ended, expected in zip(first, second, whole, strict=True):
        assert begun.losses + ended.losses == expected.losses
        assert [samples for _, samples in begun.trained + ended.trained] == [samples for _, samples in expected.trained]


WAYS: dict[str, dict[str, Any]] = {
    "a batch sampler": {"module_options": {"batch_sampler": True}, "use_distributed_sampler": False},
    "its last batch left out": {"module_options": {"drop_last": True}},
    "accumulation": {"accumulate_grad_batches": 2},
    "a loader made before the loops are restored": {"module_options": {"counts_steps": True}},
    "a directory": {"strategy_options": {"state_dict_type": "sharded"}},
    "loaders made anew each epoch": {"reload_dataloaders_every_n_epochs": 1},
    "fewer batches than there are": {"limit_train_batches": 5},
    "torchdata's loader": {"module_options": {"stateful": True}},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_load_and_to_train(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """The last batch is short: 19 samples a rank."""
    if way == "torchdata's loader":
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    options = {"max_epochs": 2, "limit_val_batches": 0, **WAYS[way]}
    whole = ranks.run(fit_part, 38, **options)
    first = ranks.run(fit_part, 38, cut=("on_train_batch_end", 4, path(tmp_path)), **options)
    second = ranks.run(fit_part, 38, resume=path(tmp_path), **options)
    assert_same_training([first, second], whole)


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "cuts",
    [
        [(2, "on_train_batch_end", 2), (1, "on_train_batch_end", 5), (3, "on_train_batch_start", 2), (4, "", 0)],
        [(4, "on_train_batch_end", 2), (3, "on_train_epoch_end", 1), (1, "on_train_batch_end", 4), (2, "", 0)],
        [(1, "on_train_batch_end", 12), (2, "on_validation_end", 1), (4, "on_train_epoch_start", 1), (1, "", 0)],
    ],
    ids=str,
)
def test_other_numbers_of_ranks(pools: Pools, tmp_path: Path, cuts: list[tuple[int, str, int]]) -> None:
    parts: list[list[Part]] = []
    resume = None
    for number, (num_ranks, hook, count) in enumerate(cuts):
        cut = (hook, count, path(tmp_path, number)) if hook else None
        options = {"cut": cut, "resume": resume, "val_check_interval": 0.5, "max_epochs": 2}
        parts.append(pools.run(num_ranks, fit_part, SIZE, **options))
        resume = path(tmp_path, number)
    assert by_epoch(parts) == {0: ONCE, 1: ONCE}
    # 36 samples: the loop's counter ends with the epoch's last number, whatever went before
    last = parts[-1][0]
    assert last.batches[-1] == SIZE // (BATCH_SIZE * cuts[-1][0]) - 1


def test_a_checkpoint_is_ddps_too(ranks: Ranks, tmp_path: Path) -> None:
    """Its own key is plain; "ddp" goes on from the file, as from any, at the epoch's next batch number."""
    ranks.run(fit_part, SIZE, cut=("on_train_batch_end", 2, path(tmp_path)), max_epochs=1)
    checkpoint = torch.load(path(tmp_path), weights_only=True)
    place = {"epoch": 0, "consumed": 2 * 2 * BATCH_SIZE}
    assert checkpoint[SAMPLER_KEY] == place | {"num_samples": SIZE, "seed": 4, "shuffle": True}
    assert checkpoint["loops"]["fit_loop"]["state_dict"] == {}
    for part in ranks.run(fit_part, SIZE, resume=path(tmp_path), name="ddp", max_epochs=1):
        assert part.batches == [2, 3, 4, 5]


def test_a_fit_without_a_checkpoint_begins_anew(ranks: Ranks, tmp_path: Path) -> None:
    for part in ranks.run(fit_twice, path(tmp_path)):
        assert part == ([8], [12])


def fit_twice(file: str) -> tuple[list[int], list[int]]:
    """Batches of a fit that goes on from a checkpoint, and of one with the same loader that does not."""
    from ..fits import make_strategy, make_trainer
    from ..resumed_fits import Cut, Regression, resumable_loader

    data, numbers = resumable_loader(SIZE), []
    for resume, callback in ((None, Cut("on_train_batch_end", 4, file)), (file, None), (None, None)):
        module = Regression(SIZE)
        callbacks = [callback] if callback else []
        trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=2, limit_val_batches=0, callbacks=callbacks)
        trainer.fit(module, data, ckpt_path=resume)
        numbers.append([len(module.trained)])
    return numbers[1], numbers[2]
