"""A prepared model as an Accelerate user meets it: found, compiled, evaluated, dropped, trained again."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from tests.support.comparison import assert_equal

from ..accelerate_loops import (
    Run,
    Trainee,
    Worlds,
    adamw,
    assert_like_ddp,
    both_modes,
    inputs,
    make_accelerator,
    net_of,
    set_up,
    sgd,
    state_of,
    weights_of,
)
from ..matrix import ALL_REDUCE, REDUCE_SCATTER


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.vocabulary = 11
        self.config = {"hidden_size": 5}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def look_at_model() -> None:
    from accelerate.utils import extract_model_from_parallel
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from transformers.modeling_utils import unwrap_model

    accelerator = make_accelerator("megatron_ddp", mixed_precision="bf16")
    net = Named()
    before = set(net.__dict__)
    model = accelerator.prepare(net)
    # [Note: an instance of torch's DDP]: everybody finds the module
    assert isinstance(model, TorchDDP)
    assert accelerator.unwrap_model(model) is extract_model_from_parallel(model) is unwrap_model(model) is net
    assert sorted(get_model_state_dict(model)) == ["layer.bias", "layer.weight"]
    assert sorted(model.state_dict()) == ["module.layer.bias", "module.layer.weight"], "as torch DDP's"
    assert sorted(accelerator.get_state_dict(model)) == ["layer.bias", "layer.weight"]
    assert accelerator.get_state_dict(model)["layer.bias"].data_ptr() == net.layer.bias.data_ptr()
    # its own methods and attributes
    assert model.vocabulary == 11
    assert model.config == {"hidden_size": 5}, "as scripts for FSDP2 and tensor parallelism read it"
    assert accelerator.prepare(nn.Linear(5, 3)).config.use_distributed_optimizer, "the engine's, where there is none"
    assert model.generate(inputs(accelerator)).shape == (4,)
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018 - the access is the test
    # nothing is kept on the module but accelerate's autocast, which unwrapping takes off
    assert set(net.__dict__) - before == {"forward", "_original_forward"}
    assert model(inputs(accelerator)).dtype == torch.float32, "of the output; inside it is bf16"
    with accelerator.autocast():
        assert net.layer(inputs(accelerator)).dtype == torch.bfloat16
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is net
    assert "_original_forward" not in net.__dict__
    # a copy is a plain module's, and trains no other
    twin = copy.deepcopy(model)
    assert twin.module is not net
    twin.eval()
    twin(inputs(accelerator))


def test_unwrapping_finds_the_users_module(worlds: Worlds) -> None:
    worlds.run(look_at_model)


class Blocks(nn.Module):
    """With blocks that repeat, which regional compilation looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def train_compiled(name: str, mode: dict[str, Any]) -> Any:
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    torch.manual_seed(3)
    options = {"dynamo_plugin": plugin, "gradient_accumulation_steps": 2}
    trainee, run = set_up(name, mode, adamw, net=Blocks(), **options), Run({})
    accelerator, model = trainee.accelerator, trainee.model
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is trainee.net
    compiled = [kind.__name__ for kind in map(type, model.modules())].count("OptimizedModule")
    assert compiled == 4, "three blocks and the head"
    for step in range(4):
        with accelerator.accumulate(model):
            run.losses.append(trainee.backward(step))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e3)
            trainee.step()
    run.weights, run.state = weights_of(trainee.net), state_of(accelerator, trainee.optimizer)
    torch._dynamo.reset()
    return run


@pytest.mark.nightly
def test_compiled_blocks_equal_ddp(worlds: Worlds) -> None:
    assert_like_ddp(worlds, train_compiled, REDUCE_SCATTER)


# --- memory, and once more --------------------------------------------------------------------------------------------


