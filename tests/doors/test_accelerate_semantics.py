"""What an Accelerate user does beside the loop keeps its meaning, or is refused by name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.errors import ReducedGradError

from .accelerate_loops import Run, Worlds, adamw, make_accelerator, sgd, state_of, train, weights_of
from .matrix import MODES, assert_equal

both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def net_of(seed: int = 0, width: int = 13) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def inputs(accelerator: Any, number: int = 0) -> Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
    return torch.randn(4, 5, generator=generator)


def grads_of(model: Any) -> dict[str, Tensor | None]:
    """Whole, as torch DDP has them in ``.grad``."""
    named = dict(model.module.named_parameters())
    if hasattr(model, "full_grad"):
        return {name: model.full_grad(param) for name, param in named.items()}
    return {name: None if param.grad is None else param.grad.clone() for name, param in named.items()}


def with_mode(name: str, mode: dict[str, Any]) -> dict[str, Any] | None:
    return mode if name == "megatron_ddp" else None


def assert_like_ddp(
    worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any], rtol: float = 0.0, *arguments: Any
) -> list[Any]:
    """The job's results under ours, which are those under torch DDP; 1e-6 is for the order of a sum over shards."""
    expected = worlds.run(job, "ddp", mode, *arguments)
    ours = worlds.run(job, "megatron_ddp", mode, *arguments)
    assert_equal(ours, expected, rtol if mode["use_distributed_optimizer"] else 0.0)
    return expected


# --- synchronisation -------------------------------------------------------------------------------------------------


def trigger(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor | None]]:
    """The example of ``trigger_sync_in_backward``, at which torch DDP raises if it looks for unused parameters."""
    accelerator = make_accelerator(name, with_mode(name, mode), find_unused=False)
    net = net_of()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    with accelerator.no_sync(model):
        loss_a = model(inputs(accelerator, 1)).square().mean()
        loss_b = model(inputs(accelerator, 2)).square().mean()
    accelerator.backward(loss_a)
    local = net[0].bias.grad.clone()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss_b)
    assert model.require_backward_grad_sync
    grads = grads_of(model)
    optimizer.step()
    return [{"local": local}, grads, dict(weights_of(net))]


@both_modes
def test_a_backward_can_be_synchronised_after_its_forward(worlds: Worlds, mode: dict[str, Any]) -> None:
    first, second = assert_like_ddp(worlds, trigger, mode)
    assert not torch.equal(first[0]["local"], second[0]["local"]), "nothing was sent in the first backward"


