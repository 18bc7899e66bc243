"""The user's optimizer object: its groups, schedulers, hooks and state, before, during and after a sharded step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import CheckpointError, OptimizerNotShardableError
from tests.support.kept_lists import Notes
from tests.support.models import two_layers
from tests.support.optimizers import Lamb
from tests.support.ranks import run_ranks
from tests.support.training import Run, assert_same_state, start_ours, train_with_ddp

SHARDED = DistributedDataParallelConfig(bucket_size=200)


def test_users_optimizer_steps_and_shows_params() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, SHARDED, group)
        seen = Notes()

        class Noting(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                seen.append(list(self.param_groups[0]["params"]))
                return super().step(closure)

        adam = Noting(model.parameters(), lr=0.1)
        by_hook: list[list[Tensor]] = []
        adam.register_step_pre_hook(lambda opt, args, kwargs: by_hook.append(list(opt.param_groups[0]["params"])))
        scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=1, gamma=0.5)
        optimizer = DistributedOptimizer(adam, model)
        seen.clear()  # of copies
        assert isinstance(optimizer, torch.optim.AdamW)
        assert isinstance(optimizer, DistributedOptimizer)
        assert optimizer.optimizer is adam
        assert optimizer.param_groups is adam.param_groups
        for expected in (0.1, 0.05, 0.025):
            assert optimizer.param_groups[0]["lr"] == expected
            assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.parameters()]
            optimizer.zero_grad()
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            scheduler.step()  # warns, which is an error here, unless the object itself was stepped
        # Where torch has hooked AdamW's step too, by an object made before, each step calls hooks twice. The inner call
        # is within the class's own step, where shards are.
        outer = by_hook[:: len(by_hook) // 3]
        assert len(outer) == 3
        assert all(list(map(id, params)) == list(map(id, module.parameters())) for params in outer)
        owned = {i: owned for i in range(4) if (owned := model.layout.owned_range(i, rank)) is not None}
        buckets = {model.layout.slots[i].bucket for i in owned}  # neighbours in one are stepped as one tensor
        assert [len(params) for params in seen] == [len(buckets)] * 3
        numel = sum(end - start for start, end in owned.values())
        assert all(0 <= sum(p.numel() for p in params) - numel < 64 * len(owned) for params in seen)
        assert all(param.dim() == 1 and not param.requires_grad for params in seen for param in params)

    run_ranks(2, run)


@pytest.mark.parametrize(("name", "sharded"), [("NAdam", True), ("AdamW", True), ("ASGD", False)])
def test_fp64_state_resumes_in_dtype_of_torch_ddp(name: str, sharded: bool) -> None:
    """torch makes some counters in fp32; what it loads, all but ``step``, gets the parameter's dtype."""
    run = Run(name, (("lr", 0.01),), steps=3, dtype=torch.float64)
    saved = train_with_ddp(run, 2)[0].optimizer_state
    plain = run.make_optimizer(run.make_module())
    plain.load_state_dict(saved)
    config = dataclasses.replace(SHARDED, use_distributed_optimizer=sharded)

    def load(rank: int, group: ProcessGroup) -> dict[str, Any]:
        optimizer = start_ours(run, rank, group, config).optimizer
        optimizer.load_state_dict(saved)
        return optimizer.state_dict()

    assert_same_state(run_ranks(2, load)[0], plain.state_dict())


def test_state_built_before_wrapping_is_taken_over() -> None:
    def run(rank: int, group: ProcessGroup) -> dict[str, Any]:
        module = two_layers()
        adam = torch.optim.Adam(module.parameters())
        module(torch.ones(2, 10)).sum().backward()
        adam.step()
        before = adam.state_dict()
        model = DistributedDataParallel(module, SHARDED, group)
        state = DistributedOptimizer(adam, model).state_dict()
        if rank == 0:
            assert_same_state(state, before)
        else:
            assert state["state"] == {}
            assert state["param_groups"] == before["param_groups"]
        return state

    run_ranks(2, run)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), SHARDED, group)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        before = optimizer.state_dict()
        for other in (two_layers(34), torch.nn.Linear(2, 2)):
            adam = torch.optim.Adam(other.parameters())
            for param in other.parameters():
                param.grad = torch.ones_like(param)
            adam.step()
            with pytest.raises(CheckpointError, match=r"parameter '0.weight' has shape|parameter groups of \[2\]"):
                optimizer.load_state_dict(adam.state_dict())
        after = optimizer.state_dict()
        if rank == 0:
            assert_same_state(after, before)

    run_ranks(2, run)


def test_added_group_is_classified() -> None:
    class Mixed(Lamb):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                norms = [param.grad.norm() for param in group["params"] if param.grad is not None]
                for param in (param for param in group["params"] if param.grad is not None):
                    scale = torch.stack(norms).norm() if group.get("normalised") else 1.0
                    param.sub_(param.grad / scale, alpha=group["lr"])

    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, SHARDED, group)
        optimizer = DistributedOptimizer(Mixed(module[2].parameters(), lr=0.1), model)
        with pytest.raises(OptimizerNotShardableError, match="parameter group 1"):
            optimizer.add_param_group({"params": list(module[0].parameters()), "normalised": True})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": list(module[0].parameters()), "normalised": False})
        before = module[0].weight.detach().clone()
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, module[0].weight)

    run_ranks(2, run)


@pytest.mark.parametrize(("norm_type", "sharded"), [(1.0, True), (3.0, True), (math.inf, True), (2.0, False)])
def test_norms_of_every_order(norm_type: float, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        model(torch.full((2, 10), 1.0 + rank)).square().sum().backward()
        grads = [model.full_grad(param) for param in module.parameters()]
        expected = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None], norm_type)
        torch.testing.assert_close(optimizer.grad_norm(norm_type), expected)
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.1, norm_type), expected)
        torch.testing.assert_close(optimizer.grad_norm(norm_type), torch.tensor(0.1), rtol=1e-4, atol=0)

    run_ranks(3, run)


def test_error_if_nonfinite_as_in_torch() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), SHARDED, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        model(torch.full((2, 10), float("inf") if rank else 1.0)).square().sum().backward()
        with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    run_ranks(2, run)


@pytest.mark.parametrize("options", [{}, {"grad_buffer": "pooled"}, {"grad_wire_dtype": "bf16"}], ids=str)
def test_nonfinite_clip_leaves_later_norms_finite(options: dict[str, Any]) -> None:
    """Its factor makes the elements between parameters NaN, too."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(3):
            (model(torch.ones(2, 10)) * (float("nan") if step == 1 else 1.0)).sum().backward()
            norm = optimizer.clip_grad_norm_(1.0)
            assert bool(norm.isfinite()) == (step != 1)
            optimizer.zero_grad()
        model.close()

    run_ranks(2, run)
