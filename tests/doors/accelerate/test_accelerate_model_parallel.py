"""Accelerate with a divided model: experts of ``MegatronDDPPlugin(expert_parallel_size=2)``, and
ParallelismConfig's tensor and context ranks. A loop trains, saves and resumes as one process with the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader

from megastrategy.accelerate.tensor_parallel import check_parallelism
from megastrategy.core import OpenDirectory
from tests.support import experts, sequences
from tests.support.comparison import message
from tests.support.tensor_parallel import LanguageModel, adamw, meshes, plan, whole

from ..accelerate_loops import Worlds, make_accelerator
from ..model_parallel_fits import (
    RANKS,
    assert_close,
    expert_loader,
    num_chunks,
    part_of_loss,
    read,
    sequence_data,
    sgd,
    token_loader,
    train_on_whole_sequences,
)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in module.named_parameters()}


# --- experts ----------------------------------------------------------------------------------------------------------


EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
ALL_REDUCE = {"use_distributed_optimizer": False}
SHARDED = {"state_dict_type": "sharded"}


def make_experts(accelerator: Any) -> experts.Model:
    torch.manual_seed(5)
    module = experts.Model(5)
    if (mesh := getattr(accelerator, "expert_mesh", None)) is not None:
        module.divide(mesh["expert_parallel"])
    return module


def train_experts(
    plugin: dict[str, Any] | None, size: int, path: Path, resume: Path | None = None, clips: str = "norm"
) -> tuple[list[float], dict[str, Tensor]]:
    """An epoch with accumulation and clipping, then the state. ``plugin``: None for accelerate's own."""
    options = {"gradient_accumulation_steps": RANKS // size}
    accelerator = make_accelerator("ddp" if plugin is None else "megatron_ddp", plugin, **options)
    module = make_experts(accelerator)
    if accelerator.process_index > 0:
        with torch.no_grad():
            module.head.weight.zero_()  # rank 0's arrive
    model, optimizer, data = accelerator.prepare(module, sgd(module), expert_loader())
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
    return norms, weights_of(module)


def test_experts_train_save_and_resume(worlds: Worlds, tmp_path: Path) -> None:
    """As one process with all experts does; each goes on from what another division has saved."""
    [(norms, expected)] = worlds.run(train_experts, None, 1, tmp_path / "alone", size=1)
    [(_, later)] = worlds.run(train_experts, None, 1, tmp_path / "alone 2", tmp_path / "alone", size=1)
    for name, plugin in {"ep2": EP2, "ep4+": EP4 | SHARDED, "all-reduce": EP2 | ALL_REDUCE}.items():
        for own_norms, weights in worlds.run(train_experts, plugin, RANKS, tmp_path / name, size=RANKS):
            assert_close(weights, expected)
            assert own_norms == pytest.approx(norms, rel=1e-5)
    for name in ("ep2", "all-reduce"):
        states = (read(tmp_path / path / "optimizer.bin")["state"] for path in (name, "alone"))
        assert_close(*states)
    directory = tmp_path / "ep4+" / "megatron_ddp"
    assert num_chunks(directory, "model.layers.0.up") == 4, "each rank writes its part"
    assert_close({name: OpenDirectory(directory).read("model")[name] for name in expected}, expected)
    for plugin, saved in [(EP2, "ep4+"), (EP4, "alone"), (EP2 | ALL_REDUCE, "ep2")]:
        for _, weights in worlds.run(train_experts, plugin, RANKS, tmp_path / "x", tmp_path / saved, size=RANKS):
            assert_close(weights, later)
    [(_, weights)] = worlds.run(train_experts, None, 1, tmp_path / "y", tmp_path / "ep2", size=1)
    assert_close(weights, later)


@pytest.mark.parametrize("plugin", [EP2, EP2 | ALL_REDUCE], ids=["shards", "all-reduce"])
def test_expert_gradients_clip_by_value(worlds: Worlds, tmp_path: Path, plugin: dict[str, Any]) -> None:
    [(_, expected)] = worlds.run(train_experts, None, 1, tmp_path / "alone", clips="value", size=1)
    for _, weights in worlds.run(train_experts, plugin, RANKS, tmp_path / "ep2", clips="value", size=RANKS):
        assert_close(weights, expected)


def save_on_main(path: Path) -> str:
    accelerator = make_accelerator("megatron_ddp", EP2 | ALL_REDUCE)
    module = make_experts(accelerator)
    model, optimizer, data = accelerator.prepare(module, sgd(module), expert_loader())
    accelerator.backward(module.loss(*next(iter(data)), model))
    optimizer.step()
    text = message(RuntimeError, lambda: accelerator.save_state(path)) if accelerator.is_main_process else ""
    accelerator.wait_for_everyone()
    return text


def test_main_process_cannot_save_experts(worlds: Worlds, tmp_path: Path) -> None:
    """Also where nothing is sharded: other ranks have the other experts."""
    text, *others = worlds.run(save_on_main, tmp_path / "saved", size=RANKS)
    assert "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`" in text
    assert others == [""] * (RANKS - 1)


# --- parts of sequences -----------------------------------------------------------------------------------------------


def train_on_parts() -> dict[str, Tensor]:
    from accelerate.parallelism_config import ParallelismConfig

    config = ParallelismConfig(cp_size=2, dp_shard_size=2)
    accelerator = make_accelerator("megatron_ddp", parallelism_config=config)
    module = sequences.Attention()
    model, optimizer, data = accelerator.prepare(module, sgd(module), DataLoader(sequence_data()))
    for batch in data:
        with accelerator.accumulate(model):
            loss, num_tokens = part_of_loss(model, batch, accelerator.torch_device_mesh["cp"])
            accelerator.count_tokens(num_tokens)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module)


