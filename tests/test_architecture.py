"""The walls: who imports whom, and that nothing hides in modules."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megastrategy"
CORE = PACKAGE / "core"
FILES = sorted(PACKAGE.rglob("*.py"))
FILES_OF_CORE = sorted(CORE.rglob("*.py"))

# The rooms: what each may import, besides itself. A name represents a folder, or for a file at the top; one with a dot
# for that file alone.
MAY_IMPORT = {
    "core": set(),
    "errors": {"core"},
    "events": {"core"},
    "_param_groups": set(),
    "_expert_mesh": {"core"},
    "_versions": set(),
    "data": set(),
    "_replicas": {"core", "data"},
    "_prepared_models": {"core"},
    "_unsharded_optimizers": {"core"},
    "_faults": {"core"},
    "_checkpoints": {"core", "_faults"},
    "pipeline": {"core", "errors"},
    "_lightning": {
        "core",
        "_expert_mesh",
        "_faults",
        "_checkpoints",
        "_prepared_models",
        "_replicas",
        "_unsharded_optimizers",
        "data",
        "pipeline",
    },
    "lightning": {"_lightning", "_checkpoints", "_versions"},
    "pytorch_lightning": {"_lightning", "_checkpoints", "_versions"},
    "fabric": {"_lightning", "_checkpoints", "_versions"},
    "lightning_fabric": {"_lightning", "_checkpoints", "_versions"},
    "ray": {"core", "lightning", "pytorch_lightning", "_versions"},
    "accelerate": {
        "core",
        "_expert_mesh",
        "_faults",
        "_checkpoints",
        "_prepared_models",
        "_replicas",
        "_unsharded_optimizers",
        "_versions",
        "data",
    },
    "launch": {"accelerate"},
    "__main__": {"tools"},
    "tools": {
        "core",
        "_checkpoints.directory_writer",
        "_checkpoints.files",
        "_checkpoints.foreign",
        "_checkpoints.not_tensors",
        "accelerate.launch_config",
        "_replicas",
        "__version__",
    },
    "__init__": {"core", "lightning", "_param_groups", "_versions", "_replicas", "pipeline", "tools.plan.partitions"},
}

# Core's folders: what of core each may import, besides itself and the ground. The files beside them, the faces of the
# engine, may use every folder, and no folder imports them.
GROUND = {"errors", "events", "devices", "config"}
ROOMS_OF_CORE = {
    "judge": set(),
    "layout": set(),
    "collectives": {"layout"},
    "module": {"layout", "collectives"},
    "data_path": {"layout", "collectives", "module", "judge"},
    "states": {"layout", "collectives", "module"},
    "optimizer": {"layout", "collectives", "module", "judge", "data_path", "states"},
    "checkpoint": {"layout", "collectives", "module", "judge", "states", "optimizer"},
}


def module(path: Path) -> str:
    """Its dotted name below core; a folder's ``__init__`` by the name of the folder."""
    return ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")


def resolved(path: Path, name: str) -> str:
    """A relative import of the file, as a dotted name below the package."""
    dots = len(name) - len(name.lstrip("."))
    folder = path.parent.relative_to(PACKAGE).parts
    assert dots <= len(folder) + 1, f"{path}: {name} is outside of the package"
    return ".".join([*folder[: len(folder) - dots + 1], name[dots:]])


def room(path: Path) -> str:
    """The name in ``MAY_IMPORT`` for the file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, for_types: bool = False) -> set[str]:
    """Returns what the file imports when it runs: absolute names, and relative ones with their dots.

    ``for_types``: also what a type checker sees alone.
    """
    found, typing_only = set[str](), set[ast.AST]()
    for node in ast.walk(parsed(path)):
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only.update(ast.walk(node))
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            found |= {dots + node.module} if node.module else {dots + alias.name for alias in node.names}
    return found


def test_imports_have_no_cycle() -> None:
    """A circle that a type checker alone sees is one of the reader's all the same."""
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in FILES}
    files |= {name.removesuffix(".__init__"): path for name, path in files.items()}
    edges: dict[Path, set[Path]] = {}
    for path in FILES:
        sees_types = path not in (CORE / "optimizer" / "state.py", CORE / "optimizer" / "full_state.py")
        names = (resolved(path, name) for name in imports(path, for_types=sees_types) if name.startswith("."))
        edges[path] = {files[name] for name in names if name in files} - {path}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, with the circle


def test_core_imports_follow_the_table() -> None:
    for path in FILES_OF_CORE:
        own = module(path).split(".")[0]
        for name in imports(path):
            if name.startswith("."):
                target = resolved(path, name).split(".")
                assert target[0] == "core", f"{path} imports {name}: core does not look out of itself"
                if own in ROOMS_OF_CORE:
                    assert target[1] in {own} | ROOMS_OF_CORE[own] | GROUND, f"{path} may not import {name}"
                elif own in GROUND:
                    assert target[1] in GROUND, f"{path} may not import {name}"
            else:
                top = name.split(".")[0]
                assert top in {"torch", "__future__"} or top in sys.stdlib_module_names, (path, name)


