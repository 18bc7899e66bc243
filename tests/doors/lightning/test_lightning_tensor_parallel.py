"""``MegatronDDPStrategy(tensor_parallel_size=2)``: a module written for Lightning's ModelParallelStrategy, without its
``fully_shard`` lines, trains, saves and resumes as in one process."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from megastrategy import MegatronDDPStrategy
from megastrategy.core import OpenDirectory
from megastrategy.tools.conversion import consolidate
from tests.support.comparison import message
from tests.support.tensor_parallel import LanguageModel, adamw, plan, whole

from ..fits import make_trainer
from ..model_parallel_fits import assert_close, num_chunks, read
from ..rank_processes import Ranks

BATCH_SIZE = 2


class LitModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = LanguageModel(64, tied=False, width=16)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.model, mesh, plan(sequence_parallel=True))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        [tokens] = batch
        loss = self.model.loss(self.model(tokens), tokens)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        [tokens] = batch
        self.log("val_loss", self.model.loss(self.model(tokens), tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def loader(batch_size: int, samples: int = 16) -> DataLoader[Any]:
    """Two steps an epoch, where two data-parallel ranks accumulate two batches."""
    tokens = torch.randint(64, (samples, 8), generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


def fit(
    strategy: Any, devices: int, batch_size: int, folder: str, epochs: int, resume: str | None, **options: Any
) -> dict[str, Any]:
    """Trains, and saves a checkpoint called after the number of devices and epochs."""
    module = LitModel()
    trainer = make_trainer(
        strategy, devices=devices, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.1, **options
    )
    validated_on = loader(batch_size, samples=8)
    trainer.fit(module, loader(batch_size), validated_on, ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/{devices} devices, {epochs} epochs.ckpt")
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    saved = f"{folder}/{devices} devices, {epochs} epochs.ckpt"
    [validated] = trainer.validate(LitModel(), validated_on, ckpt_path=saved, verbose=False)
    return {"losses": module.losses, "metrics": metrics, "validated": validated}


def fit_on_mesh(folder: str, epochs: int, resume: str | None, **options: Any) -> dict[str, Any]:
    return fit(MegatronDDPStrategy(tensor_parallel_size=2, **options), 4, BATCH_SIZE, folder, epochs, resume)


def test_mesh_trains_saves_and_resumes_as_one_process(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    [alone] = one_rank.run(fit, "ddp", 1, 2 * BATCH_SIZE, folder, 1, None)
    together = mesh.run(fit_on_mesh, folder, 1, None)
    for rank, own in enumerate(together):
        assert own["losses"] == together[rank - rank % 2]["losses"], "one batch for a tensor group"
        assert own["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
        assert own["validated"] == pytest.approx(alone["validated"], rel=1e-5)
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[2]["losses"], strict=True)]
    assert together[0]["losses"] != together[2]["losses"], "another batch for each data-parallel rank"
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    # the file is what one process wrote
    expected, four = read(tmp_path / "1 devices, 1 epochs.ckpt"), read(tmp_path / "4 devices, 1 epochs.ckpt")
    for part in ("state_dict", "optimizer_states"):
        assert_close(four[part], expected[part], part)
    # each goes on from the other's
    one_rank.run(fit, "ddp", 1, 2 * BATCH_SIZE, folder, 2, f"{folder}/4 devices, 1 epochs.ckpt")
    mesh.run(fit_on_mesh, folder, 2, f"{folder}/1 devices, 1 epochs.ckpt")
    expected, four = read(tmp_path / "1 devices, 2 epochs.ckpt"), read(tmp_path / "4 devices, 2 epochs.ckpt")
    assert_close(four["state_dict"], expected["state_dict"], "resumed")


# --- directories -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(mesh: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by the mesh after an epoch."""
    parts = tmp_path_factory.mktemp("parts")
    mesh.run(fit_on_mesh, str(parts), 1, None, state_dict_type="sharded")
    return parts / "4 devices, 1 epochs.ckpt"


