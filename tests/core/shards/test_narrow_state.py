"""``optimizer_state_dtype`` and ``store_param_remainders``: fewer bytes between steps, fp32 in a step and in files.

Also with ``offload_optimizer_states``; test_offload.py has its own tests.

What they do to a training, to the bit, is in test_every_pair_of_switches.py and in the fuzzing; the bytes between steps
in test_memory.py.
"""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, to_host
from megastrategy.core.errors import OptimizerNotShardableError
from megastrategy.core.shards import state_storage
from tests.support.directories import saving_among_threads
from tests.support.given import Given, Ours, adam, assert_same_file, momentum, plain_momentum, trained
from tests.support.narrow_reference import round_states
from tests.support.notes import Notes
from tests.support.optimizers import Buffered, CountsCalls
from tests.support.ranks import run_ranks

STATE = {"optimizer_state_dtype": "bf16"}
ON_HOST = {"offload_optimizer_states": True}
BITS = {"store_param_remainders": True}
BOTH = {**STATE, **BITS}


KINDS = [adam, momentum]


def alone(make: Any, steps: range) -> tuple[list[Tensor], dict[str, Any]]:
    """Without ranks: fp32 weights, and the state as it is rounded after each step."""
    module = Given(torch.float32)
    optimizer, names = make(module.parameters()), {id(param): name for name, param in module.named_parameters()}
    for step in steps:
        optimizer.zero_grad()
        module(step).backward()
        optimizer.step()
        round_states(optimizer, names)
    return [param.detach() for param in module.parameters()], optimizer.state_dict()


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_ranks_and_buckets_gives_the_same_bits(dtype: torch.dtype, make: Any) -> None:
    """The bits equal one process that rounds the state of whole parameters; also after resuming on other ranks."""
    weights, state = alone(adam if make is adam else plain_momentum, range(6))
    for size, other, options in (
        (2, 3, {}),
        (3, 2, {"bucket_size": 10**6}),
        (4, 2, {"overlap_param_gather": False, **ON_HOST}),
    ):
        half = trained(size, make, dtype, range(3), **BOTH, **options)
        whole = trained(other, make, dtype, range(3, 6), half, **BOTH)
        uncut = trained(size, make, dtype, range(6), **BOTH, **options)
        assert_same_file(whole, uncut)
        assert_same_file(whole["optimizer"]["state"], state["state"])
        held = list(whole["main"].values() if dtype == torch.bfloat16 else whole["model"].values())
        assert all(map(torch.equal, held, weights))
        assert all(torch.equal(value, w.to(dtype)) for value, w in zip(whole["model"].values(), weights, strict=True))


@pytest.mark.parametrize("order", [("model", "optimizer", "main"), ("main", "optimizer", "model")])
def test_a_run_goes_on_to_the_bit_in_whatever_order_a_file_is_loaded(order: tuple[str, ...]) -> None:
    """Into a run that has trained something else before."""

    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, adam, torch.bfloat16, **BOTH)
        ours.train(range(3))
        file = ours.file()
        ours.train(range(3, 6))
        uncut = ours.file()
        ours.train(range(100, 103))
        ours.load(file, order)
        ours.train(range(3, 6))
        assert_same_file(ours.file(), uncut)
        ours.model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_those_of_a_run_without(dtype: torch.dtype) -> None:
    """Main params are the same to the bit. Rounded state has the same keys, shapes and dtypes, and resumes under the
    other options, and in torch's own optimizer, from exactly the saved numbers."""
    plain = trained(2, adam, dtype, range(4))
    assert_same_file(trained(2, adam, dtype, range(4), **BITS), plain)
    assert_same_file(trained(2, adam, dtype, range(4), **ON_HOST), plain)
    narrow = trained(2, adam, dtype, range(4), **BOTH)
    assert_same_file(trained(2, adam, dtype, range(4), **BOTH, **ON_HOST), narrow)
    for index, values in plain["optimizer"]["state"].items():
        own = narrow["optimizer"]["state"][index]
        assert {key: (v.dtype, v.shape) for key, v in values.items()} == {
            key: (v.dtype, v.shape) for key, v in own.items()
        }
        assert not torch.equal(own["exp_avg_sq"], values["exp_avg_sq"]) or own["exp_avg_sq"].numel() == 1
        assert torch.equal(own["exp_avg_sq"], own["exp_avg_sq"].bfloat16().float())
    assert_same_file(trained(2, adam, dtype, range(0), narrow), narrow)
    assert_same_file(trained(3, adam, dtype, range(0), narrow, **BOTH), narrow)
    nearest = copy.deepcopy(plain)
    for values in nearest["optimizer"]["state"].values():
        values.update({key: v.bfloat16().float() for key, v in values.items() if key != "step"})
    assert_same_file(trained(2, adam, dtype, range(0), plain, **BOTH), nearest)
    module = Given(torch.float32)
    optimizer = adam(module.parameters())
    optimizer.load_state_dict(narrow["optimizer"])
    assert_same_file(optimizer.state_dict()["state"], narrow["optimizer"]["state"])


