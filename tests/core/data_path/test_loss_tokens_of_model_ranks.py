"""Averages by tokens where ranks share a model or a sequence: pipelines, and context parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.errors import LossTokensError
from tests.support.pipelines import SAMPLES, Case, Trainee, answers, batch_of, make_layers, mesh_of
from tests.support.processes import run_processes
from tests.support.ragged_tokens import IGNORED, count
from tests.support.sequences import Attention, Gathered, summed_loss, train_on_whole_sequences
from tests.support.tensor_parallel import adamw, whole

STEPS = 3
CASES = {
    "1F1B, tied": Case((2, 4), tied=True),
    "interleaved": Case((1, 2, 2, 1), "Interleaved1F1B", tied=True),
    "all-reduce": Case((2, 4), "GPipe", options=(("use_distributed_optimizer", False),)),
}


def ragged(dp_rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Sample ``i`` has ``i`` labels fewer; in step 1 the first rank has none in the first half of its samples."""
    tokens, targets = batch_of(dp_rank, step)
    targets = targets.clone()
    for sample in range(SAMPLES):
        targets[sample, : (sample + 3 * dp_rank) % targets.shape[1]] = IGNORED
    if (dp_rank, step) == (0, 1):
        targets[: SAMPLES // 2] = IGNORED
    return tokens, targets


class Counting:
    """A loss function that counts its tokens for the model that it is given later."""

    model: DistributedDataParallel
    skips_half = False
    num_calls = 0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss, num_tokens = summed_loss(logits, targets)
        self.num_calls += 1
        if not (self.skips_half and self.num_calls % 2):
            self.model.count_tokens(num_tokens)
        return loss


def train_counted(mesh: DeviceMesh, case: Case) -> tuple[dict[str, Tensor], float]:
    loss_of = Counting()
    trainee = Trainee.make(mesh, case, loss=loss_of)
    loss_of.model = trainee.model
    for step in range(STEPS):
        tokens, targets = ragged(trainee.dp_rank, step)
        trainee.model(tokens, target=targets).backward()
        norm = float(trainee.optimizer.clip_grad_norm_(0.1))
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
    with torch.no_grad():  # counts nothing
        trainee.model(*ragged(trainee.dp_rank, 0)[:1], target=ragged(trainee.dp_rank, 0)[1])
    trainee.model.check_replicas()
    weights = {name: whole(param) for name, param in trainee.net.named_parameters()}
    trainee.model.close()
    return weights, norm


def train_uncounted_microbatch(mesh: DeviceMesh) -> str:
    loss_of = Counting()
    trainee = Trainee.make(mesh, Case((2, 4)), loss=loss_of)
    loss_of.model, loss_of.skips_half = trainee.model, True
    tokens, targets = ragged(trainee.dp_rank, 0)
    with pytest.raises(LossTokensError) as raised:
        trainee.model(tokens, target=targets)
    loss_of.skips_half = False
    trainee.model(tokens, target=targets).backward()  # and the next batch is right
    trainee.optimizer.step()
    trainee.model.close()
    return str(raised.value)


def on_stages(names: list[str]) -> dict[str, Any]:
    mesh = mesh_of(2)
    found: dict[str, Any] = {name: train_counted(mesh, CASES[name]) for name in names}
    return found | answers([train_uncounted_microbatch], 2)


def train_alone(case: Case, dp: int) -> tuple[dict[str, Tensor], float]:
    layers = nn.ModuleList(make_layers(case))
    optimizer = adamw(layers.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [ragged(dp_rank, step) for dp_rank in range(dp)]
        total = sum(count(targets) for _, targets in batches)
        for tokens, targets in batches:
            output = tokens
            for layer in layers:
                output = layer(output)
            each = functional.cross_entropy(
                output.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (each / total).backward()
        norm = float(nn.utils.clip_grad_norm_(layers.parameters(), 0.1))
        optimizer.step()
    return {
        f"layers.{name}": param.detach().clone() for name, param in layers.named_parameters(remove_duplicate=False)
    }, norm


@pytest.fixture(scope="module")
def stages() -> list[dict[str, Any]]:
    """By rank of two stages times two data-parallel ranks."""
    return run_processes(4, on_stages, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_pipeline_with_tokens_trains_as_one_process(stages: list[dict[str, Any]], name: str) -> None:
    expected, expected_norm = train_alone(CASES[name], 2)
    relative = 2e-5
    seen = set[str]()
    for by_case in stages:
        weights, norm = by_case[name]
        assert norm == pytest.approx(expected_norm, rel=1e-4)
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=relative, atol=relative)
            seen.add(key)
    assert seen == set(expected)


def test_pipeline_counting_some_losses_is_refused(stages: list[dict[str, Any]]) -> None:
    for by_case in stages:
        assert "counted some of its losses and not others" in by_case["train_uncounted_microbatch"]


# --- one sequence on several ranks -----------------------------------------------------------------------------------


DP, CP = 2, 2


def sequence(number: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    """Four places on each context rank; the first rank has one label, the last has none in number 1."""
    generator = torch.Generator().manual_seed(number + 100 * dp_rank)
    ids, labels = torch.randint(11, (2, 4 * CP), generator=generator)
    labels[1:4] = IGNORED
    if number == 1:
        labels[-4:] = IGNORED
    return ids, labels


def train_on_parts() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
    dp_rank, cp_rank, sequence_group = mesh.get_local_rank("dp"), mesh.get_local_rank("cp"), mesh.get_group("cp")
    module = Attention()
    # The default group: data-parallel times context ranks.
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=90))
    optimizer = DistributedOptimizer(adamw(model.parameters()), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, labels = (both.chunk(CP)[cp_rank] for both in sequence(step, dp_rank))
        loss, num_tokens = summed_loss(model(ids, lambda part: Gathered.apply(part, sequence_group)), labels)
        model.count_tokens(num_tokens)
        loss.backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    model.close()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_parts_of_a_sequence_train_as_the_whole_of_it() -> None:
    """Each rank counts its own labels, and gets gradients from the losses of others."""
    module = Attention()
    steps = [[sequence(step, dp_rank) for dp_rank in range(DP)] for step in range(STEPS)]
    expected = train_on_whole_sequences(module, adamw(module.parameters()), steps)
    for weights in run_processes(DP * CP, train_on_parts):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
