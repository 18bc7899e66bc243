"""``MegatronDDPStrategy(expert_parallel_size=2)``: a module whose ``configure_model`` divides its experts trains, saves
and resumes as in one process that has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from megastrategy import MegatronDDPStrategy
from megastrategy.tools.conversion import consolidate
from tests.support.comparison import message
from tests.support.experts import Model
from tests.support.tensor_parallel import whole

from ..fits import make_trainer
from ..model_parallel_fits import assert_close, read
from ..rank_processes import Ranks

RANKS, BATCH_SIZE, STEPS = 4, 4, 3


class LitExperts(pl.LightningModule):
    def __init__(self, num_experts: int = 5, divides: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model, self.divides = Model(num_experts), divides
        self.losses: list[float] = []

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "expert_mesh", None)  # None under "ddp"
        if mesh is not None and self.divides:
            self.model.divide(mesh["expert_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model.loss(*batch, self.model)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        strategy = self.trainer.strategy
        norms = strategy.grad_norm() if isinstance(strategy, MegatronDDPStrategy) else grad_norm(self, 2.0)
        self.log("norm", norms["grad_2.0_norm_total"], on_step=False, on_epoch=True, sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model.loss(*batch, self.model), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)  # AdamW would hide wrong factors


class OfAllRanks(Sampler[int]):
    """The samples of all ranks for one that accumulates them, batch by batch, as Lightning's samplers divide them."""

    def __init__(self, dataset: Any, shuffle: bool) -> None:
        self.samplers = [DistributedSampler(dataset, RANKS, rank, shuffle=shuffle) for rank in range(RANKS)]

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        by_rank = torch.tensor([list(sampler) for sampler in self.samplers]).view(RANKS, -1, BATCH_SIZE)
        return iter(by_rank.transpose(0, 1).flatten().tolist())

    def __len__(self) -> int:
        return RANKS * len(self.samplers[0])


def loader(num_ranks: int, *, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS * BATCH_SIZE * RANKS, 4, generator=generator)
    dataset = TensorDataset(x, torch.randint(3, (len(x),), generator=generator))
    sampler = OfAllRanks(dataset, shuffle) if num_ranks == 1 else None
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def fit(
    options: dict[str, Any] | None, devices: int, path: Path, epochs: int, resume: Path | None, evaluates: bool = True
) -> dict[str, Any]:
    """Trains with options of the strategy, None for "ddp", and saves a checkpoint."""
    strategy = "ddp" if options is None else MegatronDDPStrategy(bucket_size=200, **options)
    module, saved = LitExperts(), str(path)
    trainer = make_trainer(
        strategy,
        devices=devices,
        max_epochs=epochs,
        accumulate_grad_batches=RANKS // devices,
        gradient_clip_val=0.5,
        use_distributed_sampler=devices > 1,
    )
    evaluated_on = loader(devices, shuffle=False)
    trainer.fit(module, loader(devices), evaluated_on, ckpt_path=resume)
    trainer.save_checkpoint(saved)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    own = module.model.layers[0].up
    held = len(own.to_local() if hasattr(own, "to_local") else own)  # type: ignore[operator, arg-type]
    if not evaluates:
        return {}
    options = options or {}
    evaluated = LitExperts()
    with torch.no_grad():  # the first rank that has the same sends its own
        if trainer.global_rank > 0:
            evaluated.model.head.weight.zero_()
        if trainer.global_rank > 1 and trainer.world_size // options.get("expert_parallel_size", 1) > 1:
            evaluated.model.layers[0].up.zero_()  # type: ignore[operator] # a parameter
    [untrained] = trainer.validate(evaluated, evaluated_on, verbose=False)
    [validated] = trainer.validate(LitExperts(), evaluated_on, ckpt_path=saved, verbose=False)
    return {"metrics": metrics, "untrained": untrained, "validated": validated, "held": held}


EP2 = {"expert_parallel_size": 2}
STRATEGIES: dict[str, dict[str, Any] | None] = {
    "ep2": EP2,
    "ep4": {"expert_parallel_size": 4},
    "all-reduce": {"expert_parallel_size": 2, "use_distributed_optimizer": False},
    "whole": {},
    "ddp": None,
}
HELD = [3, 2, 3, 2]
"""Experts of the five on each of four ranks."""