def test_torchs_own_optimizer_steps_with_a_count_that_it_does_not_keep() -> None:
    file = trained(2, momentum, torch.float32, range(3), **STATE)["optimizer"]
    assert {values["rounding_step"] for values in file["state"].values()} == {3}
    module = Given(torch.float32)
    optimizer = plain_momentum(module.parameters())
    optimizer.load_state_dict(file)
    module(3).backward()
    before = module.weights[0].detach().clone()
    optimizer.step()
    assert not torch.equal(module.weights[0], before)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "later"),
    [(BOTH, BOTH), (BOTH, {}), ({}, BOTH), (STATE, BITS), (BITS, ON_HOST), ({**BOTH, **ON_HOST}, STATE)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directories_go_on_on_other_ranks_with_other_options(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any], later: dict[str, Any]
) -> None:
    """A directory has the state as it is kept, in half of the bytes; main params are fp32 in it."""

    def write(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, adam, dtype, **options)
        ours.train(range(3))
        state = {"model": dict(ours.module.state_dict()), "optimizer": ours.optimizer.sharded_state_dict()}
        save_directory(to_host(state), {}, tmp_path / "saved", ours.collectives)
        file = ours.file()
        ours.model.close()
        return file

    def read(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, adam, dtype, **later)
        ours.train(range(50, 51))
        ours.module.load_state_dict(OpenDirectory(tmp_path / "saved").read("model"))
        ours.optimizer.load_sharded(tmp_path / "saved")
        kept = {
            value.dtype
            for values in ours.optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor) and value.dim() > 0
        }
        assert kept <= {torch.bfloat16 if "optimizer_state_dtype" in later else torch.float32}
        file = ours.file()
        ours.train(range(3, 4))
        ours.model.close()
        return file

    with saving_among_threads():
        file = run_ranks(2, write)[0]
        again = run_ranks(3, read)[0]
    if "optimizer_state_dtype" in later:
        for values in file["optimizer"]["state"].values():
            values.update({key: v.bfloat16().float() for key, v in values.items() if key != "step"})
    assert_same_file(again, file)


