"""A pipeline among the things that a training loop does: reductions, failures, freezing, evaluation, misuse."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from megastrategy.core import Event, EventKind
from megastrategy.errors import LossTokensError, ReplicaMismatchError, StageError
from megastrategy.pipeline import Pipeline
from tests.support.comparison import message
from tests.support.pipelines import (
    ROUNDING,
    SAMPLES,
    SEQUENCE,
    VOCAB,
    Block,
    Case,
    Trainee,
    answers,
    batch_of,
    loss_of,
    make_layers,
    train_alone,
)
from tests.support.processes import run_processes
from tests.support.tensor_parallel import adamw

CASE = Case((2, 4), tied=True, steps=4)


def forward(trainee: Trainee, step: int = 0) -> Tensor:
    tokens, targets = batch_of(trainee.dp_rank, step)
    loss: Tensor = trainee.model(tokens, target=targets)
    return loss


def weights(trainee: Trainee) -> dict[str, Tensor]:
    """This rank's parts."""
    named = trainee.net.named_parameters()
    return {name: getattr(param, "_local_tensor", param).detach().clone() for name, param in named}


def unchanged(trainee: Trainee, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], weight) for name, weight in weights(trainee).items())


# --- each of these runs on 2 x 2 ranks, all together, and returns what the tests below look at ------------------------


def reductions(mesh: DeviceMesh) -> dict[str, tuple[dict[int, int], int, int]]:
    """By schedule: the reductions by bucket in the last of three steps, the number of buckets, and of backwards that
    ended after the first reduction had begun."""
    found = {}
    for case in (CASE, Case((1, 2, 2, 1), "Interleaved1F1B", tied=True)):
        events: list[Event] = []
        trainee = Trainee.make(mesh, case, listener=events.append)
        trainee.train(range(2))
        events.clear()
        trainee.train(range(2, 3))
        starts = [place for place, event in enumerate(events) if event.kind == EventKind.REDUCE_START]
        ends = [place for place, event in enumerate(events) if event.kind == EventKind.BACKWARD_END]
        counted = Counter(events[place].index for place in starts)
        num_buckets = len(trainee.model.layout.buckets)
        trainee.model.close()
        found[case.schedule] = dict(counted), num_buckets, sum(end > starts[0] for end in ends)
    return found


def inf_in_one_stage(mesh: DeviceMesh, case: Case = CASE, on_rank: int = 0) -> tuple[float, bool]:
    """The scale after a step that has to be skipped everywhere, and whether weights are what they were."""
    trainee = Trainee.make(mesh, case)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    before = weights(trainee)
    if dist.get_rank() == on_rank:
        # no copy of a tied weight, which brings it to the other stage by itself
        trainee.net.layers[1].up.weight.register_hook(lambda grad: grad * float("inf"))
    scaler.scale(forward(trainee)).backward()
    scaler.step(trainee.optimizer)
    scaler.update()
    same = unchanged(trainee, before)
    trainee.model.close()
    return scaler.get_scale(), same


def halves_of_a_loss(mesh: DeviceMesh) -> float:
    """How far the gradient of half the loss is from half of the loss's."""
    grads = []
    for factor in (1.0, 0.5):
        trainee = Trainee.make(mesh, CASE)
        (factor * forward(trainee)).backward()
        params = list(trainee.net.parameters())
        grads.append([trainee.optimizer.full_grad(param) for param in params])
        trainee.model.close()
    return max(float((whole / 2 - half).abs().max()) for whole, half in zip(*grads, strict=True))


