"""Divided experts when something is wrong: infinite gradients, ranks that end, bytes on the wire that should not be."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from tests.core.properties.test_memory import bytes_received
from tests.support.experts import Case, Experts, Trainee, batch_of, expert_mesh, train_alone
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole

RANKS = 4
ALL_REDUCE = (("use_distributed_optimizer", False),)


# --- infinite gradients ----------------------------------------------------------------------------------------------


def scaled_steps(culprit: int, options: tuple[tuple[str, Any], ...]) -> tuple[list[bool], float, dict[str, Tensor]]:
    """Whether each step left the weights as they were, the scale at the end, and the weights.

    One rank's expert has an infinite gradient in step 1, which is trained again afterwards."""
    trainee = Trainee.make(Case(2, clip_norm=None, options=options))
    scaler, skipped = GradScaler("cpu", init_scale=1024.0), []
    up: Any = trainee.module.layers[1].up
    for number, step in enumerate((0, 1, 1, 2)):
        trainee.optimizer.zero_grad()
        hook = up.register_hook(lambda grad: grad * torch.inf) if (number, dist.get_rank()) == (1, culprit) else None
        before = {name: whole(param) for name, param in trainee.module.named_parameters()}
        x, y = batch_of(dist.get_rank(), step, 0)
        scaler.scale(trainee.module.loss(x, y, trainee.model)).backward()
        if hook is not None:
            hook.remove()
        scaler.step(trainee.optimizer)
        scaler.update()
        trainee.model.finish_param_gather()
        after = {name: whole(param) for name, param in trainee.module.named_parameters()}
        skipped.append(all(torch.equal(before[name], after[name]) for name in before))
    trainee.model.close()
    return skipped, scaler.get_scale(), after


@pytest.mark.sample(1)
@pytest.mark.parametrize(("culprit", "options"), [(0, ()), (3, ()), (2, ALL_REDUCE)], ids=str)
def test_an_infinite_gradient_of_one_ranks_expert_skips_the_step_on_all(
    culprit: int, options: tuple[tuple[str, Any], ...]
) -> None:
    expected = train_alone(Case(2, clip_norm=None, steps=3), RANKS)
    for skipped, scale, weights in run_processes(RANKS, scaled_steps, culprit, options):
        assert skipped == [False, True, False, False]
        assert scale == 512.0
        torch.testing.assert_close(weights, expected.weights, rtol=0.0, atol=1e-6)


# --- ranks that end --------------------------------------------------------------------------------------------------


def end_in_the_exchange(way: str) -> None:
    """Rank 3 ends while the others are in, or on their way to, the exchange of tokens of the second step."""
    trainee = Trainee.make(Case(2))
    trainee.train(range(1))

    def end(*_: Any) -> None:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no more tokens")

    if dist.get_rank() == 3:
        trainee.module.layers[1].register_forward_pre_hook(end)
    trainee.train(range(1, 3))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "reason"), [("killed", "the process ended without a result"), ("raises", "no more tokens")]
)
def test_a_rank_that_ends_in_the_exchange_of_tokens_ends_the_others_with_a_reason(way: str, reason: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_processes(RANKS, end_in_the_exchange, way)
    by_rank = str(raised.value).split("\nrank ")
    assert len(by_rank) == RANKS
    assert reason in by_rank[3]
    for said in by_rank[:3]:
        assert "no result within" not in said
        assert "Connection closed by peer" in said or "Connection reset by peer" in said, said


# --- bytes on the wire -----------------------------------------------------------------------------------------------

WIDE = 256


def count_wire(ep: int, options: dict[str, Any]) -> float:
    """Bytes that all ranks receive in a step, for each element of experts that a rank has.

    The module has experts only, and each rank runs its own on rows of its own: nothing is sent but by the engine.
    """
    gc.collect()  # sockets of an earlier model that were closed between the two counts would be missing in the second
    mesh, steps = expert_mesh(ep), 3
    torch.manual_seed(0)
    experts = Experts(4)
    experts.up = torch.nn.Parameter(torch.randn(8, WIDE, WIDE) / WIDE)
    experts.down = torch.nn.Parameter(torch.randn(8, WIDE, WIDE) / WIDE)
    experts.divide(mesh["ep"])
    module = OnlyExperts(experts.up, experts.down)
    model = DistributedDataParallel(
        module, DistributedDataParallelConfig(bucket_size=300_000, **options), expert_mesh=mesh
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    counts = []
    for number in range(steps + 1):
        optimizer.zero_grad()
        model(torch.ones(2, WIDE)).sum().backward()
        optimizer.step()
        if number in (0, steps):
            dist.barrier()
            counts.append(sum(bytes_received().values()))
            dist.barrier()
    numel = sum(param._local_tensor.numel() for param in module.parameters())
    model.close()
    total = torch.tensor(float(counts[1] - counts[0]))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size() / steps / numel


class OnlyExperts(torch.nn.Module):
    """Two stacks of experts, each rank's own run one after the other."""

    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.up.to_local(), self.down.to_local(), strict=True):
            x = x + (x @ first).relu() @ second
        return x


def count_each() -> list[float]:
    return [count_wire(ep, dict(options)) for ep, options, _ in WIRES]


WIRES = [
    (1, (), 8 * 3 / 4),
    (2, (), 8 * 1 / 2),
    (4, (), 0.0),
    (2, ALL_REDUCE, 8 * 1 / 2),
    (2, (("num_distributed_optimizer_instances", 2),), 8 * 1 / 2),
    (2, (("grad_wire_dtype", "bf16"),), 6 * 1 / 2),
]
"""Expert ranks, options, and ``8 (edp - 1) / edp``: bytes for an element of a rank's experts."""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads socket counters of the Linux kernel")
def test_bytes_on_the_wire_are_those_of_the_ranks_with_the_same_experts() -> None:
    found = run_processes(RANKS, count_each)[0]
    for (ep, options, expected), sent in zip(WIRES, found, strict=True):
        # A few hundred bytes are the agreement on used parameters.
        assert expected <= sent <= 1.02 * expected + 0.02, (ep, options, sent, expected)