def test_in_a_step_few_elements_have_fp32_at_once() -> None:
    """With or without gathers under the step; in pieces that end inside of parameters."""

    def run(rank: int, group: ProcessGroup) -> None:
        seen = Notes()

        class Watching(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                tensors = [tensor for group in self.param_groups for tensor in group["params"]]
                kept = [v for tensor in tensors for v in self.state.get(tensor, {}).values() if v.dim() > 0]
                seen.append((sum(t.numel() for t in tensors), {v.dtype for v in (*tensors, *kept)}))
                return super().step(closure)

        for overlap in ("step", False):
            options = {"bucket_size": 10**6, "overlap_param_gather": overlap, **BOTH}
            ours = Ours(group, Watching, torch.bfloat16, **options)
            seen.clear()  # trial steps
            ours.train(range(3))
            assert max(numel for numel, _ in seen) <= 64
            assert len(seen) >= 3 * 4
            assert all(dtypes == {torch.float32} for _, dtypes in seen)
            ours.model.close()

    with mock.patch.multiple(state_storage, _AT_ONCE_NUMEL=64, CACHE_BLOCK_NUMEL=48):
        run_ranks(2, run)


@pytest.mark.parametrize(("at_once", "chunk"), [(64, 48), pytest.param(1, 1, marks=pytest.mark.long), (100, 100)])
def test_pieces_change_no_bit(at_once: int, chunk: int) -> None:
    plain = trained(2, adam, torch.bfloat16, range(4), **BOTH)
    with mock.patch.multiple(state_storage, _AT_ONCE_NUMEL=at_once, CACHE_BLOCK_NUMEL=chunk):
        assert_same_file(trained(2, adam, torch.bfloat16, range(4), **BOTH), plain)


def test_hooks_on_the_step_see_one_of_all_parameters() -> None:
    def run(rank: int, group: ProcessGroup) -> Any:
        seen = list[int]()
        ours = Ours(group, adam, torch.bfloat16, **BOTH)
        ours.optimizer.register_step_post_hook(lambda inner, *_: seen.append(len(inner.param_groups[0]["params"])))
        ours.train(range(4))
        assert seen == [4] * 4
        file = ours.file()
        ours.model.close()
        return file

    assert_same_file(run_ranks(2, run)[0], trained(2, adam, torch.bfloat16, range(4), **BOTH))


def test_a_fused_kernel_on_the_host_has_whole_shards() -> None:
    """It rounds the last few elements of a tensor differently."""

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=True)

    plain = trained(2, fused, torch.bfloat16, range(4))
    with mock.patch.multiple(state_storage, _AT_ONCE_NUMEL=64, CACHE_BLOCK_NUMEL=13):
        assert_same_file(trained(2, fused, torch.bfloat16, range(4), **BITS), plain)


def test_an_optimizer_that_counts_its_calls_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        for options in (STATE, BITS, ON_HOST):
            with pytest.raises(OptimizerNotShardableError, match=r"CountsCalls keeps more .* Leave these options out"):
                Ours(group, CountsCalls, torch.bfloat16, **options)

    run_ranks(2, run)


def test_methods_that_work_on_elements_are_refused() -> None:
    """They may put weights into the state, where they would be rounded; on all ranks alike."""

    def run(rank: int, group: ProcessGroup) -> None:
        for options, dtype in ((STATE, torch.float32), (BITS, torch.bfloat16), (ON_HOST, torch.float32)):
            ours = Ours(group, Buffered, dtype, **options)
            ours.train(range(2))
            before = ours.file()
            with pytest.raises(OptimizerNotShardableError, match=r"eval.. of Buffered .* keep them otherwise"):
                ours.optimizer.eval()
            ours.load(before)
            assert_same_file(ours.file()["model"], before["model"])
            ours.model.close()

    run_ranks(2, run)


def test_parameters_that_join_later() -> None:
    """Parameters that were trained elsewhere bring their state, and are then stored like the others."""
    file = trained(2, adam, torch.bfloat16, range(2))

    def run(rank: int, group: ProcessGroup) -> Any:
        module = Given(torch.bfloat16)
        module.weights[1].requires_grad_(False)
        again = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=200, **BOTH), group)
        optimizer = DistributedOptimizer(adam(module.parameters()), again)
        module.load_state_dict(file["model"])
        optimizer.load_state_dict(file["optimizer"])
        optimizer.load_main_params(file["main"])
        module.weights[1].requires_grad_(True)
        for step in range(2, 4):
            optimizer.zero_grad()
            again(step).backward()
            optimizer.step()
        again.finish_param_gather()
        result = optimizer.state_dict(), optimizer.main_params()
        again.close()
        return result

    state, main = run_ranks(2, run)[0]
    uncut = trained(2, adam, torch.bfloat16, range(2, 4), file, **BOTH)
    assert_same_file(dict(state["state"]), uncut["optimizer"]["state"])
    assert all(torch.equal(main[name], value) for name, value in uncut["main"].items())


