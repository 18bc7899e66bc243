"""``Fabric(strategy=MegatronDDPStrategy(pipeline_parallel_size=2))``: a loop over a Pipeline trains, saves and resumes
as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision

from megastrategy import Pipeline
from megastrategy.fabric import MegatronDDPStrategy
from tests.doors.lightning.test_lightning_pipeline import BATCH_SIZE, CASE, loader
from tests.doors.lightning.test_lightning_tensor_parallel import assert_close, read
from tests.support.pipelines import loss_of, make_layers
from tests.support.tensor_parallel import adamw

from ..rank_processes import Ranks


def train(strategy: Any, folder: str, resume: str | None = None) -> dict[str, Any]:
    """One epoch with clipping, then a file called after the number of ranks and of epochs."""
    devices = 4 if isinstance(strategy, MegatronDDPStrategy) else 1
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    mesh = fabric.strategy.device_mesh["pipeline_parallel"] if devices > 1 else None
    net = Pipeline(make_layers(CASE), CASE.split, loss=loss_of, microbatches=2, mesh=mesh)
    model, optimizer = fabric.setup(net, adamw(net.parameters()))
    epochs = 1
    if resume is not None:
        state = {"model": model, "optimizer": optimizer, "epochs": 0}
        fabric.load(resume, state)
        epochs += state["epochs"]  # type: ignore[operator]
    losses, norms = [], []
    for tokens, targets in fabric.setup_dataloaders(loader(BATCH_SIZE if devices > 1 else 2 * BATCH_SIZE)):
        loss = model(tokens, target=targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        losses.append(loss.item())
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
    fabric.save(f"{folder}/{devices} ranks, {epochs}", {"model": model, "optimizer": optimizer, "epochs": epochs})
    fabric.barrier()
    return {"losses": losses, "norms": norms}


def train_on_mesh(folder: str, resume: str | None = None) -> dict[str, Any]:
    return train(MegatronDDPStrategy(pipeline_parallel_size=2), folder, resume)


def refused_precision() -> str:
    strategy = MegatronDDPStrategy(pipeline_parallel_size=2)
    # Fabric makes precision="16-mixed" another on the CPU.
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[MixedPrecision("16-mixed", "cpu")])
    fabric.launch()
    mesh = fabric.strategy.device_mesh["pipeline_parallel"]  # type: ignore[index] # launched
    net = Pipeline(make_layers(CASE), CASE.split, loss=loss_of, microbatches=2, mesh=mesh)
    with pytest.raises(ValueError, match="16-mixed") as caught:
        fabric.setup(net, adamw(net.parameters()))
    return str(caught.value)


def test_losses_that_are_scaled_after_the_backwards_are_refused(mesh: Ranks) -> None:
    assert all("Choose 'bf16-mixed'" in said for said in mesh.run(refused_precision))


def test_stages_train_save_and_resume_as_one_process_does(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    [alone] = one_rank.run(train, "auto", folder)
    together = mesh.run(train_on_mesh, folder)
    for rank, own in enumerate(together):
        assert own["losses"] == together[rank % 2]["losses"]
        assert own["norms"] == together[0]["norms"], "the same bits on every rank"
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[1]["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    expected, four = read(tmp_path / "1 ranks, 1"), read(tmp_path / "4 ranks, 1")
    for part in ("model", "optimizer"):
        assert_close(four[part], expected[part], part)
    one_rank.run(train, "auto", folder, f"{folder}/4 ranks, 1")
    mesh.run(train_on_mesh, folder, f"{folder}/1 ranks, 1")
    assert_close(read(tmp_path / "4 ranks, 2")["model"], read(tmp_path / "1 ranks, 2")["model"], "resumed")
