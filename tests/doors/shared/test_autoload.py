"""The names without ``import megastrategy``: what torch's entry point does, and that it can do no harm."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

import megastrategy_autoload

from ..python_processes import run_python


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
