"""``optimizer.param_norm()`` and ``optimizer.grad_num_zeros()`` beside what torch DDP's whole tensors give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks, with_instances
from tests.support.tensor_parallel import Case, Trainee, make_module, meshes, tokens_of

MODES: dict[str, dict[str, Any]] = {
    "in the step": {},
    "at the next forward": {"overlap_param_gather": True},
    "pooled": {"grad_buffer": "pooled"},
    "two instances": {"num_distributed_optimizer_instances": 2},
    "all-reduce": {"use_distributed_optimizer": False},
}


class Words(nn.Module):
    """Words that no rank meets, so zeros in gradients; a tied head, a frozen scale, a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.layer = nn.Linear(6, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.again = self.out
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.layer(self.words(indices)).relu() * self.scale
        return self.out(hidden).square().mean() + self.again(hidden).abs().mean()


def make(dtype: torch.dtype) -> Words:
    torch.manual_seed(3)
    return Words().to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(torch.randint(0, 12, (7,), generator=torch.Generator().manual_seed(100 * rank + step)))
    return loss


def norm_of(params: list[Tensor], norm_type: float) -> float:
    return torch.linalg.vector_norm(torch.cat([p.detach().double().flatten() for p in params]), norm_type).item()


@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Muon], ids=["flat", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_they_are_those_of_whole_tensors(
    mode: dict[str, Any], dtype: torch.dtype, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    start = make(dtype)
    size = 4 if "num_distributed_optimizer_instances" in mode else 2

    def zeros_of_ddp(rank: int, group: ProcessGroup) -> int:
        module = copy.deepcopy(start)
        model = TorchDDP(module, process_group=group, find_unused_parameters=True)
        loss_of(model, rank, 0).backward()
        return sum(int((p.grad == 0).sum()) for p in module.parameters() if p.grad is not None)

    def ours(rank: int, group: ProcessGroup) -> list[tuple[int, list[float], list[float]]]:
        module = copy.deepcopy(start)
        config = DistributedDataParallelConfig(bucket_size=100, **mode)
        instances = with_instances(group, 2) if size == 4 else None
        model = DistributedDataParallel(module, config, group, collectives=instances)
        params = [p for p in module.parameters() if p.ndim == 2 or optimizer_class is torch.optim.AdamW]
        optimizer = DistributedOptimizer(optimizer_class(params, lr=0.01), model)
        seen = []
        for step in range(3):
            loss_of(model, rank, step).backward()
            zeros = optimizer.grad_num_zeros()
            assert (zeros.dtype, zeros.shape) == (torch.int64, ())
            optimizer.step()
            norms = [optimizer.param_norm(norm_type).item() for norm_type in (1.0, 2.0, float("inf"))]
            model(torch.tensor([1]))  # the weights are here after a forward
            optimizer.zero_grad()
            seen.append((int(zeros), norms, [norm_of(params, norm_type) for norm_type in (1.0, 2.0, float("inf"))]))
        module.words.weight.data = torch.ones_like(module.words.weight)  # given other memory, from outside
        assert optimizer.param_norm().item() == pytest.approx(norm_of(params, 2.0), rel=1e-6)
        return seen

    results = run_ranks(size, ours)
    assert all([each[:2] for each in seen] == [each[:2] for each in results[0]] for seen in results), (
        "bits of all ranks"
    )
    for _, norms, whole in results[0]:
        assert norms == pytest.approx(whole, rel=1e-6)
    if optimizer_class is torch.optim.AdamW:
        (expected, *_) = run_ranks(size, zeros_of_ddp)
        assert results[0][0][0] == expected > 28 * 6, "words in no batch, and rows that relu has cut"


def on_a_mesh(tp: int, cases: list[Case]) -> list[tuple[int, float, float, int]]:
    """For each case: the zeros in the first gradients, the norm of the weights (by the engine and of whole tensors),
    the zeros if all are zero."""
    seen = []
    for case in cases:
        trainee = Trainee.make(meshes(tp), case)
        trainee.backward(0, 0)
        zeros = int(trainee.optimizer.grad_num_zeros())
        trainee.optimizer.step()
        norm = trainee.optimizer.param_norm().item()
        trainee.model.finish_param_gather()
        trainee.optimizer.zero_grad(set_to_none=False)
        all_zeros = int(trainee.optimizer.grad_num_zeros())
        seen.append((zeros, norm, norm_of(list(trainee.weights().values()), 2.0), all_zeros))
        trainee.model.close()
    return seen


@pytest.mark.long
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_tensor_ranks_count_each_element_once(dp: int, tp: int) -> None:
    cases = [Case(vocab=509), Case("all-reduce", tied=True), Case("forward", sequence_parallel=False)]
    by_rank = run_processes(dp * tp, on_a_mesh, tp, cases, timeout_s=300.0)
    assert all(seen == by_rank[0] for seen in by_rank), "the same bits on all ranks"
    for case, (zeros, norm, whole, all_zeros) in zip(cases, by_rank[0], strict=True):
        assert norm == pytest.approx(whole, rel=1e-6)
        module = make_module(case, None)
        for dp_rank in range(dp):
            tokens = tokens_of(case, dp_rank, 0, 0)
            module.loss(module(tokens), tokens).backward()
        unmet = sum(int((param.grad == 0).sum()) for param in module.parameters() if param.grad is not None)
        assert zeros == unmet
        assert case.tied or unmet > 400 * 128, "words in no batch have no gradient"
        assert all_zeros == sum(param.numel() for param in module.parameters())
