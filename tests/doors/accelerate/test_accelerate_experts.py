"""``MegatronDDPPlugin(expert_parallel_size=2)``, and ``ParallelismConfig(cp_size=2)`` on CPUs: a loop trains, saves and
resumes as one process that has all experts, and the whole of each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader

from megastrategy.accelerate import MegatronDDPPlugin
from megastrategy.accelerate.tensor_parallel import check_parallelism
from megastrategy.core import OpenDirectory
from tests.core.sync import test_loss_tokens_of_model_ranks as sequences
from tests.doors.lightning.test_lightning_context_parallel import IGNORED, SAMPLES, dataset, sgd
from tests.doors.lightning.test_lightning_experts import BATCH_SIZE, RANKS, assert_close
from tests.doors.lightning.test_lightning_experts import loader as make_loader
from tests.doors.lightning.test_lightning_tensor_parallel import num_chunks
from tests.support.comparison import message
from tests.support.experts import Model
from tests.support.tensor_parallel import LanguageModel, plan, whole

from ..accelerate_loops import Worlds, make_accelerator


def loader(size: int) -> DataLoader[Any]:
    """accelerate gives the ranks whole batches in turn, as one process has them."""
    return DataLoader(make_loader(RANKS).dataset, batch_size=BATCH_SIZE)


def make_model(accelerator: Any) -> Model:
    torch.manual_seed(5)
    module = Model(5)
    if (mesh := getattr(accelerator, "expert_mesh", None)) is not None:
        module.divide(mesh["expert_parallel"])
    return module


def train(
    plugin: dict[str, Any] | None, size: int, path: Path, resume: Path | None = None, clips: str = "norm"
) -> tuple[list[float], dict[str, Tensor]]:
    """An epoch with accumulation and clipping, then the state. ``plugin``: None for accelerate's own."""
    options = {"gradient_accumulation_steps": RANKS // size}
    accelerator = make_accelerator("ddp" if plugin is None else "megatron_ddp", plugin, **options)
    module = make_model(accelerator)
    if accelerator.process_index > 0:
        with torch.no_grad():
            module.head.weight.zero_()  # rank 0's arrive
    model, optimizer, data = accelerator.prepare(module, sgd(module), loader(size))
    if resume is not None:
        accelerator.load_state(resume)
    norms = []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(module.loss(*batch, model))
            if accelerator.sync_gradients and clips == "norm":
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(path)
    return norms, {name: whole(param) for name, param in module.named_parameters()}


EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
ALL_REDUCE = {"use_distributed_optimizer": False}
SHARDED = {"state_dict_type": "sharded"}


def state_of(path: Path) -> Any:
    return torch.load(path / "optimizer.bin", weights_only=True)["state"]


def test_divided_experts_train_save_and_resume_as_one_process_does(worlds: Worlds, tmp_path: Path) -> None:
    [(norms, expected)] = worlds.run(train, None, 1, tmp_path / "alone", size=1)
    [(_, later)] = worlds.run(train, None, 1, tmp_path / "alone 2", tmp_path / "alone", size=1)

    def run(name: str, plugin: dict[str, Any], resume: str | None = None) -> None:
        source = None if resume is None else tmp_path / resume
        for own_norms, weights in worlds.run(train, plugin, RANKS, tmp_path / name, source, size=RANKS):
            assert_close(weights, expected if resume is None else later)
            assert resume is not None or own_norms == pytest.approx(norms, rel=1e-5)

    run("ep2", EP2)
    run("ep4+", EP4 | SHARDED)
    run("all-reduce", EP2 | ALL_REDUCE)
    for name in ("ep2", "all-reduce"):
        assert_close(state_of(tmp_path / name), state_of(tmp_path / "alone"))
    directory = tmp_path / "ep4+" / "megatron_ddp"
    assert num_chunks(directory, "model.layers.0.up") == 4, "each rank writes its part"
    assert_close({name: OpenDirectory(directory).read("model")[name] for name in expected}, expected)
    # each goes on from another's
    run("a", EP4, "ep2")
    run("b", EP2, "ep4+")
    run("c", {}, "ep4+")
    run("d", EP4, "alone")
    run("e", EP2 | ALL_REDUCE, "ep2")
    [(_, weights)] = worlds.run(train, None, 1, tmp_path / "f", tmp_path / "ep2", size=1)
    assert_close(weights, later)


@pytest.mark.parametrize("plugin", [EP2, EP2 | ALL_REDUCE], ids=["shards", "all-reduce"])
def test_values_are_clipped(worlds: Worlds, tmp_path: Path, plugin: dict[str, Any]) -> None:
    [(_, expected)] = worlds.run(train, None, 1, tmp_path / "alone", clips="value", size=1)
    for _, weights in worlds.run(train, plugin, RANKS, tmp_path / "ep2", clips="value", size=RANKS):
        assert_close(weights, expected)


def save_on_main(plugin: dict[str, Any], path: Path, then: str) -> str:
    accelerator = make_accelerator("megatron_ddp", plugin)
    module = make_model(accelerator)
    model, optimizer, data = accelerator.prepare(module, sgd(module), loader(RANKS))
    batch = next(iter(data))

    def step() -> None:
        accelerator.backward(module.loss(*batch, model))
        optimizer.step()
        optimizer.zero_grad()

    step()
    text = message(RuntimeError, lambda: accelerator.save_state(path)) if accelerator.is_main_process else ""
    accelerator.wait_for_everyone() if then == "barrier" else step()
    return text


@pytest.mark.sample(1)
@pytest.mark.parametrize("then", ["barrier", "next step"])
@pytest.mark.parametrize("plugin", [EP2, EP2 | ALL_REDUCE], ids=["shards", "all-reduce"])
def test_the_main_process_that_saves_without_the_others_is_told_what_to_change(
    worlds: Worlds, tmp_path: Path, plugin: dict[str, Any], then: str
) -> None:
    """Also where nothing is sharded: other ranks have the other experts."""
    text, *others = worlds.run(save_on_main, plugin, tmp_path / "saved", then, size=RANKS)
    assert "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`" in text
    assert others == [""] * (RANKS - 1)


def refusals() -> dict[str, str]:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    def on(plugin: dict[str, Any], **sizes: int) -> Any:
        AcceleratorState._shared_state.clear()
        config = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
        return make_accelerator("megatron_ddp", plugin, **config)

    return {
        "whole": message(ValueError, lambda: on(EP2).prepare(Model(5))),
        "three": message(ValueError, lambda: on({"expert_parallel_size": 3})),
        "tensor": message(ValueError, lambda: on(EP2, tp_size=2, dp_shard_size=2)),
    }


def test_what_does_not_go_together_is_refused_by_name(worlds: Worlds) -> None:
    for found in worlds.run(refusals, size=RANKS):
        assert 'accelerator.expert_mesh["expert_parallel"], [Shard(0)]' in found["whole"]
        assert found["three"] == (
            "expert_parallel_size=3 does not divide the 4 ranks: choose the number of processes so that it does"
        )
        assert "expert_parallel_size=2) and ParallelismConfig(tp_size=2) are not supported" in found["tensor"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size=0: expected a number of ranks"),
        ({"expert_parallel_size": True}, "expert_parallel_size=True: expected a number of ranks"),
        (EP2 | {"find_unused_parameters": False}, "Leave both out with expert_parallel_size"),
    ],
)
def test_a_plugin_refuses_what_cannot_be(options: dict[str, Any], said: str) -> None:
    assert said in message(ValueError, lambda: MegatronDDPPlugin(**options))


