"""The user's optimizer object: its groups, schedulers, hooks and state, before, during and after a sharded step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import CheckpointError, OptimizerNotShardableError
from tests.support.models import awkward_model, images, two_layers
from tests.support.notes import Notes
from tests.support.optimizers import Lamb
from tests.support.ranks import run_ranks
from tests.support.training import Run, assert_same_state, start_ours, train_with_ddp, train_with_ours

SHARDED = DistributedDataParallelConfig(bucket_size=200)


def test_the_users_object_steps_and_shows_the_models_parameters() -> None:
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


def test_a_group_of_which_a_rank_owns_nothing_stays() -> None:
    def run(rank: int, group: ProcessGroup) -> list[int]:
        module = two_layers()
        model = DistributedDataParallel(module, SHARDED, group)
        groups = [{"params": [param], "lr": 0.1 * (i + 1)} for i, param in enumerate(module.parameters())]
        lengths: list[int] = []

        class Noting(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                lengths.extend(len(group["params"]) for group in self.param_groups)
                return super().step(closure)

        optimizer = DistributedOptimizer(Noting(groups, lr=1.0), model)
        optimizer.register_step_post_hook(lambda *_: None)  # then all is stepped in one call
        lengths.clear()  # of copies
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        return lengths

    lengths = run_ranks(2, run)
    assert all(len(rank) == 4 for rank in lengths)
    assert any(0 in rank for rank in lengths), "some rank owns nothing of some group"


@pytest.mark.parametrize("saved_on", [1, 2, 3])
@pytest.mark.parametrize("loaded_on", [1, 2, 3])
@pytest.mark.parametrize("sharded", [True, False])
def test_state_moves_between_numbers_of_ranks_and_engines(saved_on: int, loaded_on: int, sharded: bool) -> None:
    """Saved on so many ranks, loaded on so many others, with another bucket size: equal tensor by tensor."""
    run = Run(options=(("lr", 0.01), ("amsgrad", True)), groups=3, steps=3)
    saved = train_with_ours(run, saved_on, SHARDED)[0].optimizer_state

    def load(rank: int, group: ProcessGroup) -> dict[str, Any]:
        config = DistributedDataParallelConfig(bucket_size=1, use_distributed_optimizer=sharded)
        model = DistributedDataParallel(awkward_model(), config, group)
        optimizer = DistributedOptimizer(run.make_optimizer(model), model)
        optimizer.load_state_dict(saved)
        return optimizer.state_dict()

    assert_same_state(run_ranks(loaded_on, load)[0], saved)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "RAdam", "Adagrad", "Rprop", "ASGD", "Adadelta", "Adamax"])
def test_state_of_torch_ddp_is_continued_to_the_bit(name: str) -> None:
    """Six steps under torch DDP equal three there and three here; and the plain optimizer loads ours."""
    options = (("lr", 0.01), ("momentum", 0.9)) if name == "SGD" else (("lr", 0.01),)
    whole, half = Run(name, options, steps=6), Run(name, options, steps=3)
    middle = train_with_ddp(half, 2)

    def go_on(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        module = awkward_model()
        module.load_state_dict(middle[rank].weights)
        model = DistributedDataParallel(module, SHARDED, group)
        optimizer = DistributedOptimizer(whole.make_optimizer(model), model)
        optimizer.load_state_dict(middle[0].optimizer_state)
        for step in range(3, 6):
            optimizer.zero_grad()
            model(images(rank, step, 0), step, rank).backward()
            optimizer.step()
        state = optimizer.state_dict()
        return {key: value.clone() for key, value in module.state_dict().items()}, state

    reference = train_with_ddp(whole, 2)
    results = run_ranks(2, go_on)
    for (weights, _), theirs in zip(results, reference, strict=True):
        for key, value in theirs.weights.items():
            assert torch.equal(weights[key], value), key
    state = results[0][1]
    assert_same_state(state, reference[0].optimizer_state)
    plain = whole.make_optimizer(awkward_model())
    plain.load_state_dict(state)
    assert_same_state(plain.state_dict(), state)


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "AdamW"])
@pytest.mark.parametrize("sharded", [True, False])
def test_state_of_fp64_parameters_is_resumed_in_the_dtype_that_ddp_gives(name: str, sharded: bool) -> None:
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


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("sharded", [True, False])
def test_main_params_move_between_numbers_of_ranks(saved_on: int, loaded_on: int, sharded: bool) -> None:
    """Equal to the bit; and where a weight was changed since, the weight wins."""

    def save(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module = two_layers().bfloat16()
        model = DistributedDataParallel(module, SHARDED, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 10).bfloat16()).sum().backward()
            optimizer.step()
        return optimizer.main_params(), {key: value.clone() for key, value in module.state_dict().items()}

    main_params, weights = run_ranks(saved_on, save)[0]
    assert any(not torch.equal(main.bfloat16().float(), main) for main in main_params.values()), "more than 16 bits"
    weights["2.bias"] = torch.full_like(weights["2.bias"], 3.0)

    def load(rank: int, group: ProcessGroup) -> dict[str, Tensor]:
        module = two_layers().bfloat16()
        module.load_state_dict(weights)
        config = DistributedDataParallelConfig(bucket_size=1, use_distributed_optimizer=sharded)
        model = DistributedDataParallel(module, config, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        optimizer.load_main_params(main_params)
        model(torch.ones(2, 10).bfloat16()).sum().backward()
        optimizer.step()
        assert bool((module[2].bias == 3).all())
        return optimizer.main_params()

    loaded = run_ranks(loaded_on, load)[0]
    for name, main in main_params.items():
        assert torch.equal(loaded[name], main if name != "2.bias" else torch.full_like(main, 3.0)), name


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


def test_parameters_join_by_add_param_group() -> None:
    """The layout knows all trainable parameters, so an optimizer may start with some and get the rest later."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, SHARDED, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module[2].parameters(), lr=0.1), model)
        before = module[0].weight.detach().clone()
        for joined in (False, True):
            if joined:
                optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 0.2})
            model.zero_grad()
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            assert torch.equal(before, module[0].weight) == (not joined)

    run_ranks(2, run)


