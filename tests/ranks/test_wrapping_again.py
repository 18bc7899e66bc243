"""A module that is wrapped again is the new wrapper's, as under torch DDP; one that another model uses is refused."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ClosedError
from megastrategy.core.holders import describe_holders
from tests.support.models import two_layers
from tests.support.ranks import run_ranks

both_modes = pytest.mark.parametrize("sharded", [True, False], ids=["shards", "all-reduce"])
both_numbers_of_ranks = pytest.mark.parametrize("size", [1, 2])


class Shared(nn.Module):
    """A head of its own on an encoder that other models have too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, 2)


def wrap(module: nn.Module, group: ProcessGroup, sharded: bool) -> DistributedDataParallel:
    return DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)


@both_modes
@both_numbers_of_ranks
def test_a_wrapper_that_has_lost_its_module_says_so(size: int, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        first = wrap(module, group, sharded)
        second = wrap(module, group, sharded)
        assert first.is_closed
        with pytest.raises(ClosedError, match=r"its module was wrapped again since.*the wrapper that was made last"):
            first(torch.ones(1, 10))
        second(torch.ones(1, 10)).sum().backward()
        grads = {name: second.full_grad(param) for name, param in module.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        second.close()
        second.close()

    run_ranks(size, run)


@both_modes
@both_numbers_of_ranks
def test_a_layer_of_a_model_that_was_dropped_is_taken_over(size: int, sharded: bool) -> None:
    """The old wrapper is in a circle of references, as a LightningModule and its Trainer are."""

    def run(rank: int, group: ProcessGroup) -> None:
        encoder = two_layers()
        first = wrap(Shared(encoder), group, sharded)
        first.itself = [first]
        optimizer: Any = DistributedOptimizer(torch.optim.AdamW(first.parameters(), lr=0.1), first)

        del first
        second = wrap(Shared(encoder), group, sharded)
        assert optimizer.is_closed
        new = DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second)
        before = encoder[0].weight.detach().clone()
        second.module.head(second.module.encoder(torch.ones(1, 10))).sum().backward()
        new.step()
        assert not torch.equal(encoder[0].weight, before)

    run_ranks(size, run)


@both_modes
@both_numbers_of_ranks
def test_models_in_use_that_share_an_encoder_are_refused_by_what_uses_the_first(size: int, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        encoder = two_layers()
        generator = wrap(Shared(encoder), group, sharded)
        with pytest.raises(ValueError, match=r"'encoder\.0\.weight' is in another wrapped model") as caught:
            wrap(Shared(encoder), group, sharded)
        for text in ("a Shared", "the variable 'generator' of run()", "torch.nn.ModuleDict", "call its close()"):
            assert text in str(caught.value)
        generator.close()
        wrap(Shared(encoder), group, sharded).close()

    run_ranks(size, run)


def test_holders_are_named_by_variable_attribute_and_container() -> None:
    class Model:
        pass

    class Trainer:
        model: Any = None

    module, trainer, parent = nn.Linear(1, 1), Trainer(), nn.Module()
    parent.net, trainer.model = module, module
    described = describe_holders(module).split(", ")
    assert described[0] == "the variable 'module' of test_holders_are_named_by_variable_attribute_and_container()"
    assert {"the attribute 'model' of a Trainer", "the attribute 'net' of a Module"} <= set(described)
    script = ModuleType("script")
    script.model = (model := Model())  # type: ignore[attr-defined]
    assert "the variable 'model' of the module script" in describe_holders(model)
    kept = {"net": (wanted := Model())}
    gc.collect()
    assert "the entry 'net' of a dict" in describe_holders(wanted)
    assert kept