def test_directory_is_that_of_one_process(one_rank: Ranks, mesh: Ranks, directory: Path, tmp_path: Path) -> None:
    folder, parts = str(tmp_path), str(tmp_path / "parts")
    one_rank.run(fit, "ddp", 1, 2 * BATCH_SIZE, folder, 1, None)
    assert num_chunks(directory, "model.model.embed.weight") == 2, "each tensor rank writes its part"
    expected = read(tmp_path / "1 devices, 1 epochs.ckpt")
    assert_close(OpenDirectory(directory).read("model"), dict(expected["state_dict"]), "weights")
    # the tool makes the file of it that "ddp" would have written
    consolidate(directory, tmp_path / "one file.ckpt")
    file = read(tmp_path / "one file.ckpt")
    assert file.keys() == expected.keys()
    for part in ("state_dict", "optimizer_states"):
        assert_close(file[part], expected[part], part)
    # one process goes on from the mesh's directory, and the mesh from its own and from that of one process
    one_rank.run(fit, "ddp", 1, 2 * BATCH_SIZE, folder, 2, f"{folder}/1 devices, 1 epochs.ckpt")
    expected = read(tmp_path / "1 devices, 2 epochs.ckpt")
    mesh.run(fit_on_mesh, parts, 2, str(directory), state_dict_type="sharded")
    resumed = OpenDirectory(tmp_path / "parts" / "4 devices, 2 epochs.ckpt").read("model")
    assert_close(resumed, dict(expected["state_dict"]), "on the mesh")
    one_rank.run(fit_in_one_process, parts, 2, str(directory))
    resumed = OpenDirectory(tmp_path / "parts" / "1 devices, 2 epochs.ckpt").read("model")
    assert_close(resumed, dict(expected["state_dict"]), "in one process")
    one_rank.run(fit_in_one_process, parts, 1, None)
    mesh.run(fit_on_mesh, folder, 2, f"{parts}/1 devices, 1 epochs.ckpt")
    resumed = read(tmp_path / "4 devices, 2 epochs.ckpt")["state_dict"]
    assert_close(resumed, expected["state_dict"], "from one process")


def fit_in_one_process(folder: str, epochs: int, resume: str | None) -> dict[str, Any]:
    return fit(MegatronDDPStrategy(state_dict_type="sharded"), 1, 2 * BATCH_SIZE, folder, epochs, resume)


class FullySharded(LitModel):
    """As it is written for Lightning's strategy; for ours without ``fully_shard``, which refuses scalars."""

    def __init__(self, is_ours: bool) -> None:
        super().__init__()
        self.is_ours = is_ours
        self.model.temperature = nn.Parameter(torch.tensor([0.5]))

    def configure_model(self) -> None:
        super().configure_model()
        if not self.is_ours:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5, foreach=False)


