"""Outputs of a pipeline's layers: shapes that change, numbers and None; all else is refused on all stages at once."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.errors import StageError
from megastrategy.pipeline import Pipeline
from tests.support.pipelines import PASSES_WHOLE_NUMBERS, ROUNDING, answers
from tests.support.processes import run_processes

SAMPLES, LENGTH, WIDTH = 4, 6, 8


class Crop(nn.Module):
    """Keeps the first columns: as many as an argument, an attribute or a configuration says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keep, self.sizes = nn.Linear(WIDTH, WIDTH), LENGTH, [LENGTH]
        self.config = types.SimpleNamespace(keep=LENGTH)

    def forward(self, x: Tensor, keep: int = LENGTH, ratio: float = 1.0) -> Tensor:
        asked = min(keep, self.keep, self.config.keep, self.sizes[0], int(ratio * LENGTH))
        return self.linear(x)[:, :asked]


class Mean(nn.Module):
    """Ends a chain, and takes any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean(1)


@dataclasses.dataclass
class Output:
    """The output of a layer, as models of transformers return one."""

    logits: Any
    more: Any


class Returns(nn.Module):
    """A layer that returns anything of its activation."""

    def __init__(self, make: Callable[[Tensor], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(WIDTH, width), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


class Takes(nn.Module):
    """A layer that takes what comes with an activation, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, 3), []

    def forward(self, x: Tensor, nothing: None, count: int, factor: float, flag: bool, scalar: Tensor) -> Tensor:
        self.seen.append((nothing, count, factor, flag, tuple(scalar.shape)))
        return self.linear(x[:, :count]).mean(1) * factor * scalar


def whole(layers: Sequence[nn.Module], x: Any, **inputs: Any) -> Any:
    for number, layer in enumerate(layers):
        named = inputs if number == 0 else {}
        x = layer(*x, **named) if isinstance(x, tuple) else layer(x, **named)
    return x


class Both:
    """A pipeline on a mesh, and the same layers in one process."""

    def __init__(self, mesh: DeviceMesh, layers: list[nn.Module], loss: Any = functional.mse_loss, **options: Any):
        self.alone, self.loss = copy.deepcopy(layers), loss
        self.net = Pipeline(layers, [1, 1], loss=loss, microbatches=2, mesh=mesh["pp"], **options)
        self.model = DistributedDataParallel(self.net, process_group=mesh.get_group("dp"))
        self.optimizer = DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), self.model)
        self.x, self.target = torch.randn(SAMPLES, LENGTH, WIDTH), torch.randn(SAMPLES, 3)

    def change(self, do: Callable[[Any], None]) -> None:
        """Does something to the first layer of both."""
        for layers in (self.net.layers, self.alone):
            if isinstance(layers[0], Crop):
                do(layers[0])

    def trained(self, **inputs: Any) -> float:
        """How far a loss and the gradients are from one process's."""
        self.optimizer.zero_grad()
        found = self.model(self.x.clone(), target=self.target, **inputs)
        found.backward()
        for layer in self.alone:
            layer.zero_grad()
        expected = self.loss(whole(self.alone, self.x.clone(), **inputs), self.target)
        expected.backward()
        named = {f"layers.{name}": param for name, param in nn.ModuleList(self.alone).named_parameters()}
        apart = [
            float((self.optimizer.full_grad(param) - named[name].grad).abs().max())  # type: ignore[operator]
            for name, param in self.net.named_parameters()
            if param.requires_grad
        ]
        return max([*apart, abs(float(found.detach()) - float(expected.detach()))])

    def evaluated(self, **inputs: Any) -> float:
        with torch.no_grad():
            output, loss = (
                self.model(self.x.clone(), **inputs),
                self.model(self.x.clone(), target=self.target, **inputs),
            )
            expected = whole(self.alone, self.x.clone(), **inputs)
        return max(float((output - expected).abs().max()), abs(float(loss - self.loss(expected, self.target))))


def crops(mesh: DeviceMesh, inputs: Any = None) -> Both:
    torch.manual_seed(0)
    return Both(mesh, [Crop(), Mean()], inputs=inputs)


def numbers_of_forward(mesh: DeviceMesh) -> list[float]:
    both = crops(mesh, {0: ("keep", "ratio")})
    apart = []
    for keep, ratio in ((6, 1.0), (3, 1.0), (6, 0.5), (4, 1.0), (6, 1.0), (3, 1.0)):
        apart += [both.evaluated(keep=keep, ratio=ratio), both.trained(keep=keep, ratio=ratio)]
    both.model.close()
    return apart


CHANGES: dict[str, Callable[[Any], None]] = {
    "an attribute": lambda layer: setattr(layer, "keep", 3),
    "a list": lambda layer: layer.sizes.__setitem__(0, 2),
    "a configuration": lambda layer: (layer.sizes.__setitem__(0, LENGTH), setattr(layer.config, "keep", 2)),
}


def attributes(mesh: DeviceMesh) -> list[float]:
    both = crops(mesh)
    apart = [both.trained(), both.evaluated()]
    for change in CHANGES.values():
        both.change(change)
        apart += [both.trained(), both.evaluated()]
    both.model.close()
    return apart


