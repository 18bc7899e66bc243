"""``MegatronDDPStrategy(context_parallel_size=2)``: ranks with parts of a sequence train as one process with the whole
of it, and each counts its own labels. The attention is the test's own: keys and values are gathered."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from megastrategy import MegatronDDPStrategy
from tests.support import sequences
from tests.support.comparison import message
from tests.support.ragged_tokens import count
from tests.support.tensor_parallel import whole

from ..fits import make_trainer
from ..model_parallel_fits import NUM_SEQUENCES, assert_close, part_of_loss, read, sequence_data, sgd
from ..rank_processes import Ranks
from . import test_lightning_experts as experts
from . import test_lightning_tensor_parallel as tensor

RANKS, EPOCHS = 4, 2


class LitAttention(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = sequences.Attention()
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mesh = self.device_mesh["context_parallel"]
        self.seen.append(batch[0][0].chunk(mesh.size())[mesh.get_local_rank()].tolist())
        loss, num_tokens = part_of_loss(self.model, batch, mesh)
        self.trainer.strategy.count_tokens(num_tokens)  # its own, of its part
        self.log("labels", float(num_tokens), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def fit(options: dict[str, Any], path: Path | None, accumulate: int = 1, resume: Path | None = None) -> dict[str, Any]:
    module = LitAttention()
    trainer = make_trainer(
        MegatronDDPStrategy(bucket_size=90, **options),
        max_epochs=EPOCHS,
        gradient_clip_val=0.1,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, DataLoader(sequence_data(), shuffle=True), ckpt_path=resume)
    trainer.save_checkpoint(str(path))
    weights = {name: value.detach().clone() for name, value in module.model.state_dict().items()}
    names = module.device_mesh.mesh_dim_names
    return {"weights": weights, "seen": module.seen, "labels": float(trainer.callback_metrics["labels"]), "mesh": names}


def train_alone(dp: int, accumulate: int) -> dict[str, Tensor]:
    """On the same batches, in torch alone, with the mean over all labels of a step."""
    module = sequences.Attention()
    data = sequence_data()
    samplers = [DistributedSampler(data, dp, rank, shuffle=True) for rank in range(dp)]
    steps = []
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        samples = torch.tensor([list(sampler) for sampler in samplers]).view(dp, -1, accumulate).transpose(0, 1)
        steps += [[data[sample] for sample in step] for step in samples.flatten(1).tolist()]
    return sequences.train_on_whole_sequences(module, sgd(module), steps)


@pytest.mark.parametrize(("cp", "accumulate", "options"), [(2, 1, {}), (2, 2, {"use_distributed_optimizer": False})])
def test_parts_of_a_sequence_train_as_one_process(
    mesh: Ranks, tmp_path: Path, cp: int, accumulate: int, options: dict[str, Any]
) -> None:
    expected = train_alone(RANKS // cp, accumulate)
    together = mesh.run(fit, {"context_parallel_size": cp, **options}, tmp_path / "saved", accumulate)
    num_labels = sum(count(labels) for _, labels in sequence_data())
    for rank, own in enumerate(together):
        assert own["mesh"] == ("data_parallel", "context_parallel")
        assert own["labels"] == num_labels, "each once"
        torch.testing.assert_close(own["weights"], expected, rtol=0.0, atol=1e-6)
        assert len(own["seen"]) == EPOCHS * NUM_SEQUENCES * cp // RANKS
        first = rank - rank % cp
        for parts in zip(*(each["seen"] for each in together[first : first + cp]), strict=True):
            assert [*itertools.chain(*parts)] in sequence_data().tensors[0].tolist(), "one sequence for a context group"
    saved = {f"model.{name}": value for name, value in expected.items()}
    torch.testing.assert_close(dict(read(tmp_path / "saved")["state_dict"]), saved, rtol=0.0, atol=1e-6)


# --- beside other parallelism ----------------------------------------------------------------------------------------


class PartsOfLayers(tensor.LitModel):
    """Its layers work on each place of a sequence alone; trains them on a part."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch[0], batch[0].roll(-1, 1)
        if self.device_mesh is not None:
            mesh = self.device_mesh["context_parallel"]
            tokens, targets = (each.chunk(mesh.size(), 1)[mesh.get_local_rank()] for each in (tokens, targets))
        loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def fit_beside(devices: int, path: Path, epochs: int, resume: Path | None) -> float:
    strategy = MegatronDDPStrategy(context_parallel_size=2, tensor_parallel_size=2) if devices > 1 else "ddp"
    trainer = make_trainer(strategy, devices=devices, max_epochs=epochs, gradient_clip_val=0.1)
    trainer.fit(PartsOfLayers(), tensor.loader(4), ckpt_path=resume)
    trainer.save_checkpoint(str(path))
    return float(trainer.callback_metrics["loss"])


