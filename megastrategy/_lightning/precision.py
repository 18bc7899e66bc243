"""Puts the engine's clipping into a Trainer's precision plugin for a fit.

Imports neither ``lightning.pytorch`` nor ``pytorch_lightning``, like :mod:`megastrategy._lightning.trainer_strategy`.
"""

from __future__ import annotations

import copyreg
import types
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object  # each of two packages puts its own there


class EnginePrecision(_Base):
    """Comes between a plugin's class and Lightning's ``Precision`` during a fit; see :func:`add_engine_clipping`."""

    _plugin_class: type[_Base]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copies and pickles as the plugin's own class, whose name this class has: pickle finds classes by name."""
        twin = object.__new__(self._plugin_class)
        twin.__dict__.update(self.__dict__)
        reduced: Any = twin.__reduce_ex__(protocol)
        make, *rest = reduced
        # pickle compares the class that __newobj__ gets with that of the object
        return (_new if make is copyreg.__newobj__ else make, *rest)  # type: ignore[attr-defined]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        if hasattr(optimizer, "clip_grad_value_"):
            optimizer.clip_grad_value_(clip_val)
        else:
            super().clip_grad_by_value(optimizer, clip_val)


def _new(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def add_engine_clipping(plugin: _Base, engine_precision: type[EnginePrecision]) -> None:
    """Gives a plugin the engine's clipping until :func:`remove_engine_clipping`.

    The engine's functions come in the method resolution order after the plugin's class and its bases, and before
    Lightning's own ``Precision``. So a user's override is called, and ``super()`` inside of it finds the engine. The
    new class has the old one's name, under which checkpoints store a plugin's state.
    """
    kind: type = type(plugin)
    if isinstance(plugin, engine_precision):
        return
    bases: tuple[type, ...] = (engine_precision,) if issubclass(engine_precision, kind) else (kind, engine_precision)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_plugin_class": kind}
    plugin.__class__ = types.new_class(kind.__name__, bases, exec_body=lambda namespace: namespace.update(names))


def remove_engine_clipping(plugin: _Base, engine_precision: type[EnginePrecision]) -> None:
    """Restores the class that a plugin had before :func:`add_engine_clipping`."""
    if isinstance(plugin, engine_precision):
        plugin.__class__ = plugin._plugin_class  # type: ignore[assignment]
