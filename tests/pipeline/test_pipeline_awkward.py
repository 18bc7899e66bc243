"""Layers, targets, losses and loops of a pipeline that are less usual: each equals one process, or is refused."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedOptimizer, GradScaler
from megastrategy.errors import StageError
from megastrategy.pipeline import Pipeline
from tests.support.pipelines import PASSES_WHOLE_NUMBERS, ROUNDING, Case, Trainee, answers, batch_of
from tests.support.processes import run_processes

from .test_pipeline_outputs import LENGTH, SAMPLES, WIDTH, Both, Mean


class Tokens(nn.Module):
    """Passes indices on beside activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(tokens), tokens


class TokensAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.out(hidden + self.embed(tokens)).mean(1)


class Transposed(nn.Module):
    """Returns a tensor that is not in the order of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2)


class Narrowed(nn.Module):
    """Returns a part of what it computes, which is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :3]


class InPlace(nn.Module):
    """Writes into the batch that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1.0))


def far(mesh: DeviceMesh, layers: list[nn.Module], x: Tensor, target: Any, loss: Any = functional.mse_loss) -> float:
    """How far a loss, the gradients and an evaluated output are from those of one process."""
    both = Both(mesh, layers, loss)
    both.x, both.target = x, target
    apart = max(both.trained(), both.evaluated())
    both.model.close()
    return apart


def indices_between_stages(mesh: DeviceMesh) -> float:
    torch.manual_seed(0)
    tokens = torch.randint(50, (4, 5))
    dirty = [torch.full((2, 5), 2**40) for _ in range(50)]  # memory that the next tensors of this size get
    del dirty
    layers, target = [Tokens(), TokensAgain()], torch.zeros(4, 4)
    if not PASSES_WHOLE_NUMBERS:
        with pytest.raises(StageError, match=r"layer 0 \(Tokens\) .* returned whole numbers, which .* since 2.12"):
            far(mesh, layers, tokens, target)
        return 0.0
    return far(mesh, layers, tokens, target)


def transposed_between_stages(mesh: DeviceMesh) -> float:
    torch.manual_seed(0)
    return far(mesh, [Transposed(), Transposed()], torch.randn(4, 8, 8), torch.zeros(4, 8, 8))


def views_in_and_out(mesh: DeviceMesh) -> float:
    """A batch without its last column, as of tokens, and an output without the columns that fill it up."""
    torch.manual_seed(0)
    return far(mesh, [nn.Linear(8, 8), Narrowed()], torch.randn(4, 9)[:, :8], torch.zeros(4, 3))


def written_batch(mesh: DeviceMesh) -> float:
    torch.manual_seed(0)
    return far(mesh, [InPlace().requires_grad_(False), nn.Linear(8, 4)], torch.randn(4, 8), torch.zeros(4, 4))


def tree_of_targets(mesh: DeviceMesh) -> float:
    torch.manual_seed(0)

    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        [other] = target["two"]
        return functional.mse_loss(output, target["one"]) + target["weight"] * functional.l1_loss(output, other)

    target = {"one": torch.randn(4, 4), "two": (torch.randn(4, 4),), "weight": 0.5}
    return far(mesh, [nn.Linear(8, 8), nn.Linear(8, 4)], torch.randn(4, 8), target, loss)


def small(mesh: DeviceMesh) -> tuple[Pipeline, DistributedDataParallel, DistributedOptimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 4)]
    net = Pipeline(layers, [1, 1], loss=functional.mse_loss, microbatches=2, mesh=mesh["pp"])
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    return net, model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def dropped_in_between(mesh: DeviceMesh) -> list[bool]:
    """By the ``zero_grad`` that comes between forward and backward, whether the step has changed weights."""
    net, model, optimizer = small(mesh)
    changed = []
    layer = net.layers[mesh.get_local_rank("pp")]
    to_zero = functools.partial(optimizer.zero_grad, set_to_none=False)
    for zero_grad in (optimizer.zero_grad, to_zero, model.zero_grad, net.zero_grad, layer.zero_grad):
        before = [param.detach().clone() for param in net.parameters()]
        loss = model(torch.ones(4, 8), target=torch.zeros(4, 4))
        zero_grad()
        loss.backward()
        optimizer.step()
        changed.append(all(not torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True)))
    model.close()
    return changed


def skipped_step(mesh: DeviceMesh) -> list[float]:
    """The scales of a loop whose first step is skipped; its ``zero_grad`` is between forward and backward."""
    trainee = Trainee.make(mesh, Case((2, 4)))
    scaler, scales = GradScaler("cpu", init_scale=4.0, growth_interval=1000), []
    handle = None
    if dist.get_rank() == 0:
        handle = trainee.net.layers[1].up.weight.register_hook(lambda grad: grad * float("inf"))
    for step in range(3):
        tokens, targets = batch_of(trainee.dp_rank, step)
        loss = trainee.model(tokens, target=targets)
        trainee.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(trainee.optimizer)
        scaler.update()
        if handle is not None:
            handle.remove()
        scales.append(scaler.get_scale())
    trainee.model.close()
    return scales


def frozen_on_one_side(mesh: DeviceMesh) -> tuple[str, bool]:
    """The error if a tied weight is frozen on one stage only, and whether training continues when both are."""
    trainee = Trainee.make(mesh, Case((2, 4), tied=True, clip_norm=None))
    trainee.train(range(2))
    trainee.net.layers[0].requires_grad_(False)
    with pytest.raises(StageError) as caught:
        trainee.train(range(2, 3))
    trainee.net.layers[5].requires_grad_(False)
    goes_on = trainee.train(range(2, 3)).losses[0] > 0
    trainee.net.layers[0].requires_grad_(True)
    with pytest.raises(StageError):
        trainee.train(range(3, 4))
    trainee.net.layers[5].requires_grad_(True)
    goes_on &= trainee.train(range(3, 4)).losses[0] > 0
    trainee.model.check_replicas()
    trainee.model.close()
    return str(caught.value), goes_on


class Counts(nn.Module):
    """A loss that keeps running statistics, and replaces one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        self.center = 0.5 * self.center + 0.5 * output.detach().mean(0)
        return functional.mse_loss(output - self.center, target)


