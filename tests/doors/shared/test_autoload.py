"""The names without ``import megastrategy``: what torch's entry point does, and that it can do no harm."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import megastrategy_autoload

from ..python_processes import run_python

NAMES = set(megastrategy_autoload.START_METHODS)


def test_torch_finds_the_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="torch.backends")
    assert "megastrategy" in entries.names, "the installed metadata is older than pyproject.toml: pip install -e ."
    assert entries["megastrategy"].load() is megastrategy_autoload.register_strategy_names


def test_it_needs_the_standard_library_alone() -> None:
    """It runs in every ``import torch``, also where torch is all that works."""
    tree = ast.parse(Path(megastrategy_autoload.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert names
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.fresh
def test_a_script_that_imports_nothing_of_ours_has_the_names(tmp_path: Path) -> None:
    """In all four packages; until a strategy is asked for, only the one small module is imported."""
    code = """
        import sys

        def ours():
            return [name for name in sys.modules if name.startswith("megastrategy")]

        import torch
        assert ours() == ["megastrategy_autoload"], ours()
        assert not [name for name in sys.modules if name.startswith(("lightning", "pytorch_lightning"))]

        import lightning.pytorch, lightning.fabric, pytorch_lightning, lightning_fabric
        from lightning.fabric.cli import _get_supported_strategies
        assert "megatron_ddp" in _get_supported_strategies(), "fabric run --strategy=megatron_ddp"
        assert ours() == ["megastrategy_autoload"], ours()

        options = {"strategy": "megatron_ddp", "accelerator": "cpu", "devices": 2}
        for user, door in {
            lightning.pytorch.Trainer: "lightning",
            pytorch_lightning.Trainer: "pytorch_lightning",
            lightning.fabric.Fabric: "fabric",
            lightning_fabric.Fabric: "lightning_fabric",
        }.items():
            assert type(user(**options).strategy).__module__ == f"megastrategy.{door}"
            all_reduce = user(**options | {"strategy": "megatron_ddp_all_reduce"}).strategy
            assert not all_reduce.config.use_distributed_optimizer
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path, autoload=True)


@pytest.mark.fresh
@pytest.mark.long
def test_the_switch_turns_it_off_and_the_import_still_works(tmp_path: Path) -> None:
    """TORCH_DEVICE_BACKEND_AUTOLOAD=0; and what the entry point costs: the module itself, nothing that it pulls in."""
    code = """
        import sys
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import StrategyRegistry
        assert not [name for name in sys.modules if name.startswith("megastrategy")]
        assert "megatron_ddp" not in StrategyRegistry

        before = set(sys.modules)
        import megastrategy_autoload
        megastrategy_autoload.register_strategy_names()
        assert set(sys.modules) - before == {"megastrategy_autoload"}
        assert "megatron_ddp" in StrategyRegistry
        for name in megastrategy_autoload.START_METHODS:
            StrategyRegistry.remove(name)

        import megastrategy
        pl.Trainer(strategy="megatron_ddp", accelerator="cpu", devices=2)
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path, autoload=False)


# --- the finder, on a package of the test's own ----------------------------------------------------------------------

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description, **init_params):
        self[name] = strategy

StrategyRegistry = Registry()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the source of ``imitation.strategies``, which the finder waits for here as if it were Lightning's."""
    monkeypatch.setitem(megastrategy_autoload._REGISTRIES, "imitation.strategies", "StrategyRegistry")
    monkeypatch.setitem(megastrategy_autoload.DOORS, "imitation", "megastrategy.imitation")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # sources of one size, written within a second
    package = tmp_path / "imitation"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def write(source: str) -> None:
        (package / "strategies.py").write_text(source)
        forget()

    def forget() -> None:
        for name in ("imitation.strategies", "imitation"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    yield write
    forget()


def import_it() -> ModuleType:
    return importlib.import_module("imitation.strategies")


def test_nothing_comes_out_of_the_entry_point(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its exception would be an error of ``import torch``."""
    monkeypatch.setattr(sys, "meta_path", ())  # nothing can be inserted
    with caplog.at_level(logging.DEBUG, "megastrategy_autoload"):
        megastrategy_autoload.register_strategy_names()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [AttributeError]


def test_a_name_that_is_taken_stays_as_it_is(write: Callable[[str], None]) -> None:
    write(f"{REGISTRY}\nStrategyRegistry['megatron_ddp'] = 'theirs'")
    registry = import_it().StrategyRegistry
    assert registry["megatron_ddp"] == "theirs"
    assert set(registry) == NAMES