def test_parts_of_sequences_train(worlds: Worlds) -> None:
    expected = train_on_whole_sequences(2)
    for weights in worlds.run(train_on_parts, size=RANKS):
        assert_close(weights, expected)


def test_parts_of_sequences_need_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate itself has them only with FSDP2."""
    from accelerate.parallelism_config import ParallelismConfig

    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    said = message(ValueError, lambda: check_parallelism({"parallelism_config": ParallelismConfig(cp_size=2)}))
    assert said.startswith("ParallelismConfig(cp_size=2) asks for context parallelism, which accelerate has on")
    check_parallelism({"parallelism_config": ParallelismConfig(cp_size=2), "cpu": True})


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
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        else:
            F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(module)


def test_parts_of_sequences_and_layers_train(worlds: Worlds) -> None:
    expected = train_beside_tensor_ranks(1)
    for weights in worlds.run(train_beside_tensor_ranks, 2, size=RANKS):
        assert_close(weights, expected)


# --- tensor ranks -----------------------------------------------------------------------------------------------------


MESH = {"tp_size": 2, "dp_shard_size": 2}


class LossModel(LanguageModel):
    """Returns its loss, as models of Transformers do."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(tokens), tokens)


def make_model() -> LossModel:
    torch.manual_seed(3)
    return LossModel(64, tied=False, width=16)


