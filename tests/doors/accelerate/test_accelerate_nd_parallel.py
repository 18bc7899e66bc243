"""Accelerate's own example of tensor and data parallelism, on CPUs. In the long tier.

It is fetched from Accelerate's repository, changed by rules, and gone afterwards.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from tests.doors.lightning.test_lightning_tensor_parallel import assert_close
from tests.support.extra_packages import sources_of
from tests.support.tensor_parallel import whole

from ..accelerate_loops import Worlds

VOCAB = 64
SEQUENCE = 16
STEPS = 6
LEARNING_RATE = 0.1
"""Theirs is for a pretrained model, whose losses hardly move in a few steps."""


def tokens() -> list[dict[str, list[int]]]:
    """Samples as theirs are: tokens, and which come after them."""
    every = torch.randint(VOCAB, (2 * STEPS, SEQUENCE + 1), generator=torch.Generator().manual_seed(5)).tolist()
    return [{"input_ids": sample[:-1], "shift_labels": sample[1:]} for sample in every]


def save_llama(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


@contextlib.contextmanager
def _imported(folder: str) -> Iterator[ModuleType]:
    """``nd_parallel.py`` with what needs the hub or a GPU in it replaced: its data, tokenizer and memory statistics."""
    datasets = ModuleType("datasets")
    datasets.Dataset = datasets.load_dataset = None  # type: ignore[attr-defined] # names that are imported
    sys.path.insert(0, folder)
    sys.modules["datasets"] = datasets
    try:
        utils = importlib.import_module("utils")
        del sys.modules["datasets"]  # which is asked for later, and need not be there
        utils.get_dataset = lambda *_: tokens()  # type: ignore[attr-defined]
        utils.setup_tokenizer = lambda *_: None  # type: ignore[attr-defined]
        utils.gpu_memory_usage_all = lambda *_: dict.fromkeys(  # type: ignore[attr-defined]
            ("peak_memory_active", "peak_memory_alloc", "peak_memory_reserved"), 0.0
        )
        yield importlib.import_module("nd_parallel")
    finally:
        sys.path.remove(folder)
        for name in ("utils", "nd_parallel"):
            sys.modules.pop(name, None)


class CutByTorch:
    """Takes the place of AutoModelForCausalLM: the model's own plan over the mesh's tensor ranks, by torch.

    Transformers cuts over all ranks that there are, and refuses a mesh with others.
    """

    @staticmethod
    def from_pretrained(name: str, tp_size: int, tp_plan: str, device_mesh: Any, **options: Any) -> nn.Module:
        from transformers import AutoModelForCausalLM

        assert (tp_size, tp_plan) == (device_mesh["tp"].size(), "auto")
        model = AutoModelForCausalLM.from_pretrained(name, **options)
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan = {f"model.{layer}": styles[style]() for layer, style in model.config.base_model_tp_plan.items()}
        return parallelize_module(model, device_mesh["tp"], plan)


def train(folder: str, model: str, sizes: dict[str, int], cut_by_torch: bool) -> dict[str, Any]:
    """Runs the example under ``megastrategy.launch``'s replacement of the Accelerator."""
    from accelerate.utils import set_seed

    from megastrategy.accelerate import MegatronDDPPlugin, replace_accelerators

    found: dict[str, Any] = {"losses": []}
    with _imported(folder) as example, replace_accelerators(MegatronDDPPlugin()):
        if cut_by_torch:
            example.AutoModelForCausalLM = CutByTorch
        forward = example.forward

        def noted(wrapped: nn.Module, batch: Any, optimizer: Any, accelerator: Any) -> Tensor:
            loss: Tensor = forward(wrapped, batch, optimizer, accelerator)
            inner = accelerator.unwrap_model(wrapped)
            found["losses"].append(loss.item())
            found["accelerator"] = type(accelerator).__module__
            found["optimizer"] = type(optimizer.optimizer).__name__
            found["weights"] = {name: whole(param) for name, param in inner.named_parameters()}
            found["cut"] = sum(hasattr(param, "placements") for param in inner.parameters())
            return loss

        example.forward = noted
        args = argparse.Namespace(
            dp_replicate_size=1,
            dp_shard_size=1,
            cp_size=1,
            sequence_length=SEQUENCE,
            num_steps=STEPS,
            save_dir=folder,
            checkpoint_frequency=3,
            model_name=model,
        )
        vars(args).update(sizes)
        set_seed(42)
        example.train(args)
    return found


