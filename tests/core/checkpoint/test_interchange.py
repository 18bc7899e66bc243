"""A state saved by torch DDP, a plain optimizer, reduce-scatter or all-reduce loads in each of these, on every number
of ranks. Bucket sizes differ, and the gathered state equals the saved one, tensor by tensor.

Every writer trains once and every reader reads all files in one run, so the 144 pairs cost 24 runs of rank threads.
``make test`` has four writers, of each engine and of an odd number of ranks, and two readers.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.models import awkward_model, images
from tests.support.optimizers import LambWithMoments, MatricesAndRest
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state

ENGINES = ("ddp", "rs", "ar")
BUCKET_SIZES = (1, 200, 10**9, 500)  # by number of ranks - 1, so that files move between layouts of every kind


@dataclasses.dataclass(frozen=True)
class World:
    """Who writes or reads: torch DDP ("ddp"; on one rank nothing but torch), ours with reduce-scatter ("rs") or with
    all-reduce ("ar")."""

    engine: str
    size: int

    def __str__(self) -> str:
        return f"{self.engine}-{self.size}"


WORLDS = [World(engine, size) for engine, size in itertools.product(ENGINES, (1, 2, 3, 4))]


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    """Three groups with equal hyper-parameters, an empty one, one of its own; parameters not in order, frozen ones
    too."""
    params = list(module.parameters())
    groups = [
        {"params": params[1::2]},
        {"params": params[::4]},
        {"params": []},
        {"params": params[2::4], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Named parameters: the groups have their names."""
    return torch.optim.SGD(module.named_parameters(), lr=0.05, momentum=0.9)


def adagrad(module: nn.Module) -> torch.optim.Optimizer:
    """Has state before the first step, also for parameters that are never used or frozen."""
    return torch.optim.Adagrad(module.parameters(), lr=0.02, initial_accumulator_value=0.1)


def nadam(module: nn.Module) -> torch.optim.Optimizer:
    """Two counters of shape () for each parameter; one is not called ``step``."""
    return torch.optim.NAdam(module.parameters(), lr=0.01)


def lamb(module: nn.Module) -> torch.optim.Optimizer:
    """Steps whole parameters, which sharded have an owner each."""
    return LambWithMoments(module.parameters(), lr=0.02)


def matrices_and_rest(module: nn.Module) -> torch.optim.Optimizer:
    """One group of whole parameters, one of shards."""
    params = list(module.parameters())
    matrices = [param for param in params if param.dim() > 1]
    return MatricesAndRest([{"params": matrices, "by_row": True}, {"params": [p for p in params if p.dim() < 2]}])


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: list[MakeOptimizer] = [amsgrad, momentum, adagrad, nadam, lamb, matrices_and_rest]