def train_again(mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A second training of the same module, as a second Trainer starts it, and then with memory given back."""
    trainee = set_up("megatron_ddp", mode, adamw)
    accelerator, model, net = trainee.accelerator, trainee.model, trainee.net
    trainee.train(0)
    accelerator.free_memory()
    assert accelerator._models == accelerator._optimizers == []
    net[0].bias.data.add_(accelerator.process_index)  # the main process's reach the others when it is prepared
    trainee = Trainee(accelerator, net, *accelerator.prepare(net, sgd(net.parameters())))
    assert trainee.model is model, "the live engine is used again"
    assert accelerator._models == [net]
    weights = trainee.train(1)
    gone = weakref.ref(model)
    model, trainee.model, trainee.optimizer = accelerator.free_memory(model, trainee.model, trainee.optimizer)
    del net, trainee
    gc.collect()
    assert gone() is None
    # an optimizer and a model that were made outside of what is tried again
    net = net_of()
    inner = adamw(net.parameters())
    for _ in range(2):
        accelerator.free_memory()
        Trainee(accelerator, net, *accelerator.prepare(net, inner)).train(0)
    # a module that changed gets another engine
    net.double()
    accelerator.free_memory()
    model = accelerator.prepare(net)
    return [weights, Trainee(accelerator, net, model, accelerator.prepare(sgd(net.parameters()))).train(0)]


@both_modes
def test_module_trains_again(worlds: Worlds, mode: dict[str, Any]) -> None:
    first, second = worlds.run(train_again, mode)
    assert_equal(first, second)


# --- uneven batches --------------------------------------------------------------------------------------


@contextlib.contextmanager
def uneven_inputs(accelerator: Any, model: Any, data: Any) -> Iterator[None]:
    """accelerate's own does this on GPUs only."""
    if type(accelerator).__module__ == "megastrategy.accelerate":
        with accelerator.join_uneven_inputs([model], even_batches=False):
            yield
        return
    from torch.distributed.algorithms import Join

    data.batch_sampler.even_batches = False
    with Join([model]):
        yield
    data.batch_sampler.even_batches = True


def evaluate_unevenly(name: str, mode: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """As pytorch-accelerated does it after every epoch: one batch for two ranks, and buffers that differ until then."""
    torch.manual_seed(0)
    trainee = set_up(name, mode, net=nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    accelerator, model, outputs = trainee.accelerator, trainee.model, []
    data = accelerator.prepare(DataLoader(torch.arange(10.0).reshape(2, 5), batch_size=2))
    for step in range(3):
        model.train()
        trainee.train(step)
        model.eval()
        with accelerator.no_sync(model), uneven_inputs(accelerator, model, data), torch.no_grad():
            outputs += [model(batch).detach() for batch in data]
    assert data.batch_sampler.even_batches, "as it was before"
    return outputs, weights_of(trainee.net)


def test_ranks_evaluate_uneven_batches(worlds: Worlds) -> None:
    outputs = [result[0] for result in assert_like_ddp(worlds, evaluate_unevenly, REDUCE_SCATTER)]
    assert [len(rank) for rank in outputs] == [3, 0], "the second rank had no batch at all"


# --- a loss with a cache ----------------------------------------------------------------------------------------------


def train_with_cached_loss(name: str, mode: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    """Gradients of a contrastive loss, cached, and the forwards once more inside of its backward: as
    sentence-transformers' ``gradcache`` does it, with the attributes that it asks for."""
    accelerator = make_accelerator(name, mode, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))

    def replay(batches: list[Tensor], grads: list[Tensor], scale: Tensor) -> None:
        assert isinstance(model, TorchDDP)
        assert not model.static_graph or model._static_graph_delay_allreduce_enqueued
        with torch.enable_grad():
            for number, (batch, grad) in enumerate(zip(batches[:-1], grads[:-1], strict=True)):
                with model.no_sync():
                    torch.dot(model(batch).flatten(), grad.flatten() * scale).backward()
                assert number < len(batches)
            if model.require_backward_grad_sync:  # the last, with the buffers that the others have
                model.require_forward_param_sync = False
            torch.dot(model(batches[-1]).flatten(), grads[-1].flatten() * scale).backward()

    for step in range(4):
        with accelerator.accumulate(model):
            batches = list(inputs(accelerator, step).split(2))
            with torch.no_grad():
                outputs = [model(batch) for batch in batches]
            leaves = [output.detach().requires_grad_() for output in outputs]
            every = torch.cat(leaves)
            inner = torch.nn.functional.cross_entropy(every @ every.T, torch.arange(len(every)))
            inner.backward()
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            loss = inner.detach().requires_grad_()
            loss.register_hook(lambda scale, batches=batches, grads=grads: replay(batches, grads, scale))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


@pytest.mark.parametrize(("mode", "accumulate"), [(REDUCE_SCATTER, 1), (ALL_REDUCE, 2)], ids=["1", "2"])
def test_cached_loss_equals_ddp(worlds: Worlds, mode: dict[str, Any], accumulate: int) -> None:
    """Also in buffers: the last forward of a replay broadcasts none."""
    assert_like_ddp(worlds, train_with_cached_loss, mode, 0.0, accumulate)


# --- one process ------------------------------------------------------------------------------------------------------


def alone() -> None:
    """One process: what accelerate returns, unless there are main params to keep."""
    accelerator = make_accelerator("megatron_ddp")
    assert str(accelerator.distributed_type.value) == "NO"
    net = net_of()
    inner = adamw(net.parameters())
    model, optimizer = accelerator.prepare(net, inner)
    assert model is net
    assert optimizer.optimizer is inner
    half = Named().bfloat16()
    model, optimizer = accelerator.prepare(half, adamw(half.parameters()))
    assert model.module is half
    assert model.vocabulary == 11
    with accelerator.accumulate(model), accelerator.join_uneven_inputs([model], even_batches=False):
        accelerator.backward(model(torch.ones(2, 5).bfloat16()).float().sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 1.0
        optimizer.step()
    assert set(optimizer.optimizer.main_params()) == {"layer.weight", "layer.bias"}


def alone_and_compiled() -> None:
    accelerator = make_accelerator("megatron_ddp", dynamo_backend="eager")
    net = net_of()
    model = accelerator.prepare(net)
    assert type(model).__name__ == "OptimizedModule"
    assert accelerator.prepare(model) is model
    assert accelerator._models == [net], "and would be saved once"


def alone_under_torchrun() -> None:
    """One process that was launched as one of several is wrapped, and parameters that no step uses are no error."""
    os.environ["LOCAL_RANK"] = "0"
    accelerator = make_accelerator("megatron_ddp")
    assert (str(accelerator.distributed_type.value), accelerator.num_processes) == ("MULTI_CPU", 1)
    net = net_of()
    net[1].idle = nn.Linear(3, 2)
    by_hand = copy.deepcopy(net)
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    assert model.module is net
    for forward, opt in ((by_hand, sgd(by_hand.parameters())), (model, optimizer)):
        for _ in range(3):
            opt.zero_grad()
            accelerator.backward(forward(inputs(accelerator)).square().sum())
            opt.step()
    assert_equal(weights_of(net), weights_of(by_hand))
    accelerator.end_training()


@pytest.mark.parametrize("job", [alone, alone_and_compiled, alone_under_torchrun])
def test_one_process_prepares(worlds: Worlds, job: Callable[[], None]) -> None:
    worlds.run(job, size=1)