def test_every_folder_of_core_says_what_it_may_import() -> None:
    assert {path.parent.name for path in FILES_OF_CORE if path.parent != CORE} == ROOMS_OF_CORE.keys()
    rows = re.findall(r"^\| `(\w+)` \|", (CORE / "README.md").read_text(), re.MULTILINE)
    assert set(rows) == ROOMS_OF_CORE.keys()
    order = {folder: number for number, folder in enumerate(rows)}
    assert all(order[lower] < order[folder] for folder in rows for lower in ROOMS_OF_CORE[folder])


def test_folders_of_core_use_public_names() -> None:
    """A folder's ``__init__`` is its border. Functions, and types, may import a file itself, which costs much."""
    used: dict[str, set[str]] = {folder: set() for folder in ROOMS_OF_CORE}
    for path in FILES_OF_CORE:
        own = path.relative_to(CORE).parts[0]
        tree = parsed(path)
        apart = (ast.FunctionDef, ast.If)
        inside = {id(node) for each in ast.walk(tree) if isinstance(each, apart) for node in ast.walk(each)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            target = resolved(path, "." * node.level + (node.module or "")).split(".")
            if len(target) < 2 or target[1] == own or target[1] not in ROOMS_OF_CORE:
                continue
            assert len(target) == 2 or id(node) in inside, f"{path}:{node.lineno} imports a file of {target[1]}"
            used[target[1]] |= {alias.name for alias in node.names}
    for folder, names in used.items():
        tree = ast.parse((CORE / folder / "__init__.py").read_text())
        exported = next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign))
        assert set(exported) <= names, f"no folder uses {set(exported) - names} of {folder}"
        hidden = set(exported) & {path.stem for path in (CORE / folder).glob("*.py")}
        assert not hidden, f"from {folder} import {hidden} would mean the file or the name, by what was imported first"


def test_only_collectives_talk_to_torch_distributed() -> None:
    """Except for types (ProcessGroup in signatures), no other folder calls it."""
    for path in FILES_OF_CORE:
        if path.parent.name == "collectives":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
                assert {alias.name for alias in node.names} == {"ProcessGroup"}, path.stem
            elif isinstance(node, ast.Attribute):
                assert not ast.unparse(node).startswith("torch.distributed."), path.stem


def test_a_room_imports_its_own_and_what_it_may() -> None:
    """Core by its public names: no door knows its files. No door imports another, except for the launcher, which opens
    Accelerate's to a script that does not know it, and Ray's, which is Lightning's for its workers. Only
    ``megastrategy.plan`` imports tools."""
    for path in (path for path in FILES if CORE not in path.parents):
        for name in imports(path):
            if name.startswith("."):
                target = resolved(path, name).split(".")
                allowed = {room(path)} | MAY_IMPORT[room(path)]
                assert allowed & {target[0], ".".join(target)}, f"{path} imports {name}"
                public = room(path) in ("errors", "events") and target == ["core", room(path)]
                assert target[0] != "core" or len(target) == 1 or public, f"{path}: {name} is no public name of core"


def test_every_file_and_folder_is_in_the_table() -> None:
    """A new file or folder of ``megastrategy/`` has its row in :data:`MAY_IMPORT`, and a removed one has none."""
    assert {room(path) for path in FILES} == MAY_IMPORT.keys()


FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "ray", "torchft"}


def test_only_addresses_import_a_framework() -> None:
    """Their shared code serves mirrored packages alike (lightning_utilities belongs to none of them). The room for
    Accelerate has three files that do, and its other files are read without; tools has one, for accelerate's
    launcher."""
    addresses = {"lightning", "pytorch_lightning", "fabric", "lightning_fabric", "ray", "launch"}
    others = {PACKAGE / "accelerate" / f"{name}.py" for name in ("accelerator", "replicas", "replacement")}
    others |= {PACKAGE / "tools" / "launching.py"}
    for path in FILES:
        if room(path) not in addresses and path not in others:
            assert not FRAMEWORKS & {name.split(".")[0] for name in imports(path)}, path


def test_importing_it_imports_no_framework() -> None:
    names = ("lightning", "pytorch_lightning", "megastrategy.data", "megastrategy.pipeline", "megastrategy.tools")
    names += ("fsspec", "torch.distributed.checkpoint", "accelerate", "transformers")
    code = f"import sys, megastrategy; print([m for m in {names} if m in sys.modules], megastrategy.data.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] megastrategy.data"


WITHOUT = """
import sys
import torch
import megastrategy.accelerate, megastrategy.fabric, megastrategy.lightning
for door in (megastrategy.fabric, megastrategy.lightning):
    assert door.MegatronDDPStrategy().replicas is None
accelerator = megastrategy.accelerate.Accelerator(cpu=True)
module = torch.nn.Linear(2, 1)
accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
assert accelerator.megatron_ddp_plugin.replicas is None
unused = ("torchft", "megastrategy.core.module.experts")
assert not [name for name in sys.modules if name.startswith(unused)]
"""


def test_experts_and_replicas_are_imported_when_used() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)