def test_a_group_added_later_is_tried_as_those_at_the_start() -> None:
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


def test_clipping_by_value() -> None:
    def run(rank: int, group: ProcessGroup, sharded: bool) -> list[Tensor]:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        model(torch.full((2, 10), 1.0 + rank)).square().sum().backward()
        optimizer.clip_grad_value_(0.5)
        before = [param.detach().clone() for param in module.parameters()]
        optimizer.step()
        steps = [(a - b).abs().max() for a, b in zip(before, module.parameters(), strict=True)]
        assert max(step.item() for step in steps) == pytest.approx(0.5, abs=1e-6)
        return [param.detach().clone() for param in module.parameters()]

    for a, b in zip(*(run_ranks(2, lambda r, g, s=s: run(r, g, s))[0] for s in (True, False)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("sharded", [True, False])
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


def test_closures_and_steps_without_gradients() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, SHARDED, group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        before = [param.detach().clone() for param in module.parameters()]
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)), "no gradient, no decay"

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(2, 10)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == pytest.approx(module_sum(before))
        assert not torch.equal(before[0], module[0].weight)

    def module_sum(weights: list[Tensor]) -> float:
        w0, b0, w2, b2 = weights
        return float((torch.tanh(torch.ones(2, 10) @ w0.T + b0) @ w2.T + b2).sum())

    run_ranks(2, run)


def test_local_gradients_are_reduced_at_the_step() -> None:
    """Every backward under no_sync, then a step: the shards must hold all ranks' gradients, whatever was forgotten."""

    def run(rank: int, group: ProcessGroup, forgotten: bool) -> Tensor:
        module = two_layers()
        model = DistributedDataParallel(module, SHARDED, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with model.no_sync():
            model(torch.ones(2, 10) * (rank + 1)).square().sum().backward()
        if not forgotten:
            model.engine.finish_grad_sync()
        optimizer.step()
        return module[0].weight.detach().clone()

    forgotten, reduced = (run_ranks(2, lambda r, g, f=f: run(r, g, f)) for f in (True, False))
    assert torch.equal(forgotten[0], forgotten[1])
    assert torch.equal(forgotten[0], reduced[0])


@pytest.mark.parametrize("options", [{}, {"grad_buffer": "pooled"}, {"grad_wire_dtype": "bf16"}], ids=str)
def test_a_clip_by_a_norm_that_is_not_finite_leaves_nothing_for_later_norms(options: dict[str, Any]) -> None:
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