def train_alone(model: str, samples_per_step: int) -> dict[str, Any]:
    """Trains the model in one process with torch alone, on the samples of all data-parallel ranks."""
    from transformers import LlamaForCausalLM

    module = LlamaForCausalLM.from_pretrained(model, use_cache=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    losses = []
    batches = DataLoader(tokens(), batch_size=samples_per_step, collate_fn=_collate)  # type: ignore[arg-type]
    for inputs, labels in list(batches)[:STEPS]:
        logits = module(input_ids=inputs).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: whole(param) for name, param in module.named_parameters()}}


def _collate(samples: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
    inputs, labels = (torch.tensor([sample[key] for sample in samples]) for key in ("input_ids", "shift_labels"))
    return inputs, labels


pytestmark = pytest.mark.long

REPOSITORY = "https://github.com/huggingface/accelerate"
VERSION = "v1.14.0"
"""The example is the same since."""
FOLDER = "examples/torch_native_parallelism"


WHOLE_STATE = "save(state_dict=accelerator.get_state_dict(model), is_main_process=accelerator.is_main_process)"
"""As Accelerate's guides write it. Transformers makes whole weights of what it has cut itself, and of nothing else."""


@dataclasses.dataclass
class _WithoutSharding(ast.NodeTransformer):
    """Leaves the plugin for FSDP2 out, trains in fp32, so that one process can be compared, and by a larger rate."""

    saves_whole_state: bool

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if getattr(node.func, "id", None) == "FullyShardedDataParallelPlugin":
            return ast.Constant(None)
        if getattr(node.func, "attr", None) == "save_pretrained" and self.saves_whole_state:
            node.keywords += ast.parse(WHOLE_STATE).body[0].value.keywords  # type: ignore[attr-defined]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        other = {"bf16": "no", 1e-5: LEARNING_RATE}
        return ast.Constant(other[node.value]) if node.value in other else node  # type: ignore[index]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = "float32" if node.attr == "bfloat16" else node.attr
        return node


@pytest.fixture(scope="module")
def accelerate_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources_of(tmp_path_factory.mktemp("accelerate"), REPOSITORY, VERSION, FOLDER) / FOLDER


def edited(accelerate_sources: Path, folder: Path, *, saves_whole_state: bool = False) -> str:
    """A folder with the edited example, and a small model beside it."""
    for name in ("nd_parallel.py", "utils.py"):
        tree = ast.parse((accelerate_sources / name).read_text("utf-8"))
        tree = _WithoutSharding(saves_whole_state).visit(tree)
        (folder / name).write_text(ast.unparse(ast.fix_missing_locations(tree)), "utf-8")
    save_llama(str(folder / "llama"))
    return str(folder)


def assert_trained(together: list[dict[str, Any]], alone: dict[str, Any], folder: str) -> None:
    from safetensors.torch import load_file

    for own in together:
        assert own["optimizer"] == "DistributedOptimizer"
        assert own["cut"] >= 14, "seven layers of two blocks"
        assert own["losses"] == pytest.approx(alone["losses"], rel=1e-5), "of all data-parallel ranks"
        assert_close(own["weights"], alone["weights"])
    # where it saves: in its folder, under the model's name, which is a path here
    assert_close(load_file(f"{folder}/{folder}/llama/model.safetensors"), alone["weights"])


def test_it_trains_on_tensor_ranks_as_one_process(worlds: Worlds, accelerate_sources: Path, tmp_path: Path) -> None:
    """As it is documented, with the model that Transformers has cut."""
    folder = edited(accelerate_sources, tmp_path)
    together = worlds.run(train, folder, f"{folder}/llama", {"tp_size": 2}, False)
    [alone] = worlds.run(train_alone, f"{folder}/llama", 1, size=1)
    assert_trained(together, alone, folder)


def test_it_trains_on_a_mesh_as_one_process(worlds: Worlds, accelerate_sources: Path, tmp_path: Path) -> None:
    """Transformers refuses such a mesh; with the model that torch has cut by its plan the example runs to its end."""
    folder, sizes = edited(accelerate_sources, tmp_path, saves_whole_state=True), {"tp_size": 2, "dp_shard_size": 2}
    with pytest.raises(AssertionError, match="The parallel mesh requires 2 processes, but world_size is 4"):
        worlds.run(train, folder, f"{folder}/llama", sizes, False, size=4)
    together = worlds.run(train, folder, f"{folder}/llama", sizes, True, size=4)
    [alone] = worlds.run(train_alone, f"{folder}/llama", 2, size=1)
    assert_trained(together, alone, folder)
    assert {"model.safetensors", "optimizer.bin"} <= {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
