"""Transformers' mixtures of experts, divided over tensor or data-parallel ranks, in a loop and in a Trainer, beside one
process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Dataset, SequentialSampler

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole

from ..accelerate_loops import Worlds

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
    ("Mixtral", "all_to_all", False, "tensor"),
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


def train_all() -> list[Any]:
    torch.manual_seed(0)
    return [train(*case) for case in CASES]


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


def test_experts_equal_one_process() -> None:
    ranks = run_processes(RANKS, train_all)
    for number, (kind, _, _, over) in enumerate(CASES):
        weights, norms, state, num_elements = train_alone(kind, RANKS // EP if over == "tensor" else RANKS)
        for rank, results in enumerate(ranks):
            found, found_norms, found_state, local_elements = results[number]
            assert local_elements == num_elements // EP
            assert found_norms == pytest.approx(norms, rel=1e-5)
            torch.testing.assert_close(found, weights, rtol=0.0, atol=1e-6)
            if rank == 0:
                torch.testing.assert_close(found_state, state, rtol=0.0, atol=1e-6)


# --- in a Trainer -----------------------------------------------------------------------------------------------------


FIT_STEPS = 3


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return FIT_STEPS * RANKS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = batch(number, 0)[0]
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> Any:
    net = make_net("Qwen3Moe")
    net.config.output_router_logits = False  # type: ignore[union-attr] # the loss of labels only
    return net


def fit(ep: int, folder: Path, resume: Path | None) -> dict[str, Tensor]:
    """``resume``: a checkpoint. The model is made from it: Trainer restores no experts of Transformers 5.24, which have
    other names in the file, under torch DDP and in one process neither."""
    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin, replace_accelerators

    plugin = MegatronDDPPlugin(expert_parallel_size=ep, bucket_size=5000)
    accelerator = Accelerator(megatron_ddp_plugin=plugin)
    net = make_model() if resume is None else type(make_model()).from_pretrained(resume)
    one_rank = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))["tp"]
    divide_experts(net, accelerator.expert_mesh["expert_parallel"], one_rank, "all_to_all")
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    with replace_accelerators(plugin):
        trainer = InOrder(net, arguments, train_dataset=Sequences())
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return {name: whole(param) for name, param in net.named_parameters()}


def fit_alone() -> Any:
    net, data = make_model(), Sequences()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(FIT_STEPS):
        for rank in range(RANKS):
            sample = data[step * RANKS + rank]
            (net(**{name: value.unsqueeze(0) for name, value in sample.items()}).loss / RANKS).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return net


def test_trainer_of_experts_equals_one_process(worlds: Worlds, tmp_path: Path) -> None:
    alone = fit_alone()
    expected = {name: param.detach() for name, param in alone.named_parameters()}
    for weights in worlds.run(fit, 2, tmp_path / "saved", None, size=RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
    loaded = type(alone).from_pretrained(tmp_path / "saved" / f"checkpoint-{FIT_STEPS}")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(alone.state_dict()), rtol=0.0, atol=1e-6)
    # and goes on from a step before, with experts that are divided otherwise
    for weights in worlds.run(fit, 4, tmp_path / "resumed", tmp_path / "saved" / "checkpoint-2", size=RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
