"""A prepared model answers for all attributes of torch's DDP; see torch_ddp_by_name's [Note: torch's attributes]."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy.core.torch_ddp_surface import DDP_ATTRIBUTES, REDUCER_ATTRIBUTES, UNUSED_DDP_ATTRIBUTES
from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, both_modes, inputs, make_accelerator, net_of, sgd, weights_of

THE_ENGINES_OWN = {"device", "reducer", "require_backward_grad_sync", "require_forward_param_sync"}


def names_of_torchs() -> set[str]:
    """All that its ``__init__`` sets, whatever it is given, and its properties."""
    make_accelerator("ddp")  # for the process group
    found: set[str] = set()
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 3}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found |= set(vars(TorchDDP(net_of(), **options)))
    found -= set(vars(nn.Module()))
    return found | {name for name, value in vars(TorchDDP).items() if isinstance(value, property)}


def test_every_attribute_of_torchs_has_an_answer(worlds: Worlds) -> None:
    """A new one in a new torch is seen here."""
    known = THE_ENGINES_OWN | set(DDP_ATTRIBUTES) | set(UNUSED_DDP_ATTRIBUTES) | set(REDUCER_ATTRIBUTES)
    for names in worlds.run(names_of_torchs):
        assert names <= known
        assert len(names) > 30


DESCRIBE = (
    *("find_unused_parameters", "static_graph", "dim", "mixed_precision"),
    *("device", "device_type", "device_ids", "output_device", "is_multi_device_module", "parameters_to_ignore"),
    *("broadcast_buffers", "require_backward_grad_sync", "require_forward_param_sync"),
    *("join_device", "_distributed_rank", "broadcast_bucket_size", "skip_all_reduce_unused_params", "_comm_hooks"),
    *("_delay_all_reduce_params", "_delay_all_reduce_all_params", "_delay_grad_buffer", "_delay_grad_views"),
    *("_use_python_reducer", "bucket_bytes_cap_list"),
    *(name for name in ("batched_grad_copy", "forward_sync_buffers") if name in inspect.signature(TorchDDP).parameters),
)


def describe(name: str, static_graph: bool) -> dict[str, Any]:
    from accelerate.utils import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        static_graph=static_graph, find_unused_parameters=True, broadcast_buffers=False
    )
    if name == "ddp":
        import accelerate

        accelerator = accelerate.Accelerator(kwargs_handlers=[handler])
    else:
        accelerator = make_accelerator(name, kwargs_handlers=[handler])
    net = nn.Sequential(net_of(), nn.BatchNorm1d(3))
    model = accelerator.prepare(net)
    if static_graph:
        model(inputs(accelerator)).sum().backward()  # before that torch DDP has to prepare its first reduction
        assert model._static_graph_delay_allreduce_enqueued
    values = {name: getattr(model, name) for name in DESCRIBE}
    values["ranks"] = torch.distributed.get_process_group_ranks(model.process_group)
    values["join"] = tuple(model._join_config)
    assert model.join_process_group is model.process_group
    assert [id(item) for item in model._module_parameters] == [id(item) for item in net.parameters()]
    values["buffers"] = [tuple(item.shape) for item in model.modules_buffers]
    values["named"] = sorted(model.named_module_buffers)
    return values


@pytest.mark.parametrize("static_graph", [False, True])
def test_the_answers_are_torchs(worlds: Worlds, static_graph: bool) -> None:
    ours, theirs = (worlds.run(describe, name, static_graph) for name in ("megatron_ddp", "ddp"))
    assert ours == theirs


class WithNames(nn.Module):
    """With attributes that torch's DDP has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.dim = 512
        self.logger = "its own"
        self.find_unused_parameters = "its own"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def ask_and_set() -> None:
    accelerator = make_accelerator("megatron_ddp", {"bucket_size": 40})
    model, named = accelerator.prepare(net_of(), WithNames())
    assert (model.dim, named.dim) == (0, 512), "what torch's does not tell is the module's"
    assert named.logger == "its own"
    assert named.find_unused_parameters is True
    for name in REDUCER_ATTRIBUTES:
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"{name} belongs to torch DDP's reducer"):
            getattr(model, name)
    assert model.bucket_bytes_cap == 4 * max(bucket.numel for bucket in model.layout.buckets)
    assert model.bucket_bytes_cap_default is False
    assert model.gradient_as_bucket_view is True
    assert model.to_kwargs((torch.ones(2),), {}, 0)[0][0][0].tolist() == [1.0, 1.0]
    assert callable(model.scatter)
    assert callable(model.gather)
    # what is not done is not taken silently
    for name, value in {"find_unused_parameters": False, "static_graph": True, "broadcast_buffers": False}.items():
        with pytest.raises(AttributeError, match=rf"{name}={value}: .*MegatronDDPPlugin\({name}="):
            setattr(model, name, value)
    with pytest.raises(AttributeError, match="Leave it as it is"):
        model.process_group = object()
    model.find_unused_parameters = True  # as it is
    # declared later, the graph is right as it was
    model._set_static_graph()
    assert model.static_graph
    with pytest.warns(UserWarning, match="static_graph is set already"):
        model._set_static_graph()