def fit_by_either(path: str, is_ours: bool, epochs: int, resume: str | None) -> list[float]:
    module, strategy = FullySharded(is_ours), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    trainer = make_trainer(
        MegatronDDPStrategy(tensor_parallel_size=2, state_dict_type="sharded") if is_ours else strategy,
        devices=4,
        max_epochs=epochs,
    )
    trainer.fit(module, loader(BATCH_SIZE), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return module.losses


@pytest.mark.nightly
def test_run_of_model_parallel_strategy_goes_on_here(mesh: Ranks, tmp_path: Path) -> None:
    """From its directory, FSDP2's, with the ``fully_shard`` line removed."""
    first, theirs, ours = (str(tmp_path / name) for name in ("first", "theirs", "ours"))
    mesh.run(fit_by_either, first, False, 1, None)
    expected = mesh.run(fit_by_either, theirs, False, 2, first)
    losses = mesh.run(fit_by_either, ours, True, 2, first)
    for own, other in zip(losses, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    assert_close(OpenDirectory(Path(ours)).read("model"), OpenDirectory(Path(theirs)).read("state_dict"))
    assert_close(OpenDirectory(Path(ours)).read("optimizer_0"), OpenDirectory(Path(theirs)).read("optimizer_0"))
    consolidate(Path(theirs), tmp_path / "one file")
    assert_close(dict(read(tmp_path / "one file")["state_dict"]), OpenDirectory(Path(theirs)).read("state_dict"))


# --- losses that are cut ---------------------------------------------------------------------------------------------


class ParallelLoss(pl.LightningModule):
    """A loss that is cut over the vocabulary, with backward as in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            styles = {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            }
            parallelize_module(self, self.device_mesh["tensor_parallel"], styles)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        [tokens] = batch
        with loss_parallel() if self.device_mesh is not None else nullcontext():
            loss = functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        self.losses.append(loss.item())
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel() if self.device_mesh is not None else nullcontext():
            super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def fit_losses(strategy: Any, devices: int, batch_size: int) -> list[float]:
    module = ParallelLoss()
    trainer = make_trainer(
        strategy if devices == 1 else MegatronDDPStrategy(tensor_parallel_size=2), devices=devices, max_epochs=1
    )
    trainer.fit(module, loader(batch_size))
    return module.losses


def test_loss_that_is_cut_over_the_vocabulary(one_rank: Ranks, mesh: Ranks) -> None:
    [alone] = one_rank.run(fit_losses, "ddp", 1, 2 * BATCH_SIZE)
    by_rank = mesh.run(fit_losses, None, 4, BATCH_SIZE)
    means = [sum(pair) / 2 for pair in zip(by_rank[0], by_rank[2], strict=True)]
    assert means == pytest.approx(alone, rel=1e-5)


class MadeOnMeta(LitModel):
    """Gives its embedding values as a user may, when the model is set up; the other modules have had theirs."""

    def on_train_start(self) -> None:
        weight = self.model.head.weight
        self.part, self.spread = tuple(weight._local_tensor.shape), float(whole(weight).std())
        nn.init.constant_(self.model.embed.weight, 0.5)
        nn.init.constant_(self.model.temperature, 1.0)

    def on_train_end(self) -> None:
        self.embed = whole(self.model.embed.weight)
        self.state = self.trainer.strategy.optimizer_state(self.optimizers(use_pl_optimizer=False))


def one_step(max_steps: int = 1) -> pl.Trainer:
    return make_trainer(MegatronDDPStrategy(tensor_parallel_size=2), devices=4, max_steps=max_steps, max_epochs=-1)


class RaisesInStep(LitModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 1:
            raise LookupError(f"in the second step, with {type(loss.grad_fn).__name__}")
        return loss


def raised_in_step() -> str:
    module = RaisesInStep()
    with pytest.raises(LookupError) as caught:
        one_step(max_steps=3).fit(module, loader(BATCH_SIZE))
    one_step().fit(LitModel(), loader(BATCH_SIZE))  # the processes go on
    return str(caught.value)


def test_error_of_a_step_is_the_users(mesh: Ranks) -> None:
    """While its graph refers to the parameters, which torch would not move to the host then."""
    assert all(text.startswith("in the second step, with ") for text in mesh.run(raised_in_step))


def fit_from_meta() -> dict[str, Any]:
    trainer = one_step()
    with trainer.init_module(empty_init=True):
        module = MadeOnMeta()
    was_on_meta = all(tensor.is_meta for tensor in module.parameters())
    with warnings.catch_warnings(record=True) as caught:
        trainer.fit(module, loader(BATCH_SIZE))
    told = [str(one.message) for one in caught if "have no reset_parameters() method" in str(one.message)]
    found = {name: getattr(module, name) for name in ("part", "spread", "embed", "state")}
    return {"meta": was_on_meta, "told": told, **found}


def test_module_on_meta_gets_memory_for_its_parts(mesh: Ranks) -> None:
    outcomes = mesh.run(fit_from_meta)
    [told] = outcomes[0]["told"]
    assert told.startswith("model (LanguageModel) have no"), "its temperature; the layers have one"
    assert len(outcomes[0]["state"]["state"]) > 10
    assert [own["state"] for own in outcomes[1:]] == [{}] * 3, "as under ModelParallelStrategy"
    for own in outcomes:
        assert own["meta"]
        assert own["part"] == (32, 16)
        assert own["spread"] > 0.1, "reset_parameters chose the values of a layer"
        assert torch.equal(own["embed"], outcomes[0]["embed"])
        moved = (own["embed"] - 0.5).abs()
        assert 1e-3 < moved.max() < 1e-2, "one step of AdamW from what on_train_start chose"


class OtherWidth(LitModel):
    """A model that the directory is not of."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(64, tied=False, width=8)


def refusals(directory: str) -> list[str]:
    def fit_with(module: LitModel, size: int, path: str | None = None) -> None:
        strategy = MegatronDDPStrategy(tensor_parallel_size=size)
        make_trainer(strategy, max_epochs=2).fit(module, loader(BATCH_SIZE), ckpt_path=path)

    return [
        message(ValueError, lambda: MegatronDDPStrategy(tensor_parallel_size=0)),
        message(ValueError, lambda: fit_with(LitModel(), 3)),
        message(RuntimeError, lambda: fit_with(OtherWidth(), 2, directory)),
    ]


def test_sizes_and_other_models_are_refused(mesh: Ranks, directory: Path) -> None:
    shapes = (
        "a param with shape torch.Size([64, 16]) from checkpoint, the shape in current model is torch.Size([64, 8])"
    )
    for zero, three, other in mesh.run(refusals, str(directory)):
        assert zero.startswith("tensor_parallel_size=0: ")
        assert three.startswith("tensor_parallel_size=3 does not divide the 4 ranks: ")
        assert f"size mismatch for model.embed.weight: copying {shapes}" in other