@pytest.fixture(scope="module")
def alone(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One process with "ddp", torch's own: its files after one epoch and after two, and what it logged."""
    folder = tmp_path_factory.mktemp("alone")
    first = one_rank.run(fit, None, 1, folder / "1", 1, None)
    return folder, first + one_rank.run(fit, None, 1, folder / "2", 2, folder / "1", False)


@pytest.mark.parametrize("name", ["ep2", pytest.param("all-reduce", marks=pytest.mark.nightly)])
def test_divided_experts_train_save_and_resume(
    one_rank: Ranks, mesh: Ranks, tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    folder, expected = alone
    together = mesh.run(fit, STRATEGIES[name], RANKS, tmp_path / "1", 1, None)
    assert [own["held"] for own in together] == HELD
    for own in together:
        for part in ("metrics", "untrained", "validated"):
            assert own[part] == pytest.approx(expected[0][part], rel=1e-5)
    # the file is what one process wrote
    for part in ("state_dict", "optimizer_states"):
        assert_close(read(tmp_path / "1")[part], read(folder / "1")[part])
    # each goes on from the other's
    mesh.run(fit, STRATEGIES[name], RANKS, tmp_path / "2", 2, folder / "1", False)
    one_rank.run(fit, None, 1, tmp_path / "2 alone", 2, tmp_path / "1", False)
    for resumed in ("2", "2 alone"):
        assert_close(read(tmp_path / resumed)["state_dict"], read(folder / "2")["state_dict"])


Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(mesh: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The file of a strategy after one epoch, or the directory where "+" follows its name; each is written once."""
    folder = tmp_path_factory.mktemp("written")

    def write(name: str) -> Path:
        options = STRATEGIES[name.removesuffix("+")]
        if name.endswith("+"):
            options = {"state_dict_type": "sharded", **(options or {})}
        if not (folder / name).exists():
            mesh.run(fit, options, RANKS, folder / name, 1, None, evaluates=False)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("ep2", "ep4"),
        ("ep4+", "ddp"),
        ("whole+", "ep2"),
    ],
)
def test_checkpoint_goes_on_under_any_division(
    mesh: Ranks, written: Written, tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]], writer: str, reader: str
) -> None:
    """Whole experts under torch's own "ddp" included."""
    source = written(writer)
    if reader == "ddp" and writer.endswith("+"):
        source = tmp_path / "one file"
        consolidate(written(writer), source)
    mesh.run(fit, STRATEGIES[reader], RANKS, tmp_path / "2", 2, source, evaluates=False)
    for part in ("state_dict", "optimizer_states"):
        assert_close(read(tmp_path / "2")[part], read(alone[0] / "2")[part])


# --- averages by tokens ----------------------------------------------------------------------------------------------


class Ragged(LitExperts):
    """Counts the labels that are not 0; their number differs by rank."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, num_tokens = loss_of_some(self.model, batch)
        self.trainer.strategy.count_tokens(num_tokens)  # type: ignore[attr-defined] # ours
        return loss


def loss_of_some(model: Model, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return functional.cross_entropy(model(x), y, ignore_index=0, reduction="sum"), int((y != 0).sum())


def fit_ragged() -> dict[str, Tensor]:
    module = Ragged()
    make_trainer(MegatronDDPStrategy(bucket_size=200, **EP2), max_epochs=1).fit(module, loader(RANKS))
    return {name: whole(param) for name, param in module.model.named_parameters()}


def test_losses_of_tokens_train_as_their_mean(mesh: Ranks) -> None:
    """An expert's gradients come from the losses of several ranks, and each has the weight of its loss."""
    module, samples = LitExperts(), loader(RANKS).dataset
    optimizer = module.configure_optimizers()
    in_turn = torch.tensor(list(OfAllRanks(samples, shuffle=True))).view(STEPS, RANKS, BATCH_SIZE)
    numbers = set()
    for step in in_turn:
        optimizer.zero_grad()
        each = [loss_of_some(module.model, samples[own]) for own in step]
        numbers |= {num_tokens for _, num_tokens in each}
        (sum(loss for loss, _ in each) / sum(num_tokens for _, num_tokens in each)).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert len(numbers) > 2
    expected = {key: param.detach() for key, param in module.model.named_parameters()}
    for weights in mesh.run(fit_ragged):
        assert_close(weights, expected)


# --- callbacks and exceptions ----------------------------------------------------------------------------------------


def fit_averaged(options: dict[str, Any]) -> dict[str, Tensor]:
    module = LitExperts()
    strategy = MegatronDDPStrategy(bucket_size=200, **options)
    make_trainer(strategy, max_epochs=3, callbacks=[EMAWeightAveraging(decay=0.5)]).fit(module, loader(RANKS))
    return {name: whole(param) for name, param in module.model.named_parameters()}


def test_divided_experts_are_averaged(mesh: Ranks) -> None:
    for weights, whole_experts in zip(mesh.run(fit_averaged, EP2), mesh.run(fit_averaged, {}), strict=True):
        assert_close(weights, whole_experts)


def fit_stochastic() -> str:
    averages = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    trainer = make_trainer(MegatronDDPStrategy(**EP2), max_epochs=1, callbacks=[averages])
    with pytest.raises(ValueError, match="share a model") as raised:
        trainer.fit(LitExperts(), loader(RANKS))
    return str(raised.value)


def test_stochastic_averages_of_parts_are_refused(mesh: Ranks) -> None:
    for text in mesh.run(fit_stochastic):
        assert text.startswith("StochasticWeightAveraging with ranks that share a model")
        assert "Use WeightAveraging" in text


class RaisesInStep(LitExperts):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            raise LookupError("in the third step")


def fit_raising(options: dict[str, Any], folder: Path) -> list[str]:
    saves = ModelCheckpoint(folder, save_on_exception=True, save_top_k=0)
    trainer = make_trainer(MegatronDDPStrategy(**options), max_epochs=1, enable_checkpointing=True, callbacks=[saves])
    texts = [message(LookupError, lambda: trainer.fit(RaisesInStep(), loader(RANKS)))]
    make_trainer(MegatronDDPStrategy(**options), max_epochs=1).fit(LitExperts(), loader(RANKS))  # the processes go on
    return texts


@pytest.mark.parametrize(("options", "num_saved"), [(EP2, 0), ({"context_parallel_size": 2}, 1)])
def test_only_a_whole_model_is_saved_on_exception(
    mesh: Ranks, tmp_path: Path, options: dict[str, Any], num_saved: int
) -> None:
    assert mesh.run(fit_raising, options, tmp_path / "saved") == [["in the third step"]] * RANKS
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == num_saved


# --- refusals --------------------------------------------------------------------------------------------------------


REFUSED: dict[str, dict[str, Any]] = {
    "expert_parallel_size=0: expected at least one rank": {"expert_parallel_size": 0},
    "expert_parallel_size=2 and tensor_parallel_size=2 are not supported together": {"tensor_parallel_size": 2},
    "expert_parallel_size=2 and pipeline_parallel_size=2 are not supported together": {"pipeline_parallel_size": 2},
    "Leave both out with expert_parallel_size": {"find_unused_parameters": False},
    "use_contiguous_buffers=False is not supported with expert_parallel_size": {
        "use_distributed_optimizer": False,
        "use_contiguous_buffers": False,
        "overlap_grad_reduce": False,
    },
    "expert_parallel_size=3 does not divide the 4 ranks: choose devices and num_nodes so that it does": {
        "expert_parallel_size": 3
    },
    "expert_parallel_size=2 and a LitExperts without divided experts": {},
    "a multiple of the 4 ranks that experts are divided over is expected": {
        "expert_parallel_size": 4,
        "num_distributed_optimizer_instances": 2,
    },
}


def refusals() -> list[str]:
    def fit_with(options: dict[str, Any]) -> Any:
        strategy = MegatronDDPStrategy(**{"bucket_size": 200, "expert_parallel_size": 2, **options})
        make_trainer(strategy, max_epochs=1).fit(LitExperts(divides=bool(options)), loader(RANKS))

    return [message(ValueError, lambda options=options: fit_with(options)) for options in REFUSED.values()]


def test_refusals_name_what_does_not_go_together(mesh: Ranks) -> None:
    for texts in mesh.run(refusals):
        for text, expected in zip(texts, REFUSED, strict=True):
            assert expected in text
            assert "\n" not in text
