"""``save_state`` and ``load_state``: the files of torch DDP, from which training goes on under either, on other numbers
of ranks, as directories, and where the main process saves without the others."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megastrategy.accelerate.checkpoint import DIRECTORY, MAIN_PARAMS_FILE
from tests.support.comparison import assert_equal

from ..accelerate_loops import (
    Run,
    Worlds,
    adamw,
    groups,
    make_accelerator,
    sgd,
    state_of,
    weights_of,
)
from ..fits import AwkwardNet, loader
from ..matrix import ALL_REDUCE, MODES, REDUCE_SCATTER

SAVED_AFTER = 4  # of 7 batches, two a step: what is accumulated in mid-window is in no checkpoint


@dataclasses.dataclass
class Counter:
    """A custom object for ``register_for_checkpointing``."""

    batches: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def train_from(
    name: str,
    plugin: dict[str, Any] | None = None,
    *,
    make_optimizer: Any = adamw,
    load: Path | None = None,
    save: Path | None = None,
    save_end: Path | None = None,
    trains: bool = True,
    dtype: torch.dtype = torch.float32,
    safe: bool = True,
    **options: Any,
) -> Run:
    """An epoch, saved in the middle, or loaded and finished from there; ``losses`` are of what was trained."""
    from torch.nn import functional as F

    accelerator = make_accelerator(name, plugin, gradient_accumulation_steps=2, **options)
    net = AwkwardNet(None if load is None else 100).to(dtype)
    inner = make_optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
    counter = Counter()
    model, optimizer, data, scheduler = accelerator.prepare(net, inner, loader(), scheduler)
    accelerator.register_for_checkpointing(counter)
    if load is not None:
        accelerator.load_state(str(load))
        assert counter.batches == accelerator.step == SAVED_AFTER
        if trains:
            data = accelerator.skip_first_batches(data, counter.batches)
    run = Run({})
    for number, (features, tokens, targets) in enumerate(data if trains else (), counter.batches):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(features.to(dtype), tokens, number % 2 == 1).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        run.rates.append(optimizer.param_groups[0]["lr"])
        counter.batches += 1
        if save is not None and number + 1 == SAVED_AFTER:
            accelerator.save_state(str(save), safe_serialization=safe)
            if name == "ddp":  # which returns before the main process has written
                accelerator.wait_for_everyone()
    if save_end is not None:
        accelerator.save_state(str(save_end), safe_serialization=safe)
    run.weights, run.state = weights_of(net), state_of(accelerator, optimizer)
    return run


def assert_resumed(run: Run, resumed: Run) -> None:
    """The one that resumed went on as the one that never stopped, which ends on the main process's module buffers."""
    tail = dataclasses.replace(run, losses=run.losses[-len(resumed.losses) :], rates=run.rates[-len(resumed.rates) :])
    assert_equal(resumed, tail)