def misuse(mesh: DeviceMesh) -> dict[str, str]:
    trainee = Trainee.make(mesh, CASE)
    tokens, targets = batch_of(trainee.dp_rank, 0)
    found = {}
    with trainee.model.no_sync():
        found["no_sync"] = message(StageError, lambda: forward(trainee))
    forward(trainee).backward()
    found["accumulates"] = message(StageError, lambda: forward(trainee).backward())
    trainee.optimizer.step()
    loss = forward(trainee)
    loss.backward(retain_graph=True)
    found["twice"] = message(StageError, loss.backward)
    trainee.optimizer.zero_grad()
    found["tokens"] = message(LossTokensError, lambda: trainee.model.count_tokens(5))
    found["no target"] = message(StageError, lambda: trainee.model(tokens))
    found["does not divide"] = message(ValueError, lambda: trainee.model(tokens[:6], target=targets[:6]))
    found["differ"] = message(ValueError, lambda: trainee.model(tokens[:4], target=targets))
    found["unknown"] = message(TypeError, lambda: trainee.model(tokens, target=targets, mask=tokens))
    rows = SAMPLES if mesh.get_local_rank("pp") == 0 else SAMPLES // 2
    found["kinds"] = message(StageError, lambda: trainee.model(tokens[:rows], target=targets[:rows]))
    alone = Pipeline(make_layers(CASE), (2, 4), loss=loss_of, microbatches=4, mesh=mesh["pp"])
    found["not wrapped"] = message(StageError, lambda: alone(tokens, target=targets))
    elsewhere = trainee.net.layers[5 if mesh.get_local_rank("pp") == 0 else 0]
    found["elsewhere"] = message(StageError, lambda: elsewhere(tokens))
    trainee.model.close()

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Pipeline(make_layers(CASE), (2, 4), loss=loss_of, microbatches=4, mesh=mesh["pp"])
            self.scale = nn.Parameter(torch.ones(1))

    group = mesh.get_group("dp")
    found["outside"] = message(ValueError, lambda: DistributedDataParallel(Outside(), process_group=group))
    layers = make_layers(CASE)
    layers[4], layers[5] = nn.Identity(), nn.Identity()
    empty = functools.partial(Pipeline, layers, (4, 2), loss=loss_of, microbatches=4, mesh=mesh["pp"])
    if mesh.get_local_rank("pp") == 1:
        found["empty"] = message(ValueError, empty)
    return found


def copied_and_compared(mesh: DeviceMesh) -> tuple[list[str], str, str]:
    """The parameters of a copy, an error of its forward, and what comparing finds after a write on one stage."""
    trainee = Trainee.make(mesh, CASE)
    trainee.train(range(1))
    trainee.model.check_replicas()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(trainee.net)))
    names = [name for name, _ in copied.named_parameters()]
    tokens, targets = batch_of(trainee.dp_rank, 0)
    error = message(StageError, lambda: copied(tokens, target=targets))
    if mesh.get_local_rank("pp") == 1:
        with torch.no_grad():
            trainee.net.layers[5].weight[0, 0] += 1.0
    found = message(ReplicaMismatchError, trainee.model.check_replicas)
    trainee.model.close()
    return names, error, found


def unfrozen_in_training(mesh: DeviceMesh) -> float:
    """The farthest that a weight is from one process's, after what was frozen joined in the third step: layers of both
    stages; those of the first alone; and a tied weight with them."""
    cases = Case((2, 4), frozen="prefix"), Case((3, 3), frozen="prefix"), Case((3, 3), frozen="prefix", tied=True)
    return max(_far_after_unfreezing(mesh, case) for case in cases)


def _far_after_unfreezing(mesh: DeviceMesh, case: Case) -> float:
    trainee = Trainee.make(mesh, dataclasses.replace(case, clip_norm=None))
    trainee.train(range(2))
    for layer in trainee.net.layers:
        layer.requires_grad_(True)
    trainee.train(range(2, 4))
    found = weights(trainee)
    trainee.model.close()

    layers = nn.ModuleList(make_layers(trainee.case))
    optimizer = adamw(layers.parameters())
    for step in range(4):
        if step == 2:
            layers.requires_grad_(True)
        optimizer.zero_grad()
        for dp_rank in range(mesh.size(1)):
            for x, targets in zip(*(part.chunk(4) for part in batch_of(dp_rank, step)), strict=True):
                for layer in layers:
                    x = layer(x)
                (loss_of(x, targets) / (4 * mesh.size(1))).backward()
        optimizer.step()
    alone = {f"layers.{name}": p for name, p in layers.named_parameters(remove_duplicate=False)}
    return max(float((weight - alone[name]).abs().max()) for name, weight in found.items())