# --- parts of sequences ----------------------------------------------------------------------------------------------


def train_on_parts(cp: int, plugin: dict[str, Any]) -> dict[str, Tensor]:
    from accelerate.parallelism_config import ParallelismConfig

    config = ParallelismConfig(cp_size=cp, dp_shard_size=RANKS // cp)
    accelerator = make_accelerator("megatron_ddp", plugin, parallelism_config=config)
    mesh = accelerator.torch_device_mesh["cp"]
    module = sequences.Attention()
    model, optimizer, data = accelerator.prepare(module, sgd(module), DataLoader(dataset()))
    for batch in data:
        with accelerator.accumulate(model):
            ids, labels = (both[0].chunk(cp)[mesh.get_local_rank()] for both in batch)
            logits = model(ids, lambda part: sequences._Gathered.apply(part, mesh.get_group()))
            loss, num_tokens = sequences.mean_loss(logits, labels)
            accelerator.loss_tokens(num_tokens)  # of its part
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(param) for name, param in module.named_parameters()}


def test_parts_of_sequences_are_refused_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate itself has them only with FSDP2."""
    from accelerate.parallelism_config import ParallelismConfig

    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    said = message(ValueError, lambda: check_parallelism({"parallelism_config": ParallelismConfig(cp_size=2)}))
    assert said.startswith("ParallelismConfig(cp_size=2) asks for context parallelism, which accelerate has on")
    check_parallelism({"parallelism_config": ParallelismConfig(cp_size=2), "cpu": True})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("cp", "plugin"), [(2, {}), (4, ALL_REDUCE)])
def test_parts_of_a_sequence_train_as_one_process_does(worlds: Worlds, cp: int, plugin: dict[str, Any]) -> None:
    module, data, dp = sequences.Attention(), dataset(), RANKS // cp
    optimizer = sgd(module)
    for first in range(0, SAMPLES, dp):
        optimizer.zero_grad()
        step = [data[number] for number in range(first, first + dp)]
        total = sum(int((labels != IGNORED).sum()) for _, labels in step)
        for ids, labels in step:
            each = functional.cross_entropy(module(ids), labels, ignore_index=IGNORED, reduction="sum")
            (each / total).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    expected = {name: param.detach() for name, param in module.named_parameters()}
    for weights in worlds.run(train_on_parts, cp, plugin, size=RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)


def train_beside_tensor_ranks(cp: int) -> dict[str, Tensor]:
    """``cp``: 1 for one process with torch alone."""
    from accelerate.parallelism_config import ParallelismConfig

    torch.manual_seed(3)
    module = LanguageModel(64, tied=False, width=16)
    optimizer: Any = sgd(module)
    if cp > 1:
        sizes = ParallelismConfig(cp_size=cp, tp_size=2)
        accelerator = make_accelerator("megatron_ddp", parallelism_config=sizes)
        mesh = accelerator.torch_device_mesh
        parallelize_module(module, mesh["tp"], plan(sequence_parallel=False))
        model, optimizer = accelerator.prepare(module, sgd(module))
    for step in range(3):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        targets = tokens.roll(-1, 1)
        if cp > 1:
            tokens, targets = (both.chunk(cp, 1)[mesh.get_local_rank("cp")] for both in (tokens, targets))
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        else:
            functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(param) for name, param in module.named_parameters()}


def test_parts_of_sequences_and_of_layers_train_as_one_process_does(worlds: Worlds) -> None:
    expected = train_beside_tensor_ranks(1)
    for weights in worlds.run(train_beside_tensor_ranks, 2, size=RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
