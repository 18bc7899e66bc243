"""Makes the strategy names known to Lightning without importing Lightning.

Lightning's registry exists once ``lightning.pytorch.strategies`` is imported. If it is already, the names are added
at once; if not, a finder at the front of ``sys.meta_path`` adds them at the end of that import. The finder answers
for that one module and is gone afterwards. What is registered is a factory, so the strategy itself is imported when a
Trainer asks for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

START_METHODS = {
    "megatron_ddp": "popen",
    "megatron_ddp_spawn": "spawn",
    "megatron_ddp_fork": "fork",
    "megatron_ddp_notebook": "fork",
}
_TARGET = "lightning.pytorch.strategies"


def register_strategy_names() -> None:
    """Adds the names now, or as soon as Lightning is imported. May be called again."""
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _add_names(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _add_names(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    for name, start_method in START_METHODS.items():
        if name not in registry:
            registry.register(
                name,
                _make_strategy,
                description=f"Megatron-LM's data parallelism, started by {start_method!r}",
                start_method=start_method,
            )


def _make_strategy(**arguments: Any) -> Any:
    from .lightning import MegatronDDPStrategy

    return MegatronDDPStrategy(**arguments)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the one module as the other finders would, and adds the names after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # leave no trace of this loader in the module
        self._loader.exec_module(module)
        _add_names(module)