class Gate(nn.Module):
    """Takes two activations and an input from outside, and returns two."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(24)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x) * mask.unsqueeze(-1), skip


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(tokens), self.embed(tokens.flip(-1))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, VOCAB)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.head(self.norm((x + skip).flatten(0, 1)).view(x.shape))


def inputs_and_tuples(mesh: DeviceMesh) -> tuple[float, float, list[int]]:
    """Errors of gradients and of evaluated outputs against one process, and how often batch norms have counted."""
    case = Case((2, 2))

    def build() -> list[nn.Module]:
        torch.manual_seed(3)
        return [Fork(), Gate(), Gate(), Join()]

    net = Pipeline(build(), case.split, loss=loss_of, microbatches=2, mesh=mesh["pp"], inputs={1: "mask", 2: ["mask"]})
    model = DistributedDataParallel(
        net, DistributedDataParallelConfig(broadcast_buffers=False), process_group=mesh.get_group("dp")
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    mask = (torch.arange(SEQUENCE) % 2).float().expand(SAMPLES, SEQUENCE)
    tokens, targets = batch_of(0, 0)
    model(tokens, mask=mask, target=targets).backward()
    grads = {name: optimizer.full_grad(param) for name, param in net.named_parameters()}
    counts = [int(module.num_batches_tracked) for module in net.modules() if isinstance(module, nn.BatchNorm1d)]
    model.eval()
    with torch.no_grad():
        outputs = [net(tokens[:size], mask=mask[:size]) for size in (SAMPLES, 3, 1)]  # none of two microbatches
    model.close()

    alone = nn.ModuleList(build())
    for part in range(2):
        rows = slice(part * SAMPLES // 2, (part + 1) * SAMPLES // 2)
        x, skip = alone[0](tokens[rows])
        for gate in (alone[1], alone[2]):
            x, skip = gate(x, skip, mask[rows])
        (loss_of(alone[3](x, skip), targets[rows]) / 2).backward()
    named = {f"layers.{name}": param for name, param in alone.named_parameters()}
    grad_error = max(float((grad - named[name].grad).abs().max()) for name, grad in grads.items() if grad is not None)  # type: ignore[operator]
    alone.eval()
    with torch.no_grad():
        expected = []
        for size in (SAMPLES, 3, 1):
            x, skip = alone[0](tokens[:size])
            for gate in (alone[1], alone[2]):
                x, skip = gate(x, skip, mask[:size])
            expected.append(alone[3](x, skip))
    return grad_error, max(float((o - e).abs().max()) for o, e in zip(outputs, expected, strict=True)), counts


def recomputed(mesh: DeviceMesh) -> float:
    """The farthest that a weight is from training without checkpoints, re-entrant and not."""
    found = []
    for reentrant in (None, False, True):
        trainee = Trainee.make(mesh, CASE)
        for layer in trainee.net.layers:
            if reentrant is not None and isinstance(layer, Block):
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
        found.append(trainee.train(range(3)).weights)
        trainee.model.close()
    return max(float((other[n] - w).abs().max()) for other in found[1:] for n, w in found[0].items())


def from_meta(mesh: DeviceMesh) -> tuple[set[str], bool]:
    """The devices of this rank's parameters, and whether a copy is equal on both stages."""
    with torch.device("meta"):
        layers = make_layers(CASE)
    net = Pipeline(layers, (2, 4), loss=loss_of, microbatches=4, mesh=mesh["pp"])
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    tied = net.layers[0] if mesh.get_local_rank("pp") == 0 else net.layers[5]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, tied.weight.detach().clone())
    model.close()
    return {str(p.device) for p in net.parameters()}, all(torch.equal(w, everybody[0]) for w in everybody)