def test_attributes_of_the_module_and_what_is_set(worlds: Worlds) -> None:
    worlds.run(ask_and_set)


class Counting(nn.Module):
    """Its buffer parts on the ranks, until rank 0's is broadcast."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(0.0))
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.number
        return self.layer(x) * self.count


def switch_buffers(name: str, mode: dict[str, Any]) -> list[tuple[bool, float]]:
    accelerator = make_accelerator(name, mode)
    torch.manual_seed(0)
    net = Counting(accelerator.process_index + 1)
    model = accelerator.prepare(net)
    seen = []

    def forward(*, backward: bool = True) -> None:
        loss = model(inputs(accelerator)).sum()
        if backward:
            loss.backward()
        seen.append((model.require_forward_param_sync, net.count.item()))

    forward()
    model._sync_buffers()
    seen.append((model.require_forward_param_sync, net.count.item()))
    forward()
    with model.no_sync():
        forward()
    forward()
    with torch.no_grad():
        forward(backward=False)
    forward()
    for value in (False, True, False, False):
        model.require_forward_param_sync = value
        forward()
    return seen


@both_modes
def test_whether_the_next_forward_broadcasts_buffers_is_seen_and_set(worlds: Worlds, mode: dict[str, Any]) -> None:
    ours, theirs = (worlds.run(switch_buffers, name, mode) for name in ("megatron_ddp", "ddp"))
    assert ours == theirs
    assert ours[0] != ours[1], "the ranks' buffers part, or there is nothing to see"


def train_with_a_cache(name: str, mode: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    """Gradients of a contrastive loss, cached, and the forwards once more inside of its backward: as
    sentence-transformers' ``gradcache`` does it, with the attributes that it asks for."""
    accelerator = make_accelerator(name, mode, gradient_accumulation_steps=accumulate)
    net = net_of()
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


@both_modes
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_with_a_cache_ends_in_the_bits_of_torch_ddp(
    worlds: Worlds, mode: dict[str, Any], accumulate: int
) -> None:
    ours, theirs = (worlds.run(train_with_a_cache, name, mode, accumulate) for name in ("megatron_ddp", "ddp"))
    assert_equal(ours, theirs)
    assert_equal(ours[0], ours[1])


def trigger_by_accelerates_class() -> None:
    """A script that was written for accelerate's own class calls its static method."""
    import accelerate

    accelerator = make_accelerator("megatron_ddp", {"use_distributed_optimizer": False})
    net = net_of()
    model = accelerator.prepare(net)
    with model.no_sync():
        loss = model(inputs(accelerator)).sum()
    with accelerate.Accelerator.trigger_sync_in_backward(model):
        loss.backward()
    mine = net[0].bias.grad.clone()
    assert torch.equal(mine, accelerator.reduce(mine, "mean")), "every rank has the mean"


def test_a_backward_is_synchronised_by_accelerates_own_class(worlds: Worlds) -> None:
    worlds.run(trigger_by_accelerates_class)