class Engine:
    """One rank's model and optimizer in a world, with the same few calls whatever the engine is."""

    def __init__(
        self, world: World, group: ProcessGroup, make_optimizer: MakeOptimizer, module: nn.Module | None = None
    ) -> None:
        self.module = module = awkward_model() if module is None else module
        self.model: Any = module
        self.rank = group.rank()
        if world.engine == "ddp":
            if world.size > 1:
                self.model = TorchDDP(module, process_group=group, find_unused_parameters=True)
            self.optimizer = make_optimizer(module)
        else:
            config = DistributedDataParallelConfig(
                bucket_size=BUCKET_SIZES[world.size - 1], use_distributed_optimizer=world.engine == "rs"
            )
            self.model = DistributedDataParallel(module, config, group)
            self.optimizer = DistributedOptimizer(make_optimizer(module), self.model)

    def train(self, steps: range) -> list[float]:
        losses = []
        dtype = next(self.module.parameters()).dtype
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(images(self.rank, step, 0, dtype), step, self.rank)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def save(self) -> bytes:
        """As a user would, on all ranks; what rank 0 writes is the checkpoint."""
        checkpoint = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if isinstance(self.optimizer, DistributedOptimizer) and (main_params := self.optimizer.main_params()):
            checkpoint["main_params"] = main_params
        file = io.BytesIO()
        torch.save(checkpoint, file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        checkpoint = torch.load(io.BytesIO(file), weights_only=True)
        self.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.load_main_params(checkpoint.get("main_params", {}))


def read(file: bytes) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return checkpoint


@functools.cache
def written_by(
    world: World, make_optimizer: MakeOptimizer, steps: int = 3, dtype: torch.dtype = torch.float32
) -> bytes:
    """Rank 0's file after some steps (by default an even number of uses of the odd branch, so states differ)."""

    def run(rank: int, group: ProcessGroup) -> bytes:
        engine = Engine(world, group, make_optimizer, awkward_model().to(dtype))
        engine.train(range(steps))
        return engine.save()

    return run_ranks(world.size, run)[0]


def assert_same_checkpoint(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Structure, groups, values to the bit, dtypes, shapes and strides; every tensor in memory of its own size."""
    assert actual.keys() == expected.keys()
    for part in ("model", "main_params"):
        assert list(actual.get(part, {})) == list(expected.get(part, {}))
        for name, value in expected.get(part, {}).items():
            assert_same_tensor(actual[part][name], value, f"{part} {name}")
    assert_same_state(actual["optimizer"], expected["optimizer"])
    for index, values in expected["optimizer"]["state"].items():
        for key, value in values.items():
            assert_same_tensor(actual["optimizer"]["state"][index][key], value, f"{key} of parameter {index}")


def assert_same_tensor(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.stride() == expected.stride(), where
        assert torch.equal(actual, expected), where
        assert actual.untyped_storage().nbytes() == actual.nbytes, f"{where}: the file holds more than the tensor"


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for item in items for tensor in tensors_in(item)]


FEW = [World("ddp", 2), World("rs", 2), World("ar", 2), World("rs", 3)]


@pytest.mark.parametrize(
    ("reader", "writers"),
    [
        *(pytest.param(reader, FEW, id=f"{reader}, few") for reader in (World("rs", 3), World("ar", 2))),
        *(pytest.param(reader, WORLDS, id=f"{reader}", marks=pytest.mark.nightly) for reader in WORLDS),
    ],
)
def test_every_reader_gathers_what_every_writer_saved(reader: World, writers: list[World]) -> None:
    """12 writers x 12 readers x 6 optimizers. One engine reads all files, so what it had before must be gone; the
    weights are whole on every rank."""
    files = {(make, writer): written_by(writer, make) for make in OPTIMIZERS for writer in writers}

    def run(rank: int, group: ProcessGroup) -> dict[tuple[MakeOptimizer, World], bytes]:
        engines = {make_optimizer: Engine(reader, group, make_optimizer) for make_optimizer in OPTIMIZERS}
        again = {}
        for (make_optimizer, writer), file in files.items():
            engines[make_optimizer].load(file)
            again[make_optimizer, writer] = engines[make_optimizer].save()
        return again

    by_rank = run_ranks(reader.size, run)
    for key, file in files.items():
        saved = read(file)
        assert_same_checkpoint(read(by_rank[0][key]), saved)
        for rank in range(1, reader.size):
            weights = read(by_rank[rank][key])["model"]
            assert all(torch.equal(weights[name], value) for name, value in saved["model"].items()), (key, rank)


@pytest.mark.parametrize(
    "writer",
    [*FEW, *(pytest.param(writer, marks=pytest.mark.nightly) for writer in WORLDS if writer not in FEW)],
    ids=str,
)
def test_a_plain_torch_script_goes_on_from_every_file(writer: World) -> None:
    """Without us: the next step with one rank's data equals that of ours on one rank, to the bit."""
    for make_optimizer in OPTIMIZERS:
        file = written_by(writer, make_optimizer)
        checkpoint = read(file)
        module = awkward_model()
        module.load_state_dict(checkpoint["model"])
        optimizer = make_optimizer(module)
        optimizer.load_state_dict(checkpoint["optimizer"])
        module(images(0, 3, 0), 3, 0).backward()
        optimizer.step()

        def run(rank: int, group: ProcessGroup, make: MakeOptimizer = make_optimizer, file: bytes = file) -> bytes:
            engine = Engine(World("rs", 1), group, make)
            engine.load(file)
            engine.train(range(3, 4))
            return engine.save()

        expected = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        assert_same_checkpoint(read(run_ranks(1, run)[0]), expected)


@pytest.mark.parametrize(("writer", "reader"), [("ddp", "rs"), ("rs", "ar"), ("ar", "ddp")])
def test_six_steps_are_three_and_three_on_two_ranks(writer: str, reader: str) -> None:
    """To the bit, whichever engine wrote and whichever goes on."""
    files = {make_optimizer: written_by(World(writer, 2), make_optimizer) for make_optimizer in OPTIMIZERS}

    def run(rank: int, group: ProcessGroup) -> dict[MakeOptimizer, tuple[list[float], bytes]]:
        results = {}
        for make_optimizer, file in files.items():
            engine = Engine(World(reader, 2), group, make_optimizer)
            engine.load(file)
            results[make_optimizer] = engine.train(range(3, 6)), engine.save()
        return results

    resumed = run_ranks(2, run)
    for make_optimizer in OPTIMIZERS:
        whole = trained_whole(make_optimizer)
        for rank, (all_losses, whole_end) in enumerate(whole):
            losses, end = resumed[rank][make_optimizer]
            assert losses == all_losses[3:]
            ours, theirs = read(end)["model"], read(whole_end)["model"]
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())
        assert_same_checkpoint(read(resumed[0][make_optimizer][1]), read(whole[0][1]))


@functools.cache
def trained_whole(make_optimizer: MakeOptimizer) -> list[tuple[list[float], bytes]]:
    """Losses and file of each of two ranks after six steps of torch DDP."""

    def run(rank: int, group: ProcessGroup) -> tuple[list[float], bytes]:
        engine = Engine(World("ddp", 2), group, make_optimizer)
        return engine.train(range(6)), engine.save()

    return run_ranks(2, run)


# --- 16-bit weights --------------------------------------------------------------------------------------------------


OURS = [world for world in WORLDS if world.engine != "ddp"]


@pytest.mark.parametrize(
    ("reader", "writers"),
    [
        *(pytest.param(reader, FEW[1:], id=f"{reader}, few") for reader in (World("rs", 3), World("ar", 2))),
        *(pytest.param(reader, OURS, id=f"{reader}", marks=pytest.mark.nightly) for reader in OURS),
    ],
)
def test_main_params_move_between_all_of_ours(reader: World, writers: list[World]) -> None:
    """8 writers x 8 readers: bf16 weights, fp32 main params, fp32 state."""
    files = {writer: written_by(writer, amsgrad, dtype=torch.bfloat16) for writer in writers}

    def run(rank: int, group: ProcessGroup) -> dict[World, bytes]:
        engine = Engine(reader, group, amsgrad, awkward_model().bfloat16())
        again = {}
        for writer, file in files.items():
            engine.load(file)
            again[writer] = engine.save()
        return again

    for writer, file in run_ranks(reader.size, run)[0].items():
        saved = read(files[writer])
        assert all(value.dtype == torch.float32 for value in saved["main_params"].values())
        for name in ("twice.weight", "conv.weight", "scale"):
            main, weight = saved["main_params"][name], saved["model"][name]
            assert torch.equal(main.bfloat16(), weight), "the weight is the rounding of its main param"
        assert not torch.equal(main_of(saved, "twice.weight"), saved["model"]["twice.weight"].float())
        assert_same_checkpoint(read(file), saved)


def main_of(checkpoint: dict[str, Any], name: str) -> Tensor:
    value: Tensor = checkpoint["main_params"][name]
    return value


@pytest.mark.parametrize(("writer", "reader"), [("rs", World("ar", 2)), ("ar", World("rs", 2))], ids=str)
def test_six_bf16_steps_are_three_and_three(writer: str, reader: World) -> None:
    """Main params, state, weights to the bit; without the main params the run would end elsewhere."""
    file = written_by(World(writer, 2), amsgrad, dtype=torch.bfloat16)

    def run(rank: int, group: ProcessGroup) -> tuple[bytes, bytes]:
        ends = []
        for with_main_params in (True, False):
            engine = Engine(reader, group, amsgrad, awkward_model().bfloat16())
            checkpoint = read(file)
            engine.module.load_state_dict(checkpoint["model"])
            engine.optimizer.load_state_dict(checkpoint["optimizer"])
            if with_main_params:
                engine.optimizer.load_main_params(checkpoint["main_params"])
            engine.train(range(3, 6))
            ends.append(engine.save())
        return ends[0], ends[1]

    resumed, without = (read(end) for end in run_ranks(2, run)[0])
    whole = read(written_by(reader, amsgrad, steps=6, dtype=torch.bfloat16))
    assert_same_checkpoint(resumed, whole)
    assert not torch.equal(main_of(without, "twice.weight"), main_of(whole, "twice.weight")), "they carry something"


@pytest.mark.parametrize("reader", [World("rs", 3), World("ar", 2), World("rs", 1)], ids=str)
def test_changed_weights_win_over_main_params(reader: World) -> None:
    """Only at the changed elements. A file edited by hand, averaged, or pruned is what the user wants."""
    checkpoint = read(written_by(World("rs", 2), amsgrad, dtype=torch.bfloat16))
    checkpoint["model"]["twice.weight"][3:5] *= 2
    file = io.BytesIO()
    torch.save(checkpoint, file)

    def run(rank: int, group: ProcessGroup) -> bytes:
        engine = Engine(reader, group, amsgrad, awkward_model().bfloat16())
        engine.load(file.getvalue())
        for param_group in engine.optimizer.param_groups:
            param_group["lr"] = 0.0
        engine.train(range(3, 4))
        return engine.save()

    again = read(run_ranks(reader.size, run)[0])
    assert torch.equal(again["model"]["twice.weight"], checkpoint["model"]["twice.weight"])
    main, saved = main_of(again, "twice.weight"), main_of(checkpoint, "twice.weight")
    assert torch.equal(main[3:5], checkpoint["model"]["twice.weight"][3:5].float())
    assert torch.equal(main[:3], saved[:3])
    assert torch.equal(main[5:], saved[5:])
    for name in checkpoint["main_params"].keys() - {"twice.weight"}:
        assert torch.equal(main_of(again, name), main_of(checkpoint, name)), name


@pytest.mark.parametrize(
    ("writer", "reader"), [(World("ddp", 2), World("rs", 3)), (World("rs", 3), World("ar", 2))], ids=str
)
def test_fp32_weights_become_main_params(writer: World, reader: World) -> None:
    """``load_main_params`` takes them as they are in the file, before the cast."""
    saved = read(written_by(writer, amsgrad))
    names = [name for name, _ in awkward_model().named_parameters()]  # frozen ones too, for when they are not

    def run(rank: int, group: ProcessGroup) -> bytes:
        engine = Engine(reader, group, amsgrad, awkward_model().bfloat16())
        engine.module.load_state_dict(saved["model"])
        engine.optimizer.load_state_dict(saved["optimizer"])
        engine.optimizer.load_main_params(saved["model"])
        return engine.save()

    again = read(run_ranks(reader.size, run)[0])
    assert sorted(again["main_params"]) == sorted(names)
    for name in names:
        assert_same_tensor(main_of(again, name), saved["model"][name], name)
    assert_same_state(again["optimizer"], saved["optimizer"])


# --- awkward sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [World("rs", 2), World("ar", 2)], ids=str)
def test_two_optimizers_have_their_main_params(world: World) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = awkward_model().bfloat16()
        config = DistributedDataParallelConfig(bucket_size=200, use_distributed_optimizer=world.engine == "rs")
        model = DistributedDataParallel(module, config, group)
        params = dict(module.named_parameters())
        halves = [list(params)[::2], list(params)[1::2]]
        optimizers = [
            DistributedOptimizer(torch.optim.SGD([params[name] for name in half], lr=0.1), model) for half in halves
        ]
        found = [optimizer.main_params() for optimizer in optimizers]
        if rank == 0:
            for half, main_params in zip(halves, found, strict=True):
                assert sorted(main_params) == sorted(name for name in half if params[name].requires_grad)
                assert all(torch.equal(value, params[name].float()) for name, value in main_params.items())

    run_ranks(world.size, run)