def lengths_of_data(mesh: DeviceMesh) -> list[str]:
    """Each microbatch is cut to its longest sample."""
    torch.manual_seed(0)
    both = Both(mesh, [Returns(lambda x: x[:, : int(x[0, 0, 0] > 1e5) + 2]), Mean()])
    with torch.no_grad():
        both.net.layers[0].linear.weight.fill_(1.0) if both.net.layers[0].__class__ is Returns else None
    both.x[SAMPLES // 2 :] = 1e6
    said = []
    for run in (both.trained, both.evaluated):
        with pytest.raises(StageError) as raised:
            run()
        said.append(str(raised.value))
    both.x.fill_(0.1)
    assert both.evaluated() <= 1e6
    both.model.close()
    return said


def numbers_between_stages(mesh: DeviceMesh) -> tuple[list[float], list[Any]]:
    torch.manual_seed(0)

    def make(x: Tensor) -> tuple[Any, ...]:
        return x, None, 4, 0.5, True, x.square().sum((1, 2))[:1].mean() * 0 + 2.0

    both = Both(mesh, [Returns(make), Takes()])
    if not PASSES_WHOLE_NUMBERS:
        with pytest.raises(StageError, match=r"returned whole numbers, which .* since 2.12"):
            both.trained()
        apart = [both.evaluated(), both.evaluated()]
        seen = list(getattr(both.net.layers[1], "seen", []))
        both.model.close()
        return apart, seen
    apart = [both.trained(), both.evaluated(), both.trained()]
    seen = list(getattr(both.net.layers[1], "seen", []))
    both.model.close()
    return apart, seen


def gradient_of_a_scalar(mesh: DeviceMesh) -> float:
    """A tensor without dimensions has a gradient, which comes back."""
    torch.manual_seed(0)

    class Scaled(Mean):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    class Scale(Mean):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return self.linear(x), self.scale * 1.0

    both = Both(mesh, [Scale(), Scaled()])
    apart = max(both.trained(), both.trained())
    both.model.close()
    return apart


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "a dictionary": lambda x: {"logits": x.mean(1), "nothing": None, "number": 3},
    "a tensor without dimensions": lambda x: x.mean(),
    "a tuple": lambda x: (x, x.mean(), "text", True),
    "a dataclass": lambda x: Output(x, (x.mean(), Output(x.sum(2), None))),
}

NOT_JOINED: dict[str, Callable[[Tensor], Any]] = {
    "rows of different lengths": lambda x: x[:, : 1 + next(LENGTHS)],
    "something local": lambda x: (x, SOMETHING_LOCAL),
}
LENGTHS = itertools.count()
SOMETHING_LOCAL = lambda x: x  # noqa: E731


def outputs_of_the_last_layer(mesh: DeviceMesh) -> dict[str, bool]:
    found = {}
    for name, make in ENDS.items():
        torch.manual_seed(0)
        both = Both(mesh, [nn.Linear(WIDTH, WIDTH), Returns(make)])
        with torch.no_grad():
            output, expected = both.model(both.x), whole(both.alone, both.x)
        found[name] = same(output, expected)
        both.model.close()
    torch.manual_seed(0)
    head = Returns(lambda x: {"logits": x.mean(1), "aux": x.square().mean(), "nothing": None}, 3)
    loss = lambda out, target: functional.mse_loss(out["logits"], target) + out["aux"]  # noqa: E731
    both = Both(mesh, [nn.Linear(WIDTH, WIDTH), head], loss)
    found["trained on a dictionary"] = both.trained() <= ROUNDING and both.trained() <= ROUNDING
    both.model.close()
    return found


def refused_of_the_last_layer(mesh: DeviceMesh) -> dict[str, str]:
    """On all stages at once, and the next evaluation is right."""
    found = {}
    for name, make in NOT_JOINED.items():
        both = Both(mesh, [nn.Linear(WIDTH, WIDTH), Returns(make)])
        with torch.no_grad(), pytest.raises(StageError) as caught:
            both.model(both.x)
        found[name] = str(caught.value)
        if isinstance(last := both.net.layers[1], Returns):
            last.make = lambda x: x.mean(1)
        both.alone[1].make = lambda x: x.mean(1)
        with torch.no_grad():
            assert same(both.model(both.x), whole(both.alone, both.x))
        both.model.close()
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Output):
        return type(other) is Output and same((one.logits, one.more), (other.logits, other.more))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a dict": lambda x: {"x": x},
    "a complex tensor": lambda x: torch.complex(x, x),
    "a tuple": lambda x: (x, (x, x)),
    "nothing but None": lambda x: None,
    "the number 9223372036854775808": lambda x: (x, 2**63),
}


def refused_between_stages(mesh: DeviceMesh) -> dict[str, list[str]]:
    found = {}
    for name, make in REFUSED.items():
        both = Both(mesh, [Returns(make), Mean()])
        found[name] = [message(lambda both=both: both.model(both.x, target=both.target))]
        with torch.no_grad():
            found[name].append(message(lambda both=both: both.model(both.x)))
        both.model.close()
    return found


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "a tuple": lambda out, target: (functional.mse_loss(out, target), out),
    "a complex number": lambda out, target: torch.complex(out.sum(), out.sum()),
    "[2, 3] numbers": lambda out, target: (out - target)[:2],
}