def test_parts_of_sequences_and_layers_train(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    for epochs in (1, 2):
        sources = [None if epochs == 1 else tmp_path / f"{who} 1" for who in ("alone", "mesh")]
        [expected] = one_rank.run(fit_beside, 1, tmp_path / f"alone {epochs}", epochs, sources[0])
        losses = mesh.run(fit_beside, RANKS, tmp_path / f"mesh {epochs}", epochs, sources[1])
        assert losses == pytest.approx([expected] * RANKS, rel=1e-5)
        one, four = (read(tmp_path / f"{who} {epochs}") for who in ("alone", "mesh"))
        for part in ("state_dict", "optimizer_states"):
            assert_close(four[part], one[part], part)


class LitExpertsOfParts(experts.LitExperts):
    """Each rank's tokens are half of its group's."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rank = self.device_mesh.get_local_rank("context_parallel")
        return self.model.loss(*(whole.chunk(2)[rank] for whole in batch), self.model)


def fit_experts(ep: int) -> dict[str, Tensor]:
    module = LitExpertsOfParts()
    strategy = MegatronDDPStrategy(bucket_size=200, context_parallel_size=2, expert_parallel_size=ep)
    make_trainer(strategy, max_epochs=1).fit(module, experts.loader(RANKS))
    return {name: whole(param) for name, param in module.model.named_parameters()}


def test_experts_are_divided_over_context_ranks_too(mesh: Ranks) -> None:
    module, samples = experts.LitExperts(), experts.loader(RANKS).dataset
    optimizer = module.configure_optimizers()
    by_rank = [list(DistributedSampler(samples, 2, rank, shuffle=True)) for rank in range(2)]
    for step in range(len(by_rank[0]) // experts.BATCH_SIZE):
        optimizer.zero_grad()
        for own in by_rank:
            numbers = own[step * experts.BATCH_SIZE : (step + 1) * experts.BATCH_SIZE]
            for part in torch.tensor(numbers).chunk(2):
                (module.model.loss(*samples[part], module.model) / RANKS).backward()
        optimizer.step()
    expected = {name: param.detach() for name, param in module.model.named_parameters()}
    for weights in mesh.run(fit_experts, RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=2e-6)


def refusals() -> dict[str, str]:
    def fit_with(**options: Any) -> Any:
        make_trainer(MegatronDDPStrategy(**options), max_epochs=1).fit(LitAttention(), DataLoader(sequence_data()))

    return {
        "zero": message(ValueError, lambda: MegatronDDPStrategy(context_parallel_size=0)),
        "three": message(ValueError, lambda: fit_with(context_parallel_size=3)),
        "six": message(ValueError, lambda: fit_with(context_parallel_size=3, tensor_parallel_size=2)),
    }


def test_sizes_that_cannot_be_are_refused(mesh: Ranks) -> None:
    way_out = "does not divide the 4 ranks: choose devices and num_nodes so that it does"
    for found in mesh.run(refusals):
        assert found == {
            "zero": "context_parallel_size=0: expected at least one rank",
            "three": f"context_parallel_size=3 {way_out}",
            "six": f"tensor_parallel_size=2 times context_parallel_size=3 {way_out}",
        }