def accumulate_by_hand(name: str, mode: dict[str, Any]) -> Run:
    accelerator = make_accelerator(name, with_mode(name, mode))
    net = net_of()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    run = Run({})
    for step in range(3):
        with accelerator.no_sync(model):
            accelerator.backward(model(inputs(accelerator, 2 * step)).square().mean())
        loss = model(inputs(accelerator, 2 * step + 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights, run.state = weights_of(net), state_of(accelerator, optimizer)
    return run


def synchronise_each_batch(name: str, mode: dict[str, Any]) -> Run:
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    return train(name, with_mode(name, mode), gradient_accumulation_plugin=plugin, make_optimizer=sgd, epochs=1)


@both_modes
@pytest.mark.parametrize("job", [accumulate_by_hand, synchronise_each_batch])
def test_accumulation(worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, job, mode, rtol=1e-6 if job is synchronise_each_batch else 0.0)


# --- several models --------------------------------------------------------------------------------------------------


def train_two_models(name: str, mode: dict[str, Any], kind: str) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Two models, each with an optimizer, and clipping over parts of either."""
    accelerator = make_accelerator(name, with_mode(name, mode))
    nets = net_of(1), net_of(2, width=7)
    inner = [sgd(net.parameters()) for net in nets]
    first, second, *optimizers = accelerator.prepare(*nets, *inner)
    norms: list[float] = []

    def clip(parameters: Any, largest: float) -> None:
        norm = getattr(accelerator, f"clip_grad_{kind}_")(parameters, largest)
        norms.extend([] if norm is None else [norm.item()])

    for step in range(3):
        x = inputs(accelerator, step)
        accelerator.backward((first(x) - second(x)).square().mean())
        clip(itertools.chain(first.parameters(), second.parameters()), 0.1)
        clip([first.module[0].weight, second.module[2].bias], 0.01)
        clip([first.module[2].weight], 0.001)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, [weights_of(net) for net in nets]


def train_two_by_norm(name: str, mode: dict[str, Any]) -> Any:
    return train_two_models(name, mode, "norm")


def train_two_by_value(name: str, mode: dict[str, Any]) -> Any:
    return train_two_models(name, mode, "value")


@both_modes
def test_clipping_any_parameters_of_several_models(worlds: Worlds, mode: dict[str, Any]) -> None:
    (norms, _), _ = assert_like_ddp(worlds, train_two_by_norm, mode, rtol=1e-6)
    assert len(norms) == 9
    assert norms[0] > 0.1 > norms[1] > 0.01, "so all of them clip"
    ours = worlds.run(train_two_by_norm, "megatron_ddp", mode)
    assert ours[0][0] == ours[1][0]
    assert_like_ddp(worlds, train_two_by_value, mode)


def accumulate_two(name: str, mode: dict[str, Any]) -> tuple[list[bool], list[dict[str, Tensor]]]:
    """Seven batches of both models in windows of three, of which the last is short."""
    accelerator = make_accelerator(name, with_mode(name, mode), gradient_accumulation_steps=3)
    nets = net_of(1), net_of(2)
    samples = torch.randn(26, 5, generator=torch.Generator().manual_seed(4))
    inner = [adamw(net.parameters()) for net in nets]
    first, second, data, *optimizers = accelerator.prepare(*nets, DataLoader(samples, batch_size=2), *inner)  # type: ignore[arg-type]
    synchronised = []
    for x in data:
        with accelerator.accumulate(first, second):
            accelerator.backward((first(x) - second(x)).square().mean())
            synchronised.append(accelerator.sync_gradients)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return synchronised, [weights_of(net) for net in nets]


@both_modes
def test_two_models_accumulate_together(worlds: Worlds, mode: dict[str, Any]) -> None:
    (synchronised, _), _ = assert_like_ddp(worlds, accumulate_two, mode)
    assert synchronised == [False, False, True, False, False, True, True]


def clip_what_was_not_sent() -> tuple[float, float]:
    """All backwards under ``no_sync``: clipping reduces before it looks, as a step would."""
    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    accelerator.backward(model(inputs(accelerator)).square().mean())
    expected = accelerator.clip_grad_norm_(model.parameters(), 1e6).item()
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs(accelerator)).square().mean())
    return accelerator.clip_grad_norm_(model.parameters(), 1e6).item(), expected


def test_clipping_what_was_not_sent(worlds: Worlds) -> None:
    first, second = worlds.run(clip_what_was_not_sent)
    assert first == second
    assert first[0] == first[1]


def clip_strangers() -> str:
    accelerator = make_accelerator("megatron_ddp")
    net, stranger = net_of(), nn.Linear(3, 3)
    model, _ = accelerator.prepare(net, sgd(net.parameters()))
    (model(inputs(accelerator)).sum() + stranger(torch.ones(3)).sum()).backward()
    with pytest.raises(ValueError, match="belongs to no prepared model") as caught:
        accelerator.clip_grad_norm_([*model.parameters(), *stranger.parameters()], 1.0)
    norm = accelerator.clip_grad_norm_(stranger.parameters(), 1.0)
    assert norm.item() > 1.0
    return str(caught.value)


def test_gradients_of_other_models_are_clipped_apart(worlds: Worlds) -> None:
    for message in worlds.run(clip_strangers):
        assert "2 of the 6 parameters" in message


def schedule_two(name: str, mode: dict[str, Any]) -> tuple[list[float], bool]:
    """fp16: the first model's step is skipped, and with it its scheduler, not the other's."""
    accelerator = make_accelerator(name, with_mode(name, mode))
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=8.0), True
    nets = net_of(1), net_of(2)
    inner = [sgd(net.parameters()) for net in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(item, 1, gamma=0.5) for item in inner]
    first, second, *others = accelerator.prepare(*nets, *inner, *schedulers)
    optimizers, schedulers = others[:2], others[2:]
    for model, factor in ((first, float("inf") if accelerator.is_main_process else 1.0), (second, 1.0)):
        accelerator.backward(model(inputs(accelerator)).square().mean() * factor)
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    return [scheduler.get_last_lr()[0] for scheduler in schedulers], accelerator.optimizer_step_was_skipped


@both_modes
def test_a_scheduler_waits_for_its_own_optimizer(worlds: Worlds, mode: dict[str, Any]) -> None:
    expected = assert_like_ddp(worlds, schedule_two, mode)
    assert expected == [([0.05, 0.0125], True)] * 2


# --- the model -------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.vocabulary = 11

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
    # a copy is a plain module's, and trains nobody
    twin = copy.deepcopy(model)
    assert twin.module is not net
    twin.eval()
    twin(inputs(accelerator))


def test_everybody_finds_the_users_module(worlds: Worlds) -> None:
    worlds.run(look_at_model)


def call_torch_ddps_own() -> list[str]:
    """All that torch's class has beside a Module's."""
    accelerator = make_accelerator("megatron_ddp")
    model = accelerator.prepare(net_of())
    refused = []
    for name, value in vars(TorchDDP).items():
        if inspect.isfunction(value) and not name.startswith("__") and not hasattr(nn.Module, name):
            engines = getattr(type(model), name) is not value and name in ("no_sync", "forward", "_set_static_graph")
            if not engines:
                with pytest.raises(NotImplementedError, match=rf"{name}\(\) belongs to torch DDP"):
                    getattr(model, name)()
                refused.append(name)
    return refused


def test_torch_ddps_own_functions_are_refused_by_name(worlds: Worlds) -> None:
    for refused in worlds.run(call_torch_ddps_own):
        assert {"join", "register_comm_hook", "_register_fused_optim", "_update_process_group", "scatter"} <= set(
            refused
        )


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


def train_compiled(name: str, mode: dict[str, Any], regional: bool) -> Any:
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = make_accelerator(name, with_mode(name, mode), dynamo_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    net = Blocks()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    compiled = [kind.__name__ for kind in map(type, model.modules())].count("OptimizedModule")
    assert compiled == (4 if regional else 1), "three blocks and the head"
    run = Run({})
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(inputs(accelerator, step)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights, run.state = weights_of(net), state_of(accelerator, optimizer)
    torch._dynamo.reset()
    return run


def train_whole_compiled(name: str, mode: dict[str, Any]) -> Any:
    return train_compiled(name, mode, False)


def train_regions_compiled(name: str, mode: dict[str, Any]) -> Any:
    return train_compiled(name, mode, True)


@pytest.mark.long
@both_modes
@pytest.mark.parametrize("job", [train_whole_compiled, train_regions_compiled])
def test_compiled_models(worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, job, mode)


def load_after_prepare(mode: dict[str, Any]) -> None:
    """Weights that are loaded into the module are what training goes on from, and not the main params of before."""
    accelerator = make_accelerator("megatron_ddp", mode)
    net = Named().bfloat16()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    accelerator.backward(model(inputs(accelerator).bfloat16()).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    loaded = {name: torch.full_like(value, 0.75) for name, value in net.state_dict().items()}
    accelerator.unwrap_model(model).load_state_dict(loaded)
    accelerator.backward(model(inputs(accelerator).bfloat16()).float().sum() * 0.0)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    optimizer.step()
    assert_equal(weights_of(net), loaded)


@both_modes
def test_weights_loaded_after_prepare_are_kept(worlds: Worlds, mode: dict[str, Any]) -> None:
    worlds.run(load_after_prepare, mode)


# --- memory, and once more -------------------------------------------------------------------------------------------


def train_again(mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A second training of the same module, as a second Trainer starts it, and then with memory given back."""
    accelerator = make_accelerator("megatron_ddp", mode)
    net = net_of()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    accelerator.backward(model(inputs(accelerator)).square().mean())
    optimizer.step()
    accelerator.free_memory()
    assert accelerator._models == accelerator._optimizers == []
    net[0].bias.data.add_(accelerator.process_index)  # the main process's reach the others when it is prepared
    again, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    assert again is model, "the live engine is used again"
    assert accelerator._models == [net]
    accelerator.backward(again(inputs(accelerator, 1)).square().mean())
    optimizer.step()
    weights = weights_of(net)
    gone = weakref.ref(model)
    model, again, optimizer = accelerator.free_memory(model, again, optimizer)
    del net
    gc.collect()
    assert gone() is None
    # an optimizer and a model that were made outside of what is tried again
    net = net_of()
    inner = adamw(net.parameters())
    for _ in range(2):
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(net, inner)
        accelerator.backward(model(inputs(accelerator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        del model, optimizer
    # a module that changed gets another engine, and its old optimizer is not for that
    net.double()
    accelerator.free_memory()
    model = accelerator.prepare(net)
    if mode["use_distributed_optimizer"]:
        with pytest.raises(ValueError, match="changed since"):
            accelerator.prepare(inner)
    optimizer = accelerator.prepare(sgd(net.parameters()))
    accelerator.backward(model(inputs(accelerator).double()).square().mean())
    optimizer.step()
    return [weights, weights_of(net)]


@both_modes
def test_training_again(worlds: Worlds, mode: dict[str, Any]) -> None:
    first, second = worlds.run(train_again, mode)
    assert_equal(first, second)


# --- optimizers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(collectives: Any) -> Iterator[list[str]]:
    """What the engine asks of the group, which later jobs use too."""
    sent: list[str] = []
    before = dict(collectives.__dict__)

    def recording(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sent.append(method)
            return function(*arguments)

        return call

    for method in ("all_reduce", "all_reduce_max", "reduce_scatter", "all_gather", "broadcast", "require_all_ranks"):
        setattr(collectives, method, recording(method, getattr(collectives, method)))
    try:
        yield sent
    finally:
        for method in set(collectives.__dict__) - set(before):
            delattr(collectives, method)


def prepare_optimizers() -> None:
    from megastrategy import DistributedOptimizer

    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model = accelerator.prepare(net)
    inner = adamw(net.parameters())
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    inner.step()  # it has a state already, which is kept
    state = copy.deepcopy(inner.state_dict())
    with recorded(model.engine.collectives) as sent:
        optimizer = accelerator.prepare_optimizer(inner, device_placement=True)
        assert sent == [], "the state makes no round trip through other ranks"
        optimizer.state_dict()
        assert sent
    assert accelerator.prepare(optimizer) is optimizer
    assert isinstance(optimizer.optimizer, DistributedOptimizer)
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    kept = optimizer.state_dict()
    if accelerator.is_main_process:
        assert_equal(kept["state"], state["state"])


def test_preparing_an_optimizer_sends_nothing(worlds: Worlds) -> None:
    worlds.run(prepare_optimizers)


def ask_on_one_rank() -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The idiom ``if accelerator.is_main_process: torch.save(optimizer.state_dict(), ...)``, and on all ranks."""
    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))

    def step(number: int) -> None:
        optimizer.zero_grad()
        accelerator.backward(model(inputs(accelerator, number)).square().mean())
        optimizer.step()

    step(0)
    alone = optimizer.state_dict() if accelerator.is_main_process else None
    together = optimizer.state_dict()
    step(1)
    return alone, together


def test_the_state_dict_of_rank_zero_alone_is_that_of_all_ranks(worlds: Worlds) -> None:
    (alone, together), (nothing, _) = worlds.run(ask_on_one_rank)
    assert nothing is None
    assert len(together["state"]) == 4
    assert_equal(alone, together)


def schedule_free(params: Any) -> torch.optim.Optimizer:
    from tests.support.optimizers_with_methods import ScheduleFree

    return ScheduleFree(params, lr=0.05)


def train_schedule_free(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Weights in both modes; the optimizer begins in evaluation."""
    accelerator = make_accelerator(name, with_mode(name, mode))
    net = net_of()
    model, optimizer = accelerator.prepare(net, schedule_free(net.parameters()))
    seen = []
    for step in range(3):
        optimizer.train()
        seen.append(weights_of(net))
        accelerator.backward(model(inputs(accelerator, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        seen.append(weights_of(net))
    return seen


@both_modes
def test_schedule_free_optimizers_have_the_modes_of_torch_ddp(worlds: Worlds, mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, train_schedule_free, mode)


# --- uneven batches ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def uneven_inputs(accelerator: Any, model: Any, data: Any) -> Iterator[None]:
    """What accelerate's own does on GPUs alone."""
    if isinstance(accelerator, accelerator_class()):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            yield
        return
    from torch.distributed.algorithms import Join

    data.batch_sampler.even_batches = False
    with Join([model]):
        yield
    data.batch_sampler.even_batches = True


def accelerator_class() -> type:
    from megastrategy.accelerate import Accelerator

    return Accelerator


def evaluate_unevenly(name: str, mode: dict[str, Any], enters: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """As pytorch-accelerated does it after every epoch: one batch for two ranks, and buffers that differ until then."""
    accelerator = make_accelerator(name, with_mode(name, mode))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    samples = DataLoader(torch.arange(10.0).reshape(2, 5), batch_size=2)
    model, optimizer, data = accelerator.prepare(net, sgd(net.parameters()), samples)
    outputs = []
    for step in range(3):
        model.train()
        accelerator.backward(model(inputs(accelerator, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        grad = torch.no_grad() if enters == "no_grad" else contextlib.nullcontext()
        with accelerator.no_sync(model), uneven_inputs(accelerator, model, data), grad:
            outputs += [model(batch).detach() for batch in data]
    assert data.batch_sampler.even_batches, "as it was before"
    return outputs, weights_of(net)


@both_modes
@pytest.mark.parametrize("enters", ["no_grad", "with gradients"])
def test_ranks_may_evaluate_different_numbers_of_batches(worlds: Worlds, mode: dict[str, Any], enters: str) -> None:
    outputs = [result[0] for result in assert_like_ddp(worlds, evaluate_unevenly, mode, 0.0, enters)]
    assert [len(rank) for rank in outputs] == [3, 0], "the second rank had no batch at all"


# --- refused by name -------------------------------------------------------------------------------------------------


def _prepare(*make_optimizers: Callable[[list[nn.Module]], Any], num_models: int = 1, **options: Any) -> None:
    accelerator = make_accelerator("megatron_ddp", **options)
    nets: list[nn.Module] = [net_of(seed) for seed in range(num_models)]
    accelerator.prepare(*nets, *(make(nets) for make in make_optimizers))


def _comm_hook() -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    make_accelerator(
        "megatron_ddp", kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    )


def _local_sgd() -> None:
    from accelerate.local_sgd import LocalSGD

    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model, _ = accelerator.prepare(net, sgd(net.parameters()))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=False):
        pass
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
        pass


def _uneven() -> None:
    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model, _ = accelerator.prepare(net, sgd(net.parameters()))
    with accelerator.join_uneven_inputs([model], even_batches=True):
        model(inputs(accelerator)).sum().backward()
    with accelerator.join_uneven_inputs([model], even_batches=False), accelerator.no_sync(model):
        model(inputs(accelerator)).sum().backward()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        loss = model(inputs(accelerator)).sum()
        loss.backward()


def _environment(variable: str) -> None:
    os.environ[variable] = "true"
    try:
        make_accelerator("megatron_ddp")
    finally:
        del os.environ[variable]


def _plugins(**arguments: Any) -> None:
    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    if "twice" in arguments:
        Accelerator(megatron_ddp_plugin=MegatronDDPPlugin(), kwargs_handlers=[MegatronDDPPlugin()])
    Accelerator(**arguments)


def _nan_check_with_fp16() -> None:
    accelerator = make_accelerator("megatron_ddp", {"check_for_nan_in_grad": True})
    accelerator.scaler = torch.amp.GradScaler("cpu")
    net = net_of()
    accelerator.prepare(net, sgd(net.parameters()))


def _optimizer_first() -> None:
    accelerator, net = make_accelerator("megatron_ddp"), net_of()
    optimizer = accelerator.prepare(sgd(net.parameters()))
    accelerator.prepare(net)
    del optimizer


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "comm hook": (_comm_hook, "comm_hook="),
    "local sgd": (_local_sgd, "LocalSGD"),
    "uneven": (_uneven, "even_batches=False"),
    "deepspeed": (lambda: _plugins(deepspeed_plugin=object()), "deepspeed_plugin="),
    "fsdp": (lambda: _plugins(fsdp_plugin=object()), "fsdp_plugin="),
    "megatron": (lambda: _plugins(megatron_lm_plugin=object()), "megatron_lm_plugin="),
    "deepspeed environment": (lambda: _environment("ACCELERATE_USE_DEEPSPEED"), "ACCELERATE_USE_DEEPSPEED"),
    "fsdp environment": (lambda: _environment("ACCELERATE_USE_FSDP"), "ACCELERATE_USE_FSDP"),
    "megatron environment": (lambda: _environment("ACCELERATE_USE_MEGATRON_LM"), "ACCELERATE_USE_MEGATRON_LM"),
    "two plugins": (lambda: _plugins(twice=True), "2 MegatronDDPPlugins"),
    "no plugin": (lambda: _plugins(megatron_ddp_plugin={"bucket_size": 3}), "expected a MegatronDDPPlugin, got dict"),
    "optimizer first": (_optimizer_first, "prepare the model before the optimizer"),
    "one optimizer of two models": (
        lambda: _prepare(lambda nets: sgd([*nets[0].parameters(), *nets[1].parameters()]), num_models=2),
        "belong to 2 models",
    ),
    "not element-wise": (lambda: _prepare(lambda nets: torch.optim.LBFGS(nets[0].parameters())), "cannot be sharded"),
    "nan check with fp16": (_nan_check_with_fp16, "check_for_nan_in_grad=True contradicts"),
}


def refusal(case: str) -> str:
    job, pattern = REFUSED[case]
    with pytest.raises((ValueError, NotImplementedError), match=pattern) as caught:
        job()
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(worlds: Worlds, case: str) -> None:
    first, second = worlds.run(refusal, case)
    assert first == second


def refusals_with(plugin: Any) -> dict[str, str]:
    """The messages whose way out is an all-reduce."""
    from megastrategy.accelerate import Accelerator

    accelerator = Accelerator(megatron_ddp_plugin=plugin)
    nets = net_of(1), net_of(2)
    models = accelerator.prepare(*nets)
    both = itertools.chain(nets[0].parameters(), nets[1].parameters())
    said = {}
    for name, make in {
        "two models": lambda: accelerator.prepare(sgd(both)),
        "not element-wise": lambda: accelerator.prepare(torch.optim.LBFGS(nets[0].parameters())),
        "not prepared": lambda: [
            accelerator.backward(models[0](inputs(accelerator)).sum()),
            sgd(nets[0].parameters()).step(),
        ],
    }.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            make()
        said[name] = str(caught.value)
    return said


def refusals_in_both_forms(file: Any) -> list[dict[str, str]]:
    from megastrategy.accelerate import MegatronDDPPlugin
    from megastrategy.accelerate.launch_config import plugin_from_launch

    return [refusals_with(plugin) for plugin in (MegatronDDPPlugin(), plugin_from_launch(file, {}))]


def test_the_way_out_is_named_in_the_form_in_which_the_options_came(worlds: Worlds, tmp_path: Any) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("megatron_ddp_config: {bucket_size: 100}")
    for by_hand, launched in worlds.run(refusals_in_both_forms, file):
        assert len(by_hand) == len(launched) == 3
        for message in by_hand.values():
            assert "pass MegatronDDPPlugin(use_distributed_optimizer=False)" in message.replace("Pass", "pass")
        for message in launched.values():
            assert f"`use_distributed_optimizer: false` under megatron_ddp_config: in {file}" in message
            assert "MEGATRON_DDP_USE_DISTRIBUTED_OPTIMIZER=false in the environment" in message
            assert "MegatronDDPPlugin(" not in message


def one_optimizer_of_two_models(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    accelerator = make_accelerator(name, with_mode(name, mode))
    nets = net_of(1), net_of(2)
    first, second, optimizer = accelerator.prepare(*nets, adamw([*nets[0].parameters(), *nets[1].parameters()]))
    accelerator.backward((first(inputs(accelerator)) - second(inputs(accelerator))).square().mean())
    accelerator.clip_grad_norm_(itertools.chain(first.parameters(), second.parameters()), 0.1)
    optimizer.step()
    return [weights_of(net) for net in nets]


def test_one_optimizer_of_two_models_without_sharding(worlds: Worlds) -> None:
    assert_like_ddp(worlds, one_optimizer_of_two_models, MODES["all-reduce"])


# --- parameters that no model has -------------------------------------------------------------------------------------


def train_strangers(name: str, mode: dict[str, Any], prepare: str) -> list[dict[str, Tensor]]:
    """As sentence-transformers does: the optimizer has the loss's parameters too, a head and a guide."""
    accelerator = make_accelerator(name, with_mode(name, mode))
    net, head, guide = net_of(1), nn.Linear(3, 2), nn.Linear(2, 2)
    with torch.no_grad():
        for param in itertools.chain(head.parameters(), guide.parameters()):
            param.fill_(0.3)
    if prepare == "one optimizer":
        made = [adamw(itertools.chain(net.parameters(), head.parameters(), guide.parameters()))]
    else:
        made = [adamw(net.parameters()), adamw([*head.parameters(), *guide.parameters()])]
    model, *optimizers = accelerator.prepare(net, *made)
    told = name != "ddp" and accelerator.is_main_process
    warning = pytest.warns(UserWarning, match=r"2 param.* of this AdamW belong to no wrapped model")
    with warning if told else contextlib.nullcontext():
        for step in range(3):
            accelerator.backward(head(model(inputs(accelerator, step))).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    states = [state_of(accelerator, item) or {} for item in optimizers]
    return [weights_of(part) for part in (net, head, guide)] + states


@both_modes
@pytest.mark.parametrize("prepare", ["one optimizer", "two optimizers"])
def test_parameters_that_no_model_has_are_stepped_as_under_torch_ddp(
    worlds: Worlds, mode: dict[str, Any], prepare: str
) -> None:
    results = assert_like_ddp(worlds, train_strangers, mode, 1e-6, prepare)
    (_, head, guide, *_), (_, other_head, other_guide, *_) = results
    assert not torch.equal(head["weight"], other_head["weight"]), "nobody reduces its gradient"
    assert torch.equal(guide["weight"], other_guide["weight"]), "it has none"


# --- options ---------------------------------------------------------------------------------------------------------


def look_at_options() -> None:
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType

    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    plugin = MegatronDDPPlugin(bucket_size=77, static_graph=True)
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(kwargs_handlers=[handler, plugin])
    assert accelerator.megatron_ddp_config == DistributedDataParallelConfig(
        bucket_size=77, static_graph=True, broadcast_buffers=False
    )
    assert accelerator.state.megatron_ddp_plugin is plugin
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert "MULTI_CPU" in str(accelerator.state)
    assert Accelerator().megatron_ddp_plugin is plugin, "a second one is set up as the first"
    own, theirs = (inspect.signature(cls.__init__).parameters for cls in (Accelerator, accelerate.Accelerator))
    assert [*theirs, "megatron_ddp_plugin"] == list(own)
    assert Accelerator(True, False, None, 4).gradient_accumulation_steps == 4, "by position too"
    with pytest.raises(TypeError, match="bucket_sise"):
        Accelerator(bucket_sise=3)


def test_options(worlds: Worlds) -> None:
    worlds.run(look_at_options)


def report(name: str, mode: dict[str, Any]) -> tuple[str, str]:
    accelerator = make_accelerator(name, with_mode(name, mode), mixed_precision="bf16")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("said", accelerator.process_index)
        with accelerator.main_process_first():
            accelerator.on_last_process(print)("last")
    return printed.getvalue(), repr(accelerator.state)


def test_reports(worlds: Worlds) -> None:
    (first, state), (second, _) = assert_like_ddp(worlds, report, {"use_distributed_optimizer": True})
    assert (first, second) == ("said 0\n", "last\n")
    assert "Num processes: 2" in state


def test_the_plugin_has_every_field_of_the_config() -> None:
    from megastrategy.accelerate import MegatronDDPPlugin

    own = {field.name: (field.type, field.default) for field in dataclasses.fields(MegatronDDPPlugin)}
    hints = inspect.get_annotations(DistributedDataParallelConfig, eval_str=True)
    for field in dataclasses.fields(DistributedDataParallelConfig):
        assert own.pop(field.name) == (hints[field.name], field.default)
    assert set(own) == {"bucket_cap_mb", "gradient_as_bucket_view", "state_dict_type"}
    assert MegatronDDPPlugin().config() == DistributedDataParallelConfig()
    assert MegatronDDPPlugin(bucket_cap_mb=1).config().bucket_size == 2**18
    for wrong, named in [({"bucket_size": -1}, "bucket_size=-1"), ({"state_dict_type": "half"}, "'half'")]:
        with pytest.raises(ValueError, match=named):
            MegatronDDPPlugin(**wrong)


def test_the_package_does_not_import_accelerate() -> None:
    code = "import sys, megastrategy; print([m for m in ('accelerate', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


@pytest.mark.parametrize("job", [alone, alone_and_compiled])
def test_one_process(worlds: Worlds, job: Callable[[], None]) -> None:
    worlds.run(job, size=1)


def forget_the_optimizer() -> str:
    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model = accelerator.prepare(net)
    optimizer = sgd(net.parameters())
    accelerator.backward(model(inputs(accelerator)).square().mean())
    with pytest.raises(ReducedGradError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_that_was_not_prepared_is_missed(worlds: Worlds) -> None:
    for message in worlds.run(forget_the_optimizer):
        assert "accelerator.prepare" in message
        assert "use_distributed_optimizer=False" in message


def train_one_through_another(name: str) -> dict[str, Tensor]:
    """The second model is prepared, and nobody steps it: torch DDP reduces its gradients all the same."""
    accelerator = make_accelerator(name)
    nets = net_of(1), nn.Linear(3, 3)
    with torch.no_grad():
        nets[1].weight.copy_(torch.eye(3))
        nets[1].bias.zero_()
    first, second, optimizer = accelerator.prepare(*nets, sgd(nets[0].parameters()))
    for _ in range(3):
        out = first(inputs(accelerator))
        accelerator.backward(second(out.reshape(-1)[:3]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(nets[0])


def test_a_model_that_another_is_trained_through_is_not_an_error(worlds: Worlds) -> None:
    ours, theirs = (worlds.run(train_one_through_another, name) for name in ("megatron_ddp", "ddp"))
    assert_equal(ours, theirs)


def clip_each_microbatch(name: str, mode: dict[str, Any]) -> dict[str, Tensor]:
    """Without asking ``sync_gradients``: within a window each rank clips its own."""
    accelerator = make_accelerator(name, with_mode(name, mode), gradient_accumulation_steps=3)
    net = net_of()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward((step + 1) * model(inputs(accelerator)).square().mean())
            if step % 3 < 2:
                accelerator.clip_grad_norm_(model.parameters(), 0.01)
                accelerator.clip_grad_value_(model.parameters(), 0.004)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


@both_modes
def test_clipping_within_a_window_of_accumulation_is_of_what_each_rank_has(
    worlds: Worlds, mode: dict[str, Any]
) -> None:
    assert_like_ddp(worlds, clip_each_microbatch, mode)