ASKED = (
    reductions,
    inf_in_one_stage,
    halves_of_a_loss,
    misuse,
    copied_and_compared,
    unfrozen_in_training,
    inputs_and_tuples,
    recomputed,
    from_meta,
)


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    """By rank."""
    return run_processes(4, answers, ASKED, 2, timeout_s=400.0)


def test_step_reduces_each_bucket_once(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        for schedule, (counts, num_buckets, backwards) in answer["reductions"].items():
            assert counts == dict.fromkeys(range(num_buckets), 1)
            assert num_buckets > 1
            # under an interleaved schedule a stage is reduced while the rank's other one has backwards left
            assert backwards == 1 if schedule == "1F1B" else backwards > 1, (schedule, backwards)


def test_infinite_gradient_skips_the_step_of_all(answered: list[dict[str, Any]]) -> None:
    assert [answer["inf_in_one_stage"] for answer in answered] == [(2.0, True)] * 4


def test_factor_of_loss_is_one_of_gradients(answered: list[dict[str, Any]]) -> None:
    assert [answer["halves_of_a_loss"] for answer in answered] == [0.0] * 4


SAID = {
    "no_sync": "it was called under no_sync()",
    "accumulates": "no step has used those of the last batch",
    "twice": "backward was called twice",
    "tokens": "let the loss function call count_tokens",
    "no target": "pass target, or evaluate under torch.no_grad()",
    "does not divide": "a batch of 6 does not divide into microbatches=4",
    "differ": "first dimensions of [4, 8]",
    "unknown": "has an argument 'mask', which no layer gets",
    "kinds": "the stages were given batches of different kinds",
    "not wrapped": "wrap the module that has it",
    "elsewhere": "this layer is on another rank",
    "outside": "parameter 'scale' is trained and is outside of the pipeline",
    "empty": "has Identity, Identity, and no parameter",
}


@pytest.mark.parametrize("what", SAID)
def test_misuse_is_refused_by_name(answered: list[dict[str, Any]], what: str) -> None:
    told = [answer["misuse"][what] for answer in answered if what in answer["misuse"]]
    assert told
    assert all(SAID[what] in text for text in told)


def test_copy_has_only_its_layers(answered: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answered):
        names, error, found = answer["copied_and_compared"]
        assert {int(name.split(".")[1]) for name in names} == ({0, 1} if rank < 2 else {2, 3, 4, 5})
        assert "this layer is on another rank" in error
        assert "parameter 'layers.0.weight' has one value on rank of the stages 0" in found


def test_unfrozen_stage_equals_one_process(answered: list[dict[str, Any]]) -> None:
    assert max(answer["unfrozen_in_training"] for answer in answered) <= ROUNDING


def test_layers_get_inputs_and_pass_tuples(answered: list[dict[str, Any]]) -> None:
    for grad_error, output_error, counts in (answer["inputs_and_tuples"] for answer in answered):
        assert grad_error <= 1e-6
        assert output_error <= 1e-5
        assert counts in ([], [2]), "once a microbatch"


def test_recomputed_activations_change_nothing(answered: list[dict[str, Any]]) -> None:
    assert max(answer["recomputed"] for answer in answered) <= ROUNDING


def test_layers_on_meta_get_memory(answered: list[dict[str, Any]]) -> None:
    assert [answer["from_meta"] for answer in answered] == [({"cpu"}, True)] * 4


def test_one_process_trains_the_same_module() -> None:
    case = Case((6,), steps=4)
    net = Pipeline(make_layers(case), (2, 4), loss=loss_of, microbatches=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-5)
    for step in range(case.steps):
        optimizer.zero_grad()
        tokens, targets = batch_of(0, step)
        net(tokens, target=targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    alone = train_alone(case, 1)
    for name, param in net.named_parameters():
        torch.testing.assert_close(param.detach(), alone.weights[name], rtol=0.0, atol=ROUNDING)
