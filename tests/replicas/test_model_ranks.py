"""Replicas whose ranks share a model: tensor ranks and divided experts. Each rank sums with the same rank of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Replicas
from tests.support import experts, tensor_parallel
from tests.support.replicas import ALONE, OF, PATIENCE_S, SKEW_S, assert_equal, play, run_in_replicas

TENSOR_CASE = tensor_parallel.Case(vocab=509)
EXPERT_CASE = experts.Case(ep=2)


class Training:
    """One rank of one replica."""

    def __init__(
        self, kind: str, address: str, slot: int, group: dist.ProcessGroup, mesh: Any, *, is_first: bool
    ) -> None:
        self._kind, self._slot = kind, slot
        self.replicas = Replicas(
            OF, slot, lighthouse=address, skew_s=SKEW_S, patience_s=PATIENCE_S, process_group=group
        )
        config = DistributedDataParallelConfig(bucket_size=2000)
        self.module: nn.Module
        if kind == "tensor":
            self.module = tensor_parallel.make_module(TENSOR_CASE, mesh["tp"])
            arguments = {"process_group": mesh["dp"].get_group()}
            self._dp_rank = mesh["dp"].get_local_rank()
        else:
            self.module = experts.make_module(EXPERT_CASE)
            self.module.divide(mesh["tp"])
            arguments = {"process_group": group, "expert_mesh": mesh["dp", "tp"]}
            self._dp_rank = dist.get_rank(group)
        if not is_first:
            with torch.no_grad():
                for param in self.module.parameters():
                    param.mul_(3.0)
        self.model = DistributedDataParallel(self.module, config, replicas=self.replicas, **arguments)
        self._optimizer = DistributedOptimizer(torch.optim.AdamW(self.module.parameters(), lr=3e-3), self.model)

    def run(self, end: int) -> None:
        while self.replicas.step < end:
            number = 10 * self._slot + self._dp_rank
            if self._kind == "tensor":
                tokens = tensor_parallel.tokens_of(TENSOR_CASE, number, self.replicas.step, 0)
                loss = self.module.loss(self.model(tokens), tokens)  # type: ignore[operator] # a LanguageModel
            else:
                x, y = experts.batch_of(number, self.replicas.step, 0)
                loss = self.module.loss(x, y, self.model)  # type: ignore[operator] # a Model
            loss.backward()
            self._optimizer.clip_grad_norm_(0.5)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def outcome(self) -> dict[str, Any]:
        params = self.module.named_parameters()
        weights = {name: getattr(param, "_local_tensor", param).detach().clone() for name, param in params}
        return {"weights": weights, "state": self.model.rank_state_dict()["optimizers"]}


def leave_and_come_back(kind: str, num_dp: int, address: str) -> Any:
    mesh = init_device_mesh("cpu", (OF, num_dp, 2), mesh_dim_names=("replica", "dp", "tp"))
    ranks = 2 * num_dp
    slot = dist.get_rank() // ranks
    groups = [dist.new_group(list(range(s * ranks, (s + 1) * ranks))) for s in range(OF)]

    def make(is_first: bool) -> Training:
        return Training(kind, address, slot, groups[slot], mesh, is_first=is_first)

    return play(slot, make, ALONE, address)


@pytest.mark.parametrize(("kind", "num_dp"), [("tensor", 2), ("experts", 1)])
def test_each_rank_takes_the_part_of_its_number(kind: str, num_dp: int) -> None:
    first, second = run_in_replicas(leave_and_come_back, 2 * num_dp, kind, num_dp)
    for mine, other in zip(first, second, strict=True):
        assert_equal(mine, other)
    cut = "blocks.0.up.weight" if kind == "tensor" else "layers.0.up"
    assert not torch.equal(first[0]["weights"][cut], first[1]["weights"][cut])