def read(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's files, except random state. Also a test: plain types only."""
    files: dict[str, Any] = {}
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            files[file.name] = dict(sorted(load_file(file).items()))
        elif file.suffix == ".bin":
            files[file.name] = torch.load(file, weights_only=True)
    for name, value in files.items():
        if name.startswith("optimizer"):
            files[name] = {**value, "state": dict(sorted(value["state"].items()))}
    return files


@pytest.mark.parametrize(
    ("mode", "make_optimizer", "safe"),
    [
        pytest.param(REDUCE_SCATTER, adamw, True, id="adamw"),
        pytest.param(REDUCE_SCATTER, groups, False, id="groups, pickled"),
        pytest.param(ALL_REDUCE, sgd, False, id="all-reduce, pickled"),
    ],
)
def test_files_are_ddps_and_resume_under_either(
    worlds: Worlds, mode: dict[str, Any], make_optimizer: Any, safe: bool, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    options: dict[str, Any] = {"make_optimizer": make_optimizer, "safe": safe}
    whole = worlds.run(train_from, "megatron_ddp", mode, save=ours, **options)
    assert_equal(whole, worlds.run(train_from, "ddp", save=theirs, **options))
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    assert_equal(read(ours), read(theirs))
    for name, path in [("megatron_ddp", ours), ("megatron_ddp", theirs), ("ddp", ours)]:
        plugin = mode if name == "megatron_ddp" else None
        for run, resumed in zip(whole, worlds.run(train_from, name, plugin, load=path, **options), strict=True):
            assert_resumed(run, resumed)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("full", torch.float32), ("full", torch.bfloat16), ("sharded", torch.bfloat16)]
)
def test_state_moves_to_other_numbers_of_ranks(worlds: Worlds, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """2 -> 1 -> 3 -> 2: what is loaded and saved again is what was saved, and the last goes on as the first did."""
    plugin = {"state_dict_type": kind}
    options: dict[str, Any] = {"dtype": dtype, "trains": False}
    folders = [tmp_path / name for name in ("two", "one", "three")]
    whole = worlds.run(train_from, "megatron_ddp", plugin, dtype=dtype, save=folders[0])
    for size, source, target in [(1, folders[0], folders[1]), (3, folders[1], folders[2])]:
        runs = worlds.run(train_from, "megatron_ddp", plugin, load=source, save_end=target, size=size, **options)
        for run in runs:
            assert_equal(run.weights, runs[0].weights)
    resumed = worlds.run(train_from, "megatron_ddp", plugin, dtype=dtype, load=folders[2])
    assert_equal(
        [run.losses for run in resumed],
        [run.losses[SAVED_AFTER:] for run in whole],
    )
    # of the files of an uninterrupted run every one is there, with the same content, however often it was rewritten
    if kind == "full":
        assert_equal(read(folders[1]), read(folders[0]))
        assert_equal(read(folders[2]), read(folders[0]))
        assert (MAIN_PARAMS_FILE in read(folders[0])) == (dtype == torch.bfloat16)
    else:
        names = {path.name for path in folders[0].iterdir()}
        assert DIRECTORY in names
        assert not names & {"model.safetensors", "optimizer.bin"}
    assert_equal([dict(sorted(params_of(run).items())) for run in resumed], [params_of(run) for run in whole])


def params_of(run: Run) -> dict[str, Tensor]:
    """Without BatchNorm's statistics: those of rank 0 are saved, while each rank has its own until the next forward."""
    return {name: value for name, value in sorted(run.weights.items()) if not name.startswith("norm.running")}


def test_directory_resumes_under_any_option(worlds: Worlds, tmp_path: Path) -> None:
    """And resumes to the bit, also without the sharded optimizer."""
    folder = tmp_path / "saved"
    whole = worlds.run(train_from, "megatron_ddp", {"state_dict_type": "sharded"}, save=folder)
    for mode in MODES.values():
        for run, resumed in zip(whole, worlds.run(train_from, "megatron_ddp", mode, load=folder), strict=True):
            assert_resumed(run, resumed)


def save_everything(folder: Path) -> dict[str, Tensor]:
    """Weights by every way that leads out of the Accelerator."""
    accelerator = make_accelerator("megatron_ddp")
    net = AwkwardNet()
    model, _ = accelerator.prepare(net, adamw(net.parameters()))
    accelerator.save_model(model, str(folder / "whole"))
    accelerator.save_model(model, str(folder / "parts"), max_shard_size="1KB")
    accelerator.save_model(model, str(folder / "pickled"), safe_serialization=False)
    accelerator.save(accelerator.get_state_dict(model), folder / "state_dict.bin")
    accelerator.save(accelerator.unwrap_model(model).scale.detach(), folder / "one.bin")
    accelerator.wait_for_everyone()
    return weights_of(net)


def test_saved_weights_are_whole_and_small(worlds: Worlds, tmp_path: Path) -> None:
    """Parameters are in one flat buffer: safetensors would keep one of them, and torch.save the buffer."""
    expected, _ = worlds.run(save_everything, tmp_path)
    tied = {"embed.weight", "head.weight"}
    for folder in ("whole", "parts"):
        files = sorted((tmp_path / folder).glob("*.safetensors"))
        assert (len(files) > 1) == (folder == "parts")
        saved = {name: value for file in files for name, value in load_file(file).items()}
        assert set(expected) - set(saved) <= tied
        assert tied & set(saved)
        assert_equal(dict(sorted(saved.items())), {name: expected[name] for name in sorted(saved)})
    for file in (tmp_path / "pickled" / "pytorch_model.bin", tmp_path / "state_dict.bin"):
        saved = torch.load(file, weights_only=True)
        assert_equal(dict(sorted(saved.items())), dict(sorted({name: expected[name] for name in saved}.items())))
        assert set(expected) - set(saved) <= tied
    assert (tmp_path / "one.bin").stat().st_size < 3000, "a scalar, and not the buffer that it lies in"


def save_with_hooks(folder: Path, plugin: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """As diffusers does: a hook saves the weights in its own way, and takes them from what accelerate would save."""
    accelerator = make_accelerator("megatron_ddp", plugin)
    nets = [AwkwardNet(1), AwkwardNet(2)]
    models = [accelerator.prepare(net) for net in nets]
    seen: list[str] = []
    names: list[list[str]] = []

    def on_save(models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        seen.extend(type(model).__name__ for model in models)
        names.extend(sorted(state) for state in weights)
        if accelerator.is_main_process:
            torch.save(weights[0], Path(output_dir) / "first.pt")
        weights.pop(0)

    def on_load(models: list[nn.Module], input_dir: str) -> None:
        models.pop(0).load_state_dict(torch.load(Path(input_dir) / "first.pt", weights_only=True))

    handles = accelerator.register_save_state_pre_hook(on_save), accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    before = [weights_of(net) for net in nets]
    for net in nets:
        for param in net.parameters():
            param.data.zero_()
    accelerator.load_state(str(folder))
    for net, state in zip(nets, before, strict=True):
        assert_equal(weights_of(net), state)
    assert len(models) == len(accelerator._models)
    for handle in handles:
        handle.remove()
    return seen, names


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_hooks_see_users_modules(worlds: Worlds, kind: str, tmp_path: Path) -> None:
    for seen, names in worlds.run(save_with_hooks, tmp_path / "saved", {"state_dict_type": kind}):
        assert seen == ["AwkwardNet", "AwkwardNet"]
        assert all("inputs.weight" in keys for keys in names)


def save_twice(project: Path) -> list[str]:
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = make_accelerator("megatron_ddp", {"state_dict_type": "sharded"}, project_config=configuration)
    net = AwkwardNet()
    accelerator.prepare(net, adamw(net.parameters()))
    for number in range(11):
        net.scale.data.fill_(float(number))
        accelerator.save_state()
    accelerator.load_state()
    assert net.scale.item() == 10.0, "the last, and not the last by name"
    return sorted(path.name for path in (project / "checkpoints").iterdir())


def test_accelerate_names_checkpoints(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(save_twice, tmp_path) == [["checkpoint_10", "checkpoint_9"]] * 2


def be_on_nodes_of(size: int) -> int:
    """Lets accelerate take the processes for those of nodes with ``size`` each; returns the number of this one's."""
    from accelerate.state import AcceleratorState, PartialState

    node, place = divmod(PartialState().process_index, size)
    for kind in (PartialState, AcceleratorState):
        if kind._shared_state:
            kind._shared_state["local_process_index"] = place
    return node


def save_on_each_node(folder: Path) -> dict[str, Any]:
    """Each rank a node of its own, with a disk of its own."""
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(save_on_each_node=True)
    accelerator = make_accelerator("megatron_ddp", project_config=configuration)
    be_on_nodes_of(1)
    net = AwkwardNet().bfloat16()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    model(torch.ones(4, 5).bfloat16(), torch.arange(4)).float().square().mean().backward()
    optimizer.step()
    disk = folder / os.environ["RANK"]
    accelerator.save_state(str(disk))
    return read(disk)


def test_each_node_gets_whole_optimizer(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(save_on_each_node, tmp_path)
    assert len(first["optimizer.bin"]["state"]) > 5
    for name in ("optimizer.bin", MAIN_PARAMS_FILE):
        assert_equal(second[name], first[name])


# --- the main process saves, as most scripts do it: `if accelerator.is_main_process: accelerator.save_state(...)` -----


def save_on_main(folder: Path) -> list[float]:
    """Saves without the other rank after each step, at the end with it; returns the losses."""
    accelerator = make_accelerator("megatron_ddp", {"use_distributed_optimizer": False})
    net = AwkwardNet().bfloat16()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    losses = []
    for number in range(3):
        loss = model(torch.ones(4, 5).bfloat16(), torch.arange(4)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.is_main_process:
            accelerator.save_state(str(folder / f"{number}"))
    accelerator.save_state(str(folder / "all"))
    return losses


def test_main_process_saves_whole_state(worlds: Worlds, tmp_path: Path) -> None:
    """With ``use_distributed_optimizer=False``, bf16 weights' fp32 main params too: what all ranks save."""
    first, second = worlds.run(save_on_main, tmp_path)
    assert first == second
    one, all_ranks = (tmp_path / name for name in ("2", "all"))
    names = {path.name for path in one.iterdir()}
    assert "megatron_ddp_main_params.bin" in names
    assert {path.name for path in all_ranks.iterdir()} - names == {"random_states_1.pkl"}
    for name in ("optimizer.bin", "megatron_ddp_main_params.bin"):
        assert_equal(*(torch.load(folder / name) for folder in (one, all_ranks)))
    assert (one / "model.safetensors").read_bytes() == (all_ranks / "model.safetensors").read_bytes()


def save_where_it_cannot(folder: Path, plugin: dict[str, Any], then: str) -> tuple[str, float]:
    """The message, and after how long it came."""
    accelerator = make_accelerator("megatron_ddp", plugin)
    net = AwkwardNet()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))

    def train() -> None:
        accelerator.backward(model(torch.ones(4, 5), torch.arange(4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    train()
    message, start = "", time.monotonic()
    if accelerator.is_main_process:
        with pytest.raises(RuntimeError) as caught:
            accelerator.save_state(str(folder))
        message = f"{type(caught.value).__name__}: {caught.value}"
    seconds = time.monotonic() - start
    if then == "barrier":
        accelerator.wait_for_everyone()
    train()  # all ranks are in step
    return message, seconds


@pytest.mark.parametrize(
    ("plugin", "then", "why"),
    [
        pytest.param({}, "barrier", "in accelerator.wait_for_everyone()", id="barrier"),
        pytest.param({"state_dict_type": "sharded"}, "next", "rank 1 is elsewhere, waiting in ", id="next step"),
    ],
)
def test_main_process_cannot_save_shards(
    worlds: Worlds, tmp_path: Path, plugin: dict[str, Any], then: str, why: str
) -> None:
    (message, seconds), _ = worlds.run(save_where_it_cannot, tmp_path / "saved", plugin, then)
    assert message.startswith("NotOnAllRanksError: ")
    assert why in message
    assert "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`" in message
    assert "`use_distributed_optimizer: false`" in message
    assert seconds < 30, "not the patience of a minute"
