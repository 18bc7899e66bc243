"""Transformers' mixtures of experts, divided over tensor ranks or over data-parallel ranks, beside one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole
from tests.support.tiers import cases_that_run

transformers = pytest.importorskip("transformers")

RANKS, EP, STEPS = 4, 2, 6
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "output_router_logits": True,
}
KINDS = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
CASES = [
    ("Qwen3Moe", "all_reduce", True, "tensor"),
    ("Qwen3Moe", "all_to_all", True, "tensor"),
    ("Qwen3Moe", "all_to_all", False, "tensor"),
    ("Mixtral", "all_to_all", True, "tensor"),
    ("Qwen3Moe", "all_to_all", True, "data-parallel"),
    ("Qwen3Moe", "all_to_all", False, "data-parallel"),
    ("Mixtral", "all_to_all", True, "data-parallel"),
]
"""The model, how Transformers exchanges tokens, whether the optimizer is sharded, and the ranks that divide experts."""


def make_net(kind: str) -> nn.Module:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    net: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return net.train()


def batch(dp_rank: int, step: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(10 * step + dp_rank))


def divide_experts(net: Any, expert_mesh: DeviceMesh, tensor_mesh: DeviceMesh, exchange: str) -> None:
    """As docs/experts.md writes it."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    names = [*dict(net.named_parameters()), *dict(net.named_modules())]
    patterns = {name: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names}
    plan = {name: net.ep_plan[pattern] for name, pattern in patterns.items() if pattern in net.ep_plan}
    apply_expert_parallelism(net, expert_mesh, tensor_mesh, plan, ep_implementation=exchange)


def train(kind: str, exchange: str, sharded: bool, over: str) -> tuple[dict[str, Tensor], list[float], Any, int]:
    """Weights and norms, the state that is saved, and the elements of experts that are on this rank."""
    net = make_net(kind)
    config = DistributedDataParallelConfig(bucket_size=5000, use_distributed_optimizer=sharded)
    tp = EP if over == "tensor" else 1
    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    if over == "tensor":
        divide_experts(net, mesh["tp"], mesh["tp"], exchange)
        model = DistributedDataParallel(net, config, process_group=mesh.get_group("dp"))
    else:
        experts = init_device_mesh("cpu", (RANKS // EP, EP), mesh_dim_names=("edp", "ep"))
        divide_experts(net, experts["ep"], mesh["tp"], exchange)
        model = DistributedDataParallel(net, config, expert_mesh=experts)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9), model)
    norms = []
    for step in range(STEPS):
        tokens = batch(mesh.get_local_rank("dp"), step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    model.check_replicas()
    state = optimizer.state_dict()
    held = sum(param.to_local().numel() for param in net.parameters() if hasattr(param, "to_local"))
    weights = {name: whole(param) for name, param in net.named_parameters()}
    model.close()
    return weights, norms, state["state"], held


def on_ranks(cases: list[tuple[str, str, bool, str]]) -> dict[Any, Any]:
    torch.manual_seed(0)
    return {case: train(*case) for case in cases}


def train_alone(kind: str, dp: int) -> tuple[dict[str, Tensor], list[float], Any, int]:
    net = make_net(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for step in range(STEPS):
        for dp_rank in range(dp):
            tokens = batch(dp_rank, step)
            (net(input_ids=tokens, labels=tokens).loss / dp).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: param.detach().clone() for name, param in net.named_parameters()}
    experts = sum(param.numel() for name, param in net.named_parameters() if ".experts." in name)
    return weights, norms, optimizer.state_dict()["state"], experts


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_processes(RANKS, on_ranks, cases_that_run(request, "kind", "exchange", "sharded", "over"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "exchange", "sharded", "over"), CASES)
def test_they_train_as_in_one_process(
    ranks: list[dict[Any, Any]], kind: str, exchange: str, sharded: bool, over: str
) -> None:
    weights, norms, state, experts = train_alone(kind, RANKS // EP if over == "tensor" else RANKS)
    for rank, by_case in enumerate(ranks):
        found, found_norms, found_state, held = by_case[kind, exchange, sharded, over]
        assert held == experts // EP
        assert found_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(found, weights, rtol=0.0, atol=1e-6)
        if rank == 0:
            torch.testing.assert_close(found_state, state, rtol=0.0, atol=1e-6)
