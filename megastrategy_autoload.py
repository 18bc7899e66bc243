"""Makes the strategy names known to Lightning without importing Lightning: on ``import megastrategy``, and without it.

torch calls the entry points of the group ``torch.backends`` at the end of ``import torch``. This package's is
:func:`register_strategy_names`, so in an environment that has it installed ``Trainer(strategy="megatron_ddp")`` works
in a script that never says ``import megastrategy``. It is a convenience: ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` in the
environment turns it off (for all of torch's extensions), and ``import megastrategy`` then does the same.

Since every ``import torch`` of that environment comes through here, this module stands outside the package (importing
a package imports torch and the engine), needs the standard library alone, and lets no error of its own out.

Lightning is four packages, in two pairs that know nothing of each other. Each has a registry, which exists once its
``strategies`` are imported. Where they are already, the names are added at once; for the others a finder at the front
of ``sys.meta_path`` adds them at the end of that import, each time it happens. Between times it costs an import one
look-up in a dictionary. What is registered is a factory, so a strategy is imported when a Trainer or Fabric asks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron_ddp": ("Megatron-LM's data parallelism", {}),
    "megatron_ddp_all_reduce": (
        "Megatron-LM's data parallelism with an all-reduce and a whole optimizer on every rank",
        {"use_distributed_optimizer": False},
    ),
}
"""Beginnings of names: what each is, and the options that it stands for. The second is for those who can pass only a
string: where an optimizer is refused, it is the way out."""

_ENDINGS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""Ends of Lightning's names for torch DDP, for those who put "megatron_" in front of the one they have."""

_NAMES = {
    kind + ending + end: (what, method, {**options, **more})
    for kind, (what, options) in _KINDS.items()
    for ending, method in _ENDINGS.items()
    for end, more in _OPTIONS.items()
}
START_METHODS = {name: method for name, (_, method, _) in _NAMES.items()}
"""The names, each with how its processes are started."""

DOORS = {
    "lightning.pytorch": "megastrategy.lightning",
    "pytorch_lightning": "megastrategy.pytorch_lightning",
    "lightning.fabric": "megastrategy.fabric",
    "lightning_fabric": "megastrategy.lightning_fabric",
}
"""Packages of Lightning: for each the module with the ``MegatronDDPStrategy`` that is made for it."""

_REGISTRIES = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}

_log = logging.getLogger(__name__)


def register_strategy_names() -> None:
    """Adds the names now and whenever one of Lightning's packages is imported. May be called again; never raises."""
    try:
        for target in _REGISTRIES:
            if target in sys.modules:
                _add_names(sys.modules[target])
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
    except Exception:  # noqa: BLE001 - `import torch` goes on, whatever this was
        _say_why("the strategy names could not be registered")


def _add_names(module: ModuleType) -> None:
    try:
        registry = getattr(module, _REGISTRIES[module.__name__])
        door = DOORS[module.__name__.removesuffix(".strategies")]
        for name, (what, start_method, options) in _NAMES.items():
            if name not in registry:
                registry.register(
                    name,
                    functools.partial(_make_strategy, door),
                    description=f"{what}, started by {start_method!r}",
                    start_method=start_method,
                    **options,
                )
    except Exception:  # noqa: BLE001 - `import lightning` goes on, whatever its registry looks like
        _say_why(f"the strategy names could not be registered in {module.__name__}")


def _make_strategy(door: str, **arguments: Any) -> Any:
    return importlib.import_module(door).MegatronDDPStrategy(**arguments)


def _say_why(text: str) -> None:
    """Who imported the package asked for the names; who has it installed merely, may not even know about it."""
    _log.log(logging.WARNING if "megastrategy" in sys.modules else logging.DEBUG, text, exc_info=True)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds those modules as the other finders would, and adds the names after they were executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        try:
            for finder in list(sys.meta_path):
                spec = None if isinstance(finder, _AfterImport) else finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader)
                    return spec
        except Exception:  # noqa: BLE001 - Python asks the others next, and whose error it was raises it again
            _say_why(f"{fullname} could not be found")
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, with something to do afterwards; the module that it loads keeps no trace of it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _add_names(module)

    def __getattr__(self, name: str) -> Any:
        """Who looks for a module's source without importing it asks its loader."""
        return getattr(self._loader, name)