def losses_with_buffers(mesh: DeviceMesh) -> tuple[list[dict[str, Tensor]], str]:
    """By number of batches, and how a buffer that grows is refused."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Mean()]
    alone = copy.deepcopy(layers)
    net = Pipeline(layers, [1, 1], loss=Counts(), microbatches=2, mesh=mesh["pp"])
    one = Pipeline(alone, [2], loss=Counts(), microbatches=2)
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator), torch.zeros(SAMPLES, 3)
    apart = []
    for _ in range(2):
        for pipeline in (model, one):
            pipeline.zero_grad()
            pipeline(x, target=target).backward()
            with torch.no_grad():
                pipeline(x, target=target)
        expected = dict(one.named_buffers())
        apart.append({name: (value - expected[name]).abs().max() for name, value in net.named_buffers()})
    loss: Any = net._loss
    loss.register_forward_hook(lambda module, *_: setattr(module, "center", torch.zeros(1)))
    with pytest.raises(StageError) as raised:
        model(x, target=target)
    model.close()
    return apart, str(raised.value)


def groups_of_a_dropped_wrapper(mesh: DeviceMesh) -> tuple[int, int]:
    """The number of groups before, and after."""
    net = Pipeline([nn.Linear(WIDTH, WIDTH), Mean()], [1, 1], loss=nn.MSELoss(), microbatches=2, mesh=mesh["pp"])

    def train() -> None:
        model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
        model(torch.ones(SAMPLES, LENGTH, WIDTH), target=torch.zeros(SAMPLES, 3)).backward()

    before = len(dist.distributed_c10d._world.pg_map)
    train()
    gc.collect()
    return before, len(dist.distributed_c10d._world.pg_map)


def is_alive_after_close(mesh: DeviceMesh) -> bool:
    """Without a collection of garbage."""
    layers = [nn.Linear(WIDTH, WIDTH), Mean()]
    net = Pipeline(layers, [1, 1], loss=nn.MSELoss(), microbatches=2, mesh=mesh["pp"])
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    model(torch.ones(SAMPLES, LENGTH, WIDTH), target=torch.zeros(SAMPLES, 3)).backward()
    alive = weakref.ref(net)
    gc.collect()
    gc.disable()
    try:
        model.close()
        del net, model, layers
        return alive() is not None
    finally:
        gc.enable()


EQUAL = (indices_between_stages, transposed_between_stages, views_in_and_out, written_batch, tree_of_targets)
ASKED: tuple[Callable[[DeviceMesh], Any], ...] = (
    *EQUAL,
    dropped_in_between,
    skipped_step,
    frozen_on_one_side,
    losses_with_buffers,
    groups_of_a_dropped_wrapper,
    is_alive_after_close,
)


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    """By rank."""
    return run_processes(4, answers, ASKED, 2, timeout_s=200.0)


@pytest.mark.parametrize("what", EQUAL, ids=lambda f: f.__name__)
def test_awkward_layers_equal_one_process(answered: list[dict[str, Any]], what: Callable[..., Any]) -> None:
    assert max(answer[what.__name__] for answer in answered) <= ROUNDING


def test_argument_without_samples_is_refused() -> None:
    net = Pipeline([nn.Linear(8, 8)], [1], loss=functional.mse_loss, microbatches=2, inputs={0: "scale"})
    with pytest.raises(ValueError, match="a tensor without dimensions"):
        net(torch.ones(4, 8), scale=torch.tensor(2.0), target=torch.ones(4, 8))


def test_zero_grad_before_backward_drops_nothing(answered: list[dict[str, Any]]) -> None:
    assert [answer["dropped_in_between"] for answer in answered] == [[True] * 5] * 4


def test_loop_goes_on_after_a_skipped_step(answered: list[dict[str, Any]]) -> None:
    assert [answer["skipped_step"] for answer in answered] == [[2.0] * 3] * 4


def test_tied_weight_frozen_on_one_stage_is_refused(answered: list[dict[str, Any]]) -> None:
    for text, goes_on in (answer["frozen_on_one_side"] for answer in answered):
        assert "'layers.0.weight' is trained on one stage and frozen on another, where it is 'layers.5.weight'" in text
        assert goes_on


def test_buffers_of_a_loss_are_the_last_stages(answered: list[dict[str, Any]]) -> None:
    for apart, refused in (answer["losses_with_buffers"] for answer in answered):
        for values in apart:
            assert list(values) == ["_loss.count", "_loss.center"]
            assert all(float(value) <= 1e-6 for value in values.values())
        assert "buffer 'center' of the pipeline's loss is [1] of float32" in refused


def test_dropped_or_closed_wrapper_frees_all(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        before, after = answer["groups_of_a_dropped_wrapper"]
        assert before == after
        assert answer["is_alive_after_close"] is False
