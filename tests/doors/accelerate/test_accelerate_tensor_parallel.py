"""Accelerate's ``ParallelismConfig(tp_size=2, dp_shard_size=2)``: a loop trains, saves and resumes as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megastrategy.core import OpenDirectory
from megastrategy.tools.conversion import consolidate
from tests.doors.lightning.test_lightning_tensor_parallel import BATCH_SIZE, assert_close, loader, num_chunks
from tests.support.comparison import message
from tests.support.tensor_parallel import LanguageModel, adamw, meshes, plan, whole

from ..accelerate_loops import Worlds, make_accelerator
from .test_accelerate_checkpoints import be_on_nodes_of


class Model(LanguageModel):
    """Returns its loss, as models of Transformers do."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(tokens), tokens)


def make_model(tied: bool) -> Model:
    torch.manual_seed(3)
    return Model(64, tied=tied, width=16)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def train(
    sizes: dict[str, int],
    folder: str,
    resume: str | None = None,
    *,
    tied: bool = False,
    safe: bool = True,
    plugin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An epoch with accumulation and clipping, then the state, in a folder called after the sizes.

    ``sizes``: of ParallelismConfig; without any it is accelerate's own Accelerator, in one process.
    """
    from accelerate.parallelism_config import ParallelismConfig

    options = {"gradient_accumulation_steps": 2}
    if sizes:
        config = ParallelismConfig(**sizes)
        accelerator = make_accelerator("megatron_ddp", plugin, parallelism_config=config, **options)
    else:
        accelerator = make_accelerator("ddp", **options)
    module = make_model(tied)
    if sizes:
        parallelize_module(module, accelerator.torch_device_mesh["tp"], plan(sequence_parallel=True))
        if tied:
            module.head.weight = module.embed.weight
    num_batches = accelerator.num_processes // sizes.get("tp_size", 1)
    model, optimizer, data = accelerator.prepare(
        module, adamw(module.parameters()), loader(2 * BATCH_SIZE // num_batches)
    )
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
    accelerator.save_state(f"{folder}/{name}{' resumed' if resume else ''}", safe_serialization=safe)
    instances = getattr(accelerator, "megatron_ddp_config", None)
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights_of(module),
        "instances": instances and instances.num_distributed_optimizer_instances,
    }


MESH = {"tp_size": 2, "dp_shard_size": 2}
MESHES = [
    pytest.param(MESH, False, True, id="2x2"),
    pytest.param(MESH, True, True, id="2x2-tied", marks=pytest.mark.long),
    pytest.param(MESH, False, False, id="2x2-pickled", marks=pytest.mark.long),
    pytest.param({"tp_size": 2}, False, True, id="1x2", marks=pytest.mark.long),
    pytest.param({**MESH, "dp_replicate_size": 2}, False, True, id="2x2x2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("sizes", "tied", "safe"), MESHES)
def test_a_mesh_trains_saves_and_resumes_as_one_process_does(
    worlds: Worlds, tmp_path: Path, sizes: dict[str, int], tied: bool, safe: bool
) -> None:
    folder, name = str(tmp_path), " ".join(f"{key}={size}" for key, size in sizes.items())
    size = 2 * sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)
    options = {"tied": tied, "safe": safe}
    [alone] = worlds.run(train, {}, folder, size=1, **options)
    together = worlds.run(train, sizes, folder, size=size, **options)
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
    for state in ("optimizer.bin", "model.safetensors" if safe else "pytorch_model.bin"):
        assert (tmp_path / name / state).is_file()
    saved, expected = (torch.load(tmp_path / who / "optimizer.bin", weights_only=True) for who in (name, "alone"))
    assert_close(saved["state"], expected["state"])
    [alone] = worlds.run(train, {}, folder, f"{folder}/{name}", size=1, **options)
    together = worlds.run(train, sizes, folder, f"{folder}/alone", size=size, **options)
    assert_close(together[0]["weights"], alone["weights"])


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_is_what_one_process_saves_and_each_resumes_from_it(
    worlds: Worlds, tmp_path: Path, tied: bool
) -> None:
    folder, parts, plugin = str(tmp_path), str(tmp_path / "parts"), {"state_dict_type": "sharded"}
    [alone] = worlds.run(train, {}, folder, size=1, tied=tied)
    worlds.run(train, MESH, parts, size=4, tied=tied, plugin=plugin)
    name = "tp_size=2 dp_shard_size=2"
    directory = tmp_path / "parts" / name / "megatron_ddp"
    assert num_chunks(directory, "model.embed.weight") == 2, "each tensor rank writes its part"
    weights = OpenDirectory(directory).read("model")
    assert torch.equal(weights["head.weight"], weights["embed.weight"]) == tied
    assert_close({key: weights[key] for key in alone["weights"]}, alone["weights"], "weights")
    consolidate(directory, tmp_path / "one file")
    state = torch.load(tmp_path / "one file", weights_only=True)["optimizer"]["state"]
    assert_close(state, torch.load(tmp_path / "alone" / "optimizer.bin", weights_only=True)["state"], "optimizer")
    # the mesh goes on from the directory as one process does from its files
    [alone] = worlds.run(train, {}, folder, f"{folder}/alone", size=1, tied=tied)
    together = worlds.run(train, MESH, parts, f"{parts}/{name}", size=4, tied=tied, plugin=plugin)
    for own in together:
        assert_close(own["weights"], alone["weights"], "resumed")
    # and without a directory's option, on other tensor ranks
    together = worlds.run(train, {"tp_size": 2}, folder, f"{parts}/{name}", size=2, tied=tied)
    assert_close(together[0]["weights"], alone["weights"], "on two ranks")


def save_on_each_node(folder: str) -> list[str]:
    """Two nodes of two processes, each with a disk of its own. Returns what is there."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import ProjectConfiguration

    accelerator = make_accelerator(
        "megatron_ddp",
        parallelism_config=ParallelismConfig(**MESH),
        project_config=ProjectConfiguration(save_on_each_node=True),
    )
    disk = f"{folder}/node {be_on_nodes_of(2)}"
    module = make_model(tied=False).bfloat16()
    parallelize_module(module, accelerator.torch_device_mesh["tp"], plan(sequence_parallel=True))
    model, optimizer = accelerator.prepare(module, adamw(module.parameters()))
    torch.manual_seed(accelerator.process_index // 2)
    accelerator.backward(model(torch.randint(64, (2, 8))))
    optimizer.step()
    accelerator.save_state(disk)
    accelerator.save_model(model, f"{disk}/model")
    weights = weights_of(module)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    accelerator.load_state(disk)  # each node from its own
    assert_close(weights_of(module), weights)
    return sorted(path.relative_to(disk).as_posix() for path in Path(disk).rglob("*") if path.is_file())


@pytest.mark.long
def test_each_node_gets_whole_weights_and_states(worlds: Worlds, tmp_path: Path) -> None:
    first, _, second, _ = worlds.run(save_on_each_node, str(tmp_path), size=4)
    random_states = {f"random_states_{rank}.pkl" for rank in range(4)}
    assert set(first) - random_states == set(second) - random_states
    for name in set(first) - random_states:
        one, other = ((tmp_path / node / name).read_bytes() for node in ("node 0", "node 1"))
        assert one == other, name


def refusals() -> dict[str, str]:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    def on(plugin: dict[str, Any] | None = None, **sizes: int) -> Any:
        AcceleratorState._shared_state.clear()
        return make_accelerator("megatron_ddp", plugin, parallelism_config=ParallelismConfig(**sizes))

    plain = nn.Linear(4, 4)
    found = {
        "sequence": message(ValueError, lambda: on(sp_size=2)),
        "plain": message(ValueError, lambda: on(tp_size=2).prepare(plain)),
    }
    module = make_model(tied=False)
    parallelize_module(module, on(tp_size=2).torch_device_mesh["tp"], plan(sequence_parallel=True))
    found["no sizes"] = message(ValueError, lambda: on().prepare(module))
    return found


REFUSED = {
    "sequence": "ParallelismConfig(sp_size=2) asks for sequence parallelism over devices",
    "plain": "has no tensor-parallel parameter",
    "no sizes": "ParallelismConfig(tp_size=2, dp_shard_size=...)",
}


def test_what_cannot_be_is_refused_by_name(worlds: Worlds) -> None:
    for found in worlds.run(refusals):
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert text in found[what]


def load_what_does_not_fit(folder: str) -> dict[str, str]:
    from accelerate.parallelism_config import ParallelismConfig

    plugin = {"state_dict_type": "sharded"}
    found = {}
    for what, width in (("saved", 16), ("mis-sized", 8), ("missing", 16)):
        accelerator = make_accelerator("megatron_ddp", plugin, parallelism_config=ParallelismConfig(**MESH))
        module = Model(64, tied=False, width=width)
        if what == "missing":
            module.more = nn.Linear(2, 2)
        parallelize_module(module, accelerator.torch_device_mesh["tp"], plan(sequence_parallel=True))
        accelerator.prepare(module, adamw(module.parameters()))
        before = weights_of(module)
        if what == "saved":
            accelerator.save_state(folder)
        else:
            found[what] = message(RuntimeError, lambda accelerator=accelerator: accelerator.load_state(folder))
        for name, value in weights_of(module).items():
            assert torch.equal(value, before[name])
    return found


def test_a_directory_that_does_not_fit_is_refused_by_name(worlds: Worlds, tmp_path: Path) -> None:
    for found in worlds.run(load_what_does_not_fit, str(tmp_path), size=4):
        shapes = (
            "a param with shape torch.Size([64, 16]) from checkpoint, the shape in current model is torch.Size([64, 8])"
        )
        assert f"size mismatch for embed.weight: copying {shapes}" in found["mis-sized"]
        assert "parameter 'more.bias' is in group 0 of the optimizer, but not of " in found["missing"]


# --- Transformers ----------------------------------------------------------------------------------------------------

BY_TRANSFORMERS, BY_TORCH = {"tp_size": 2}, MESH


def load_llama(folder: str, sizes: dict[str, int]) -> Any:
    """Cut over all ranks by Transformers, or over the mesh's tensor ranks by torch; or whole."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if not sizes and not Path(f"{folder}/model").exists():
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **heads)
        LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
    if sizes == BY_TRANSFORMERS:
        return LlamaForCausalLM.from_pretrained(f"{folder}/model", distributed_config=DistributedConfig(tp_size=2))
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model")
    if sizes:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        styles = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
        if not torch.distributed.is_initialized():  # TrainingArguments would, and come later
            torch.distributed.init_process_group("gloo")
        mesh = meshes(2)["tp"]
        parallelize_module(model, mesh, styles | {f"model.layers.*.{name}": RowwiseParallel() for name in rows})
    return model


def fit(folder: str, sizes: dict[str, int], resume: str | None = None, *, on_two_nodes: bool = False) -> dict[str, Any]:
    """Four steps of ``transformers.Trainer``, which saves after two and four. ``on_two_nodes``: on the disk of each."""
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from ..transformers_fits import accelerators_of

    with accelerators_of("megatron_ddp" if sizes else "accelerate", {}):
        model = load_llama(folder, sizes)
        ranks = sizes.get("dp_shard_size", 1)
        arguments = TrainingArguments(
            output_dir=f"{folder}/{sizes}",
            max_steps=4,
            per_device_train_batch_size=4 // ranks,
            gradient_accumulation_steps=2,
            optim="adamw_torch",
            adam_epsilon=1e-5,
            learning_rate=1e-3,
            max_grad_norm=0.1,
            logging_steps=1,
            save_steps=2,
            save_only_model=sizes == BY_TRANSFORMERS,  # all that it saves of models that it has cut
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
            save_on_each_node=on_two_nodes,
            **({"parallelism_config": ParallelismConfig(**sizes)} if sizes == BY_TORCH else {}),
        )
        if on_two_nodes:
            arguments.output_dir = f"{folder}/node {be_on_nodes_of(2)}"
        tokens = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(5))
        data = [{"input_ids": sample, "labels": sample} for sample in tokens]
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        logged = [row for row in trainer.state.log_history if "loss" in row]
        return {
            "losses": [row["loss"] for row in logged],
            "norms": [float(row["grad_norm"]) for row in logged],
            "weights": weights_of(trainer.model),
            "optimizer": type(trainer.optimizer.optimizer).__name__,
        }


@pytest.mark.long
@pytest.mark.parametrize("sizes", [BY_TRANSFORMERS, BY_TORCH], ids=["cut by Transformers", "cut by torch"])
def test_a_trainer_trains_and_saves_as_in_one_process(worlds: Worlds, tmp_path: Path, sizes: dict[str, int]) -> None:
    from safetensors.torch import load_file

    folder, size = str(tmp_path), 2 * sizes.get("dp_shard_size", 1)
    [alone] = worlds.run(fit, folder, {}, size=1)
    together = worlds.run(fit, folder, sizes, size=size)
    for own in together:
        # Trainer prepares a model that it has cut for evaluation: there are no data-parallel ranks then
        assert own["optimizer"] == ("DistributedOptimizer" if sizes == BY_TORCH else "AdamW")
        assert own["losses"] == pytest.approx(alone["losses"], abs=2e-4), "logged with four digits"
        assert own["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert_close(own["weights"], alone["weights"])
    saved, expected = (load_file(tmp_path / f"{of}/checkpoint-4/model.safetensors") for of in (sizes, {}))
    assert_close(saved, expected)
    if sizes == BY_TORCH:
        resumed = worlds.run(fit, folder, sizes, f"{folder}/{sizes}/checkpoint-2", size=size)
        assert_close(resumed[0]["weights"], alone["weights"])
        worlds.run(fit, folder, sizes, size=size, on_two_nodes=True)
        one, other = (tmp_path / f"node {node}/checkpoint-4" for node in (0, 1))
        # save_pretrained of Transformers writes only on rank 0, with any arguments
        assert_close(load_file(one / "model.safetensors"), expected)
        for name in ("optimizer.pt", "scheduler.pt"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
