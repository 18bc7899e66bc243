"""Checkpoints in object stores through Trainer and Fabric: directories, in the background too, and one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastrategy.core import CheckpointError, RemoteDirectory, is_directory_checkpoint
from tests.doors.lightning.test_lightning_checkpoints import fit_and_save, resume
from tests.doors.lightning.test_sharded_directories import fit_slowly_in_background
from tests.support.object_store import objects_in

from ..fabric_loops import make_fabric
from ..fits import BATCHES_PER_EPOCH, AwkwardModule, Fit, assert_same_tensors, loader, make_strategy, make_trainer
from ..rank_processes import Ranks
from .test_loading_directories import EXTRA, Net

NAME = f"step={BATCHES_PER_EPOCH}.ckpt"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder that has nothing in it yet."""
    return f"objects://{tmp_path}/store/run"


# --- Trainer ---------------------------------------------------------------------------------------------------------


def fit_and_save_far(url: str, every: int, **options: Any) -> Fit:
    return fit_and_save("megatron_ddp", url, every=every, **options)


def resume_from_far(url: str, **options: Any) -> Fit:
    return resume("megatron_ddp", url, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_run_resumes_from_a_store(ranks: Ranks, url: str, kind: str) -> None:
    """Losses and weights to the bit; ModelCheckpoint keeps what it shall."""
    options = {"strategy_options": {"state_dict_type": kind}}
    whole = ranks.run(fit_and_save_far, url, BATCHES_PER_EPOCH, **options)
    place = RemoteDirectory(f"{url}/{NAME}")
    assert is_directory_checkpoint(place) == (kind == "sharded")
    resumed = ranks.run(resume_from_far, place.url, **options)
    for mine, expected in zip(resumed, whole, strict=True):
        assert mine.losses == expected.losses[BATCHES_PER_EPOCH:]
        assert_same_tensors(mine.weights, expected.weights)


def complete_far_away(url: str) -> int:
    """The number of complete checkpoints."""
    names = RemoteDirectory(url).file_system().find(url)
    return sum(name.endswith("/.metadata") for name in names)


@pytest.mark.long
def test_there_is_a_complete_checkpoint_at_any_time_while_the_next_is_saved(ranks: Ranks, url: str) -> None:
    """ModelCheckpoint removes the old one as soon as it has asked for the new one."""
    for found in ranks.run(fit_slowly_in_background, url, complete_far_away):
        assert set(found[3:]) <= {1, 2}, found
    assert [name.count("__") for name in sorted(objects_in(url))].count(1) == 2, "one is left, of two parts"


def fit_and_save_last(path: str, **options: Any) -> str:
    strategy = make_strategy("megatron_ddp", state_dict_type="sharded")
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(AwkwardModule(), loader())
    if options:
        with pytest.raises(TypeError) as raised:
            trainer.save_checkpoint(path, **options)
        return str(raised.value)
    trainer.save_checkpoint(path)
    return ""


def test_options_that_nobody_would_load_with_are_refused(ranks: Ranks, url: str) -> None:
    for message in ranks.run(fit_and_save_last, f"{url}/last.ckpt", storage_options={"anon": True}):
        assert message.startswith("state_dict_type='sharded' takes no storage_options")
    assert not objects_in(url)


def resume_from_nothing(url: str) -> list[str]:
    messages = []
    for name, kind in (("last.ckpt", CheckpointError), ("other.ckpt", FileNotFoundError)):
        with pytest.raises(kind) as raised:
            resume("megatron_ddp", f"{url}/{name}")
        messages.append(str(raised.value))
    return messages


def test_what_is_not_complete_is_refused_by_name(ranks: Ranks, url: str) -> None:
    place = RemoteDirectory(f"{url}/last.ckpt")
    place.put("a1b2c3d4__0_0.distcp", b"left by a save that was cut off")
    for incomplete, missing in ranks.run(resume_from_nothing, url):
        assert incomplete.startswith(f"{place} is no complete sharded checkpoint")
        assert "other.ckpt" in missing


# --- Fabric ----------------------------------------------------------------------------------------------------------


def through_fabric(url: str) -> None:
    """Three steps, a save, three steps; then the last three again, from the directory."""
    fabric = make_fabric("megatron_ddp", {"state_dict_type": "sharded"})
    finals, extras = [], []
    for first in (0, 3):
        net = Net(first)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": first}
        if first:
            state["step"] = 0
            fabric.load(url, state)
            assert state["step"] == 3
            extras.append(net.extra)
        for step in range(first, 6):
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
            fabric.backward(model(data).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if (first, step) == (0, 2):
                fabric.save(url, {**state, "step": 3})
        finals.append([param.detach().clone() for param in net.parameters()])
    for mine, expected in zip(*finals, strict=True):
        assert torch.equal(mine, expected)
    assert extras == [EXTRA]
    assert set(fabric.load(url)) == {"model", "optimizer", "step"}
    with pytest.raises(TypeError, match="takes no storage_options"):
        fabric.strategy.save_checkpoint(url, {}, storage_options={})


def test_fabric_resumes_exactly(ranks: Ranks, url: str) -> None:
    ranks.run(through_fabric, f"{url}/checkpoint")