def refused_losses(mesh: DeviceMesh) -> dict[str, list[str]]:
    found = {}
    for name, loss in LOSSES.items():
        both = Both(mesh, [nn.Linear(WIDTH, WIDTH), Mean()], loss)
        found[name] = [message(lambda both=both: both.model(both.x, target=both.target))]
        with torch.no_grad():
            found[name].append(message(lambda both=both: both.model(both.x, target=both.target)))
        both.model.close()
    return found


def message(run: Callable[[], Any]) -> str:
    with pytest.raises(StageError) as caught:
        run()
    return str(caught.value)


class Weighted(nn.Module):
    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=not is_frozen)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() * self.weight).mean()


def losses_with_parameters(mesh: DeviceMesh) -> tuple[str, float, list[str], str]:
    layers = [nn.Linear(WIDTH, WIDTH), Mean()]
    with pytest.raises(ValueError, match="loss") as raised:
        Both(mesh, layers, Weighted(is_frozen=False))
    torch.manual_seed(0)
    both = Both(mesh, layers, Weighted(is_frozen=True))
    net = both.net

    def apart() -> float:
        both.optimizer.zero_grad()
        found = both.model(both.x, target=both.target)
        found.backward()
        return abs(float(found.detach()) - float(both.loss(whole(both.alone, both.x), both.target).detach()))

    far = apart()
    both.optimizer.step()
    state = both.optimizer.state_dict()
    names = [name for name in net.state_dict() if "weight" in name and "layers" not in name]
    both.model.close()
    in_one_process = [*nn.ModuleList(both.alone).parameters(), both.loss.weight]
    if dist.get_rank() == 0:
        assert state["param_groups"][0]["params"] == list(range(len(in_one_process)))
    net._loss.requires_grad_(True)
    with pytest.raises(ValueError, match="outside") as later:
        DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    return str(raised.value), far, names, str(later.value)


ASKED: tuple[Callable[[DeviceMesh], Any], ...] = (
    numbers_of_forward,
    attributes,
    lengths_of_data,
    numbers_between_stages,
    gradient_of_a_scalar,
    outputs_of_the_last_layer,
    refused_of_the_last_layer,
    refused_between_stages,
    refused_losses,
    losses_with_parameters,
)


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    """By rank, of two stages times two data-parallel ranks."""
    return run_processes(4, answers, ASKED, 2, timeout_s=200.0)


def test_shapes_follow_numbers_of_forward(answered: list[dict[str, Any]]) -> None:
    assert max(max(answer["numbers_of_forward"]) for answer in answered) <= ROUNDING


def test_shapes_follow_numbers_of_layers(answered: list[dict[str, Any]]) -> None:
    assert max(max(answer["attributes"]) for answer in answered) <= ROUNDING


def test_other_changes_of_shapes_are_refused(answered: list[dict[str, Any]]) -> None:
    for said in (answer["lengths_of_data"] for answer in answered):
        assert all("layer 0 (Returns) is the last layer of its stage and returned [2, " in text for text in said)


def test_numbers_and_none_pass_between_stages(answered: list[dict[str, Any]]) -> None:
    for rank, (apart, seen) in enumerate(answer["numbers_between_stages"] for answer in answered):
        assert max(apart) <= ROUNDING
        assert set(seen) == ({(None, 4, 0.5, True, ())} if rank >= 2 else set())
    assert max(answer["gradient_of_a_scalar"] for answer in answered) <= ROUNDING


def test_last_layers_output_equals_one_process(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        assert answer["outputs_of_the_last_layer"] == dict.fromkeys([*ENDS, "trained on a dictionary"], True)


def test_output_that_cannot_be_joined_is_refused(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        said = answer["refused_of_the_last_layer"]
        assert list(said) == list(NOT_JOINED)
        assert "cannot be joined along the first dimension" in said["rows of different lengths"]
        assert "cannot get" in said["something local"]


def test_value_that_cannot_pass_is_refused(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        for name, said in answer["refused_between_stages"].items():
            assert all(f"layer 0 (Returns) is the last layer of its stage and returned {name}" in t for t in said)
            assert all("keep the layer together with the next one" in text for text in said)


def test_loss_that_is_no_number_is_refused(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        for name, said in answer["refused_losses"].items():
            assert all(f"the pipeline's loss function returned {name}: expected" in text for text in said), said


def test_trained_parameters_of_a_loss_are_refused(answered: list[dict[str, Any]]) -> None:
    for at_once, apart, names, later in (answer["losses_with_parameters"] for answer in answered):
        assert at_once.startswith("the loss is a Weighted with a parameter 'weight' that is trained")
        assert apart <= ROUNDING
        assert names == ["_loss.weight"]
        assert later.startswith("parameter '_loss.weight' is trained and is outside of the pipeline's layers")
