"""Weights of recurrent layers stay in the one chunk that cuDNN uses without a copy, in all that the engine does.

Here there is no cuDNN. So weights are laid out in a way that it may choose, and what torch asks before it calls cuDNN
(``try_get_weight_buf``) is asked of them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.layout.recurrent_weights import find_weight_chunks
from tests.support.ranks import run_ranks

# torch's word for a layer that it runs by another library than this test is about.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(6, 9),
    "LSTM with projections": lambda: nn.LSTM(6, 9, num_layers=2, proj_size=5),
}


class Offsets:
    """Lays a layer's weights out as cuDNN may: all matrices, and then all biases, for which there is room always."""

    def __init__(self, layer: nn.RNNBase) -> None:
        weights = dict(layer.named_parameters(recurse=False))
        matrices = [name for name in weights if name.startswith("weight")]
        biases = [name for name in weights if name.startswith("bias")]
        self.of: dict[str, int] = {}
        self.numel = 0
        for name in [*matrices, *biases]:
            self.of[name] = self.numel
            self.numel += weights[name].numel()
        if not layer.bias:
            self.numel += 2 * sum(weights[name].shape[0] for name in matrices if name.startswith("weight_ih"))
        chunk = torch.zeros(self.numel, dtype=weights[matrices[0]].dtype)
        for name, weight in weights.items():
            place = chunk[self.of[name] : self.of[name] + weight.numel()].view(weight.shape)
            place.copy_(weight.detach())
            weight.data = place

    def are_kept(self, layer: nn.RNNBase) -> bool:
        """Whether torch would hand the weights to cuDNN as they are."""
        weights = dict(layer.named_parameters(recurse=False))
        first = layer.weight_ih_l0
        storage, itemsize = first.untyped_storage(), first.element_size()
        if storage.nbytes() < self.numel * itemsize:
            return False
        expected = {name: storage.data_ptr() + offset * itemsize for name, offset in self.of.items()}
        last = list(weights.values())[-1]
        return {name: weight.data_ptr() for name, weight in weights.items()} == expected and last.is_contiguous()


class Recurrent(nn.Module):
    """A layer between two others, registered in the order in which they are used, or in the reverse."""

    def __init__(self, make: Callable[[], nn.RNNBase], *, reverse: bool) -> None:
        super().__init__()
        layer = make()
        outputs = (layer.proj_size or layer.hidden_size) * (1 + layer.bidirectional)
        parts = {"before": nn.Linear(4, 6), "layer": layer, "after": nn.Linear(outputs, 150)}
        for name in reversed(parts) if reverse else parts:
            self.add_module(name, parts[name])
        generator = torch.Generator().manual_seed(0)
        for name in sorted(dict(self.named_parameters())):
            param = self.get_parameter(name)
            param.data = torch.randn(param.shape, generator=generator) * 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(torch.tanh(self.before(x)))[0]).square().mean()


def batch(rank: int, step: int) -> Tensor:
    """(time 3, batch 2, 4)"""
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    module: Recurrent,
    rank: int,
    group: ProcessGroup,
    options: dict[str, Any],
    after: Callable[[DistributedDataParallel], object] = lambda model: None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Four steps, with ``after`` called after wrapping and each of them; weights and the optimizer's state."""
    config = DistributedDataParallelConfig(bucket_size=64, **options)
    model = DistributedDataParallel(module, config, group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    after(model)
    for step in range(4):
        model(batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    state = optimizer.state_dict()
    model.close()
    return {name: value.clone() for name, value in module.state_dict().items()}, state


def assert_same(ours: tuple[dict[str, Tensor], Any], reference: tuple[dict[str, Tensor], Any]) -> None:
    for name, value in reference[0].items():
        assert torch.equal(ours[0][name], value), name
    for index, values in reference[1]["state"].items():
        for key, value in values.items():
            assert torch.equal(ours[1]["state"][index][key], value), (index, key)


@pytest.mark.parametrize(
    ("kind", "options"), [("LSTM", {}), ("LSTM with projections", {"grad_wire_dtype": "bf16"})], ids=str
)
def test_weights_stay_where_cudnn_wants_them(kind: str, options: dict[str, Any]) -> None:
    """When the model is wrapped, after each step, in the move that the first may end with, and when it is closed; and
    training is what it is with weights that lie anywhere."""

    def run(rank: int, group: ProcessGroup) -> Any:
        apart = train(Recurrent(LAYERS[kind], reverse=True), rank, group, options)
        module = Recurrent(LAYERS[kind], reverse=True)
        offsets = Offsets(module.layer)
        assert offsets.are_kept(module.layer), "the test's own arrangement"
        orders = set()

        def after(model: DistributedDataParallel) -> None:
            model.finish_param_gather()
            assert offsets.are_kept(module.layer)
            orders.add(tuple(model.layout.param_order))

        together = train(module, rank, group, options, after)
        assert len(orders) == 2, "it has moved"
        assert offsets.are_kept(module.layer), "closed"
        return apart, together

    for apart, together in run_ranks(2, run):
        assert_same(together, apart)


def test_different_weight_addresses_make_no_chunks() -> None:
    """Rank 0 has loaded them (``load_state_dict(assign=True)``): torch DDP takes no notice, and neither may this."""

    def run(rank: int, group: ProcessGroup) -> Any:
        module = Recurrent(LAYERS["LSTM"], reverse=True)
        offsets = Offsets(module.layer)
        if rank == 0:
            module.load_state_dict({name: v.clone() for name, v in module.state_dict().items()}, assign=True)

        def after(model: DistributedDataParallel) -> None:
            assert not any(spec.chunk for spec in model.layout.params)

        ours = train(module, rank, group, {}, after)
        assert not offsets.are_kept(module.layer)
        return ours, train(Recurrent(LAYERS["LSTM"], reverse=True), rank, group, {})

    for ours, reference in run_ranks(2, run):
        assert_same(ours, reference)


def test_only_chunks_of_recurrent_layers_are_kept() -> None:
    config = DistributedDataParallelConfig()
    module = Recurrent(LAYERS["LSTM"], reverse=False)

    def found(**options: Any) -> set[str]:
        names = {id(param): name for name, param in module.named_parameters()}
        chosen = DistributedDataParallelConfig(**options) if options else config
        return {names[key] for key in find_weight_chunks(module, module.parameters(), chosen)}

    assert found() == set(), "memory of their own, as on the host"
    Offsets(module.layer)
    layers = {f"layer.{name}" for name, _ in module.layer.named_parameters()}
    assert found() == layers
    assert found(use_distributed_optimizer=False) == set(), "weights stay where they are"
    # All of a model in one storage, as a file that was mapped: no bucket may have to be that large.
    sizes = [param.numel() for param in module.parameters()]
    whole = torch.zeros(sum(sizes) + 5_000)
    for param, part in zip(module.parameters(), whole.split([*sizes, 5_000]), strict=False):
        param.data = part.view(param.shape)
    assert found() == set()