def train(sizes: dict[str, int], folder: str, resume: str | None = None) -> dict[str, Any]:
    """An epoch with accumulation and clipping, then the state, in a folder called after the sizes.

    ``sizes``: of ParallelismConfig; without any it is accelerate's own Accelerator, in one process.
    """
    from accelerate.parallelism_config import ParallelismConfig

    options = {"gradient_accumulation_steps": 2}
    if sizes:
        config = ParallelismConfig(**sizes)
        accelerator = make_accelerator("megatron_ddp", parallelism_config=config, **options)
    else:
        accelerator = make_accelerator("ddp", **options)
    module = make_model()
    if sizes:
        parallelize_module(module, accelerator.torch_device_mesh["tp"], plan(sequence_parallel=True))
    num_batches = accelerator.num_processes // sizes.get("tp_size", 1)
    model, optimizer, data = accelerator.prepare(module, adamw(module.parameters()), token_loader(4 // num_batches))
    if resume is not None:
        accelerator.load_state(resume)
    losses, norms = [], []
    for [tokens] in data:
        with accelerator.accumulate(model):
            loss = model(tokens)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    name = " ".join(f"{key}={size}" for key, size in sizes.items()) or "alone"
    accelerator.save_state(f"{folder}/{name}{' resumed' if resume else ''}")
    instances = getattr(accelerator, "megatron_ddp_config", None)
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights_of(module),
        "instances": instances and instances.num_distributed_optimizer_instances,
    }


@pytest.mark.parametrize(
    "sizes", [MESH, pytest.param({**MESH, "dp_replicate_size": 2}, marks=pytest.mark.nightly)], ids=["2x2", "2x2x2"]
)
def test_mesh_trains_saves_and_resumes(worlds: Worlds, tmp_path: Path, sizes: dict[str, int]) -> None:
    folder, name = str(tmp_path), " ".join(f"{key}={size}" for key, size in sizes.items())
    size = 2 * sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)
    [alone] = worlds.run(train, {}, folder, size=1)
    together = worlds.run(train, sizes, folder, size=size)
    by_data_rank = [own["losses"] for own in together[::2]]
    assert by_data_rank == [own["losses"] for own in together[1::2]], "one batch for a tensor group"
    means = [sum(losses) / len(losses) for losses in zip(*by_data_rank, strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    assert together[0]["instances"] == sizes.get("dp_replicate_size", 1)
    for own in together:
        assert own["norms"] == together[0]["norms"], "the same bits everywhere"
        assert_close(own["weights"], alone["weights"])
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    # the files are what one process wrote, and each goes on from the other's
    assert (tmp_path / name / "model.safetensors").is_file()
    saved, expected = (read(tmp_path / who / "optimizer.bin") for who in (name, "alone"))
    assert_close(saved["state"], expected["state"])
    [alone] = worlds.run(train, {}, folder, f"{folder}/{name}", size=1)
    together = worlds.run(train, sizes, folder, f"{folder}/alone", size=size)
    assert_close(together[0]["weights"], alone["weights"])


def refusals() -> dict[str, str]:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    def on(plugin: dict[str, Any] | None = None, **sizes: int) -> Any:
        AcceleratorState._shared_state.clear()
        config = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
        return make_accelerator("megatron_ddp", plugin, **config)

    found = {
        "whole experts": message(ValueError, lambda: on(EP2).prepare(experts.Model(5))),
        "three": message(ValueError, lambda: on({"expert_parallel_size": 3})),
        "experts, tensor": message(ValueError, lambda: on(EP2, tp_size=2, dp_shard_size=2)),
        "sequence": message(ValueError, lambda: on(sp_size=4)),
        "plain": message(ValueError, lambda: on(**MESH).prepare(nn.Linear(4, 4))),
    }
    module = make_model()
    parallelize_module(module, on(**MESH).torch_device_mesh["tp"], plan(sequence_parallel=True))
    found["no sizes"] = message(ValueError, lambda: on().prepare(module))
    return found


REFUSED = {
    "whole experts": 'accelerator.expert_mesh["expert_parallel"], [Shard(0)]',
    "three": "expert_parallel_size=3 does not divide the 4 ranks: choose the number of processes so that it does",
    "experts, tensor": "expert_parallel_size=2) and ParallelismConfig(tp_size=2) are not supported",
    "sequence": "ParallelismConfig(sp_size=4) asks for sequence parallelism over devices",
    "plain": "has no tensor-parallel parameter",
    "no sizes": "ParallelismConfig(tp_size=2, dp_shard_size=...)",
}


def test_contradictions_are_refused_by_name(worlds: Worlds) -> None:
    for found in worlds.run(refusals, size=RANKS):
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert text in found[what]


# --- transformers.Trainer, with a Llama that torch has cut ------------------------------------------------------------


def load_llama(folder: str, is_cut: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    if not is_cut and not Path(f"{folder}/model").exists():
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **heads)
        LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model")
    if is_cut:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        styles = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
        styles |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
        if not torch.distributed.is_initialized():  # TrainingArguments would, and come later
            torch.distributed.init_process_group("gloo")
        parallelize_module(model, meshes(2)["tp"], styles)
    return model


def fit(folder: str, is_cut: bool, resume: str | None = None) -> dict[str, Any]:
    """Four steps of ``transformers.Trainer``, which saves after two and four."""
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from ..transformers_fits import accelerators_of

    with accelerators_of("megatron_ddp" if is_cut else "accelerate", {}):
        model = load_llama(folder, is_cut)
        arguments = TrainingArguments(
            output_dir=f"{folder}/{'cut' if is_cut else 'alone'}",
            max_steps=4,
            per_device_train_batch_size=2 if is_cut else 4,
            gradient_accumulation_steps=2,
            optim="adamw_torch",
            adam_epsilon=1e-5,
            learning_rate=1e-3,
            max_grad_norm=0.1,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
            **({"parallelism_config": ParallelismConfig(**MESH)} if is_cut else {}),
        )
        tokens = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(5))
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
        trainer.train(resume_from_checkpoint=resume)
        logged = [row for row in trainer.state.log_history if "loss" in row]
        return {
            "losses": [row["loss"] for row in logged],
            "norms": [float(row["grad_norm"]) for row in logged],
            "weights": weights_of(trainer.model),
            "optimizer": type(trainer.optimizer.optimizer).__name__,
        }


@pytest.mark.nightly
def test_trainer_on_tensor_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """It trains, saves and resumes as in one process."""
    from safetensors.torch import load_file

    folder = str(tmp_path)
    [alone] = worlds.run(fit, folder, False, size=1)
    for own in worlds.run(fit, folder, True, size=RANKS):
        assert own["optimizer"] == "DistributedOptimizer"
        assert own["losses"] == pytest.approx(alone["losses"], abs=2e-4), "logged with four digits"
        assert own["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert_close(own["weights"], alone["weights"])
    saved, expected = (load_file(tmp_path / f"{of}/checkpoint-4/model.safetensors") for of in ("cut", "alone"))
    assert_close(saved, expected)
    resumed = worlds.run(fit, folder, True, f"{folder}/cut/checkpoint-2", size=RANKS)
    assert_close(resumed[0]["weights"], alone["weights"])
