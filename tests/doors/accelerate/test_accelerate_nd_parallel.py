"""Accelerate's own example of tensor and data parallelism, on CPUs. In the long tier.

It is fetched from Accelerate's repository, changed by rules, and gone afterwards.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.doors.lightning.test_lightning_tensor_parallel import assert_close
from tests.support.extra_packages import sources_of

from .. import accelerate_examples as examples
from ..accelerate_loops import Worlds

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
        other = {"bf16": "no", 1e-5: examples.LEARNING_RATE}
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
    examples.save_llama(str(folder / "llama"))
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
    together = worlds.run(examples.train, folder, f"{folder}/llama", {"tp_size": 2}, False)
    [alone] = worlds.run(examples.alone, f"{folder}/llama", 1, size=1)
    assert_trained(together, alone, folder)


def test_it_trains_on_a_mesh_as_one_process(worlds: Worlds, accelerate_sources: Path, tmp_path: Path) -> None:
    """Transformers refuses such a mesh; with the model that torch has cut by its plan the example runs to its end."""
    folder, sizes = edited(accelerate_sources, tmp_path, saves_whole_state=True), {"tp_size": 2, "dp_shard_size": 2}
    with pytest.raises(AssertionError, match="The parallel mesh requires 2 processes, but world_size is 4"):
        worlds.run(examples.train, folder, f"{folder}/llama", sizes, False, size=4)
    together = worlds.run(examples.train, folder, f"{folder}/llama", sizes, True, size=4)
    [alone] = worlds.run(examples.alone, f"{folder}/llama", 2, size=1)
    assert_trained(together, alone, folder)
    assert {"model.safetensors", "optimizer.bin"} <= {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