class Halves(Given):
    """Weights of one, which steps move by multiples of half a unit in their last place. Some main params are half way
    between two weights, and are rounded up or down; others are not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        for weight in self.weights:
            nn.init.ones_(weight)

    def forward(self, step: int) -> Tensor:
        return super().forward(step) * 2.0**-10


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [3, 2, 4])
def test_main_params_half_way_between_two_weights(size: int) -> None:
    """Cases that 16 bits cannot distinguish: weights and main params of fp32 ones, to the bit, in steps, files and
    moves to other ranks; in pieces that end within a byte of the bitmap."""

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    def run_of(ranks: int, steps: range, before: Any = None, **options: Any) -> Any:
        return trained(ranks, sgd, torch.bfloat16, steps, before, kind=Halves, **options)

    plain = [run_of(2, range(steps)) for steps in (1, 2, 4)]
    every = torch.cat([main.flatten() for main in plain[0]["main"].values()])
    lower = every.view(torch.int32).bitwise_and(0xFFFF)
    weights = every.bfloat16().float()
    assert bool(((lower == 2**15) & (weights < every)).any())
    assert bool(((lower == 2**15) & (weights > every)).any())
    with mock.patch.multiple(state_storage, _AT_ONCE_NUMEL=64, CACHE_BLOCK_NUMEL=13):
        for steps, expected in zip((1, 2, 4), plain, strict=True):
            assert_same_file(run_of(size, range(steps), **BITS), expected)
        moved = run_of(5 - size if size < 4 else 2, range(1, 4), run_of(size, range(1), **BITS), **BITS)
    assert_same_file(moved, plain[2])
    assert_same_file(run_of(2, range(1, 4), run_of(size, range(1), **BITS)), plain[2])


def test_weights_that_come_without_main_params_are_taken_as_they_are() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, adam, torch.bfloat16, **BITS)
        ours.train(range(3))
        weights = {name: value.clone() for name, value in ours.module.state_dict().items()}
        main = ours.optimizer.main_params()
        assert rank > 0 or any(not torch.equal(main[name], weights[name].float()) for name in main)
        ours.optimizer.load_main_params({})
        for name, value in ours.optimizer.main_params().items():
            assert torch.equal(value, weights[name].float())
        ours.model.close()

    run_ranks(2, run)


def test_a_step_that_fails_leaves_kept_state() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        luck = {"is out": False}

        class Fails(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                if luck["is out"]:
                    raise RuntimeError("out of luck")
                return result

        ours = Ours(group, Fails, torch.bfloat16, **BOTH)
        ours.train(range(2))
        luck["is out"] = True
        with pytest.raises(RuntimeError, match="out of luck"):
            ours.train(range(2, 3))
        luck["is out"] = False
        tensors = [v for values in ours.optimizer.state.values() for v in values.values() if v.dim() > 0]
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        ours.train(range(3, 5))
        for name, value in ours.optimizer.main_params().items():
            assert torch.equal(value.bfloat16(), ours.module.get_parameter(name))
        ours.model.close()

    run_ranks(2, run)


def test_on_one_rank_nothing_is_narrow() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, adam, torch.float32, **BOTH)
        ours.train(range(2))
        assert {v.dtype for values in ours.optimizer.state.values() for v in values.values()} == {torch.float32}
        ours.model.close()

    run_ranks(1, run)
    assert_same_file(trained(1, adam, torch.bfloat16, range(3), **BOTH), trained(1, adam, torch.bfloat16, range(3)))


def test_nobody_else_imports_it() -> None:
    """At the top level of a module, except for types."""
    own = {"state_storage", "low_bits", "random_rounding"}
    for path in Path(megastrategy.__file__).parent.rglob("*.py"):
        if path.stem in own:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.module.rpartition(".")[2] not in own, path
