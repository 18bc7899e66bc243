"""The structure is a promise: who imports whom, how long things are, and that nothing hides in modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megastrategy"
CORE = PACKAGE / "core"
FILES = sorted(PACKAGE.rglob("*.py"))
SHARED_BY_DOORS = {path.stem for path in PACKAGE.glob("_[a-z]*.py")}
DOORS = {path.stem for path in PACKAGE.glob("[a-z]*.py")} | SHARED_BY_DOORS

# Lower may not import higher. Within a rank of this list files do not import each other.
RANKS = [
    {"step_arguments"},
    {"config", "events", "errors", "flat_shard", "tensor_parts", "process_groups", "lent_tensors", "callers", "trial"},
    {"layout"},
    {
        "memory",
        "optimizer_copies",
        "elementwise",
        "reduced_grad",
        "param_shard",
        "nonfinite",
        "roll_call",
        "module_watch",
        "bucket_order",
        "bucket_choice",
        "worker",
        "gloo_rings",
    },
    {"collectives", "buffers", "known_findings"},
    {"bucket_tuning", "flattened_buffers", "pooled_buffers", "param_buffers", "instanced_collectives"},
    {"bucket_planner"},
    {"reducer", "param_gather", "clip_grads", "checkpoint", "step_tensors", "relayout"},
    {"sharded_checkpoint", "module_plan", "hand_over"},
    {"distributed_data_parallel"},
    {"strangers"},
    {"optimizer_double", "sharded_step"},
    {"method_trial"},
    {"forwarded"},
    {"distributed_optimizer"},
    {"__init__"},
]


def imports(path: Path) -> set[str]:
    """What the file imports when it runs: absolute names, and relative ones with their dots."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in ast.walk(node):
                child.typing_only = True  # type: ignore[attr-defined]
        if getattr(node, "typing_only", False):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            found |= {dots + node.module} if node.module else {dots + alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda path: path.stem)
def test_core_imports_torch_the_standard_library_and_what_is_below(path: Path) -> None:
    rank = next(number for number, names in enumerate(RANKS) if path.stem in names)
    below = set().union(*RANKS[:rank])
    for name in imports(path):
        if name.startswith("."):
            assert name.count(".") == 1, f"{name}: core does not look out of itself"
            assert name[1:] in below, f"{path.stem} imports {name[1:]}, which is not below it"
        else:
            top = name.split(".")[0]
            assert top in {"torch", "__future__"} or top in sys.stdlib_module_names, name


def test_every_file_of_core_has_its_rank() -> None:
    assert {path.stem for path in CORE.glob("*.py")} == set().union(*RANKS)


def test_only_collectives_talk_to_torch_distributed() -> None:
    """Types aside (ProcessGroup in signatures), nobody else calls it."""
    for path in CORE.glob("*.py"):
        if path.stem in ("collectives", "gloo_rings", "instanced_collectives", "process_groups"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
                assert {alias.name for alias in node.names} == {"ProcessGroup"}, path.stem
            elif isinstance(node, ast.Attribute):
                assert not ast.unparse(node).startswith("torch.distributed."), path.stem


def test_only_buffers_assign_data_and_grad_of_parameters() -> None:
    for path in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr in {"data", "grad", "grad_dtype"}:
                    owner = ast.unparse(target.value)
                    # shards are the optimizer's own tensors; the probe steps tensors that it made
                    stepped = {("sharded_step", "shard.main"), ("sharded_step", "tensor"), ("step_tensors", "tensor")}
                    tried = {
                        ("trial", "param"),
                        ("method_trial", "tensor"),
                        ("optimizer_double", "copied[id(old)]"),
                    }
                    own = (path.stem, owner) in stepped | tried | {("strangers", "tensor")}
                    # other kinds of gradient buffers hand gradients to autograd and take them away, and no more
                    own |= target.attr == "grad" and path.stem in {"flattened_buffers", "pooled_buffers"}
                    own |= target.attr == "data" and path.stem == "param_buffers"
                    assert path.stem == "buffers" or own, f"{path.name}:{node.lineno}: {ast.unparse(target)}"


def test_doors_import_core_by_its_public_names_and_not_each_other() -> None:
    """But for the launcher, which opens Accelerate's to a script that does not know it."""
    for door in DOORS:
        opened = {".accelerate"} if door == "launch" else set()
        for name in imports(PACKAGE / f"{door}.py"):
            if name.startswith("."):
                assert name in {".core", *opened} or name[1:] in SHARED_BY_DOORS, f"{door} imports {name}"


def test_tools_import_core_by_its_public_names_and_nobody_imports_tools() -> None:
    """And no door, but for the file in which checkpoints are written, and the launcher's options; so that no tool
    needs a framework."""
    tools = {path.stem for path in (PACKAGE / "tools").glob("[a-z]*.py")}
    assert tools
    for path in (PACKAGE / "tools").glob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] not in {"lightning", "pytorch_lightning", "lightning_fabric"}, path.stem
            if name.startswith("."):
                allowed = {"..core", ".._checkpoint_io", ".._launch_config", "..__version__"}
                assert name in allowed or name.removeprefix(".") in tools, f"{path.stem} imports {name}"
    for path in FILES:
        if path.parent != PACKAGE / "tools":
            assert not [name for name in imports(path) if "tools" in name.split(".")], path.stem


def test_what_doors_share_imports_no_framework() -> None:
    """It serves the mirrored packages alike; lightning_utilities belongs to none of them."""
    for path in PACKAGE.glob("_*.py"):
        for name in imports(path):
            frameworks = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"}
            assert name.split(".")[0] not in frameworks, path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda path: path.stem)
def test_core_has_no_mutable_module_state_and_no_environment(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            types = {"Listener", "Box", "Span", "State", "Contents", "Keys", "Packed"}
            is_constant = name == "__all__" or name.lstrip("_").isupper() or name in types
            assert is_constant, f"module variable {name}"
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert "environ" not in path.read_text()
    assert "getenv" not in path.read_text()


def test_public_names() -> None:
    import megastrategy

    assert megastrategy.__all__ == [
        "CommunicationMonitor",
        "DistributedDataParallel",
        "DistributedDataParallelConfig",
        "DistributedOptimizer",
        "GradScaler",
        "MegatronDDPStrategy",
        "__version__",
    ]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        megastrategy.Nothing  # noqa: B018 - the access is the test
    for name in megastrategy.core.__all__:
        assert name.isupper() or getattr(megastrategy.core, name).__doc__


def test_importing_it_imports_no_framework() -> None:
    code = "import sys, megastrategy; print([m for m in ('lightning', 'pytorch_lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_docstrings() -> None:
    """Every public class and function of core says what it is."""
    for path in CORE.glob("*.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path.stem
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.stem}.{node.name}"
