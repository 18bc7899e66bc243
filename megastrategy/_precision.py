"""What a Trainer's precision plugin does during a fit: the engine's clipping, and an eye on who goes through ``.grad``.

Imports neither ``lightning.pytorch`` nor ``pytorch_lightning``, like :mod:`megastrategy._trainer_strategy`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from ._strategy_class import ALL_REDUCE_OPTION
from .core import DistributedDataParallel

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.types import Steppable
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object

GRAD_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""The hooks in which users look at gradients, or change them."""


class EnginePrecision(_Base):
    """Stands between a plugin's own class and Lightning's ``Precision`` for the time of a fit; see :func:`lend`."""

    _lent_by: type[_Base]

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

    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        with _watched(module, GRAD_HOOKS[:1]):
            return super().post_backward(tensor, module)

    def _after_closure(self, model: pl.LightningModule, optimizer: Steppable) -> None:
        with _watched(model, GRAD_HOOKS[1:]):
            super()._after_closure(model, optimizer)


def lend(plugin: _Base, engine_precision: type[EnginePrecision]) -> None:
    """Gives a plugin the engine's clipping until :func:`take_back`.

    The engine's functions come in the method resolution order after the plugin's class and everything a user derived
    it from, and before Lightning's own ``Precision``: what a user overrides is called, and ``super()`` inside of it
    finds the engine. The new class has the old one's name, under which checkpoints store a plugin's state.
    """
    kind: type = type(plugin)
    if isinstance(plugin, engine_precision):
        return
    bases: tuple[type, ...] = (engine_precision,) if issubclass(engine_precision, kind) else (kind, engine_precision)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_lent_by": kind}
    plugin.__class__ = types.new_class(kind.__name__, bases, exec_body=lambda namespace: namespace.update(names))


def take_back(plugin: _Base, engine_precision: type[EnginePrecision]) -> None:
    """The plugin is again of the class that it was of."""
    if isinstance(plugin, engine_precision):
        plugin.__class__ = plugin._lent_by  # type: ignore[assignment]


class HookWatch(TorchFunctionMode):
    """Sees ``param.grad`` being read, or dropped, where a reduce-scatter has left it None.

    Accesses to ``Tensor.grad`` pass through a torch function mode, so nothing needs to be patched, and outside the
    hooks that are run inside this mode nothing costs anything. A read means that the user misses a gradient that is
    there: warned about once. ``param.grad = None`` is how some models leave parameters out of a step (DINO's last layer
    in its first epochs): the gradient is dropped, as under "ddp".

    Args:
        model: the wrapped model, with a sharded optimizer.
        bases: the classes (of module and callback) whose own, empty hooks are not worth a watch.
    """

    def __init__(self, model: DistributedDataParallel, bases: Iterable[type]) -> None:
        super().__init__()
        self._model = model
        self._indices: dict[int, int] = {}
        self._unhooked = {id(getattr(base, name)) for base in bases for name in GRAD_HOOKS if hasattr(base, name)}
        self._warned = False
        self.found = False
        """Whether anything was read or dropped that is there and looks as if it were not."""

    def is_needed(self, owners: Iterable[object], hooks: Iterable[str]) -> bool:
        """Whether any of the owners has one of the hooks for its own."""
        for owner in owners:
            for name in hooks:
                hook = getattr(owner, name, None)
                if hook is not None and id(getattr(hook, "__func__", hook)) not in self._unhooked:
                    return True
        return False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        reads = func == _GET
        drops = func == _DELETE or (func == _SET and args[1] is None)
        if not (reads or drops) or _is_engine(caller.f_globals):
            return func(*args, **(kwargs or {}))
        drops |= caller.f_code.co_name == "zero_grad"  # of the raw module, which looks before it drops
        index = self._index_of(args[0])
        grads = self._model.grad_buffers
        hidden = index is not None and args[0].grad is None and grads.has_grad[index]
        result = func(*args, **(kwargs or {}))
        if hidden and index is not None:
            self.found = True
            if drops:
                grads.clear([index])
            elif not self._warned:
                self._warned = True
                self._warn(self._model.layout.params[index].name)
        return result

    def _index_of(self, tensor: Tensor) -> int | None:
        if len(self._indices) != len(self._model.params):  # parameters may join in mid-training
            self._indices = {id(param): index for index, param in enumerate(self._model.params)}
        return self._indices.get(id(tensor))

    @staticmethod
    def _warn(name: str) -> None:
        frame, places = sys._getframe(2), (*GRAD_HOOKS, "training_step")
        while frame.f_code.co_name not in places and frame.f_back is not None:
            frame = frame.f_back
        hook = frame.f_code.co_name if frame.f_code.co_name in places else "a hook"
        rank_zero_warn(
            f"{hook} read .grad of {name!r}, which is None although the parameter has a gradient: after a "
            "reduce-scatter every rank holds its own shard of it. A norm or a clipping computed from .grad misses it. "
            "Clip with self.clip_gradients(optimizer, ...) or optimizer.clip_grad_norm_(...), look at gradients with "
            f"self.trainer.strategy.full_grad(param) or .grad_norm(), or pass {ALL_REDUCE_OPTION}, which leaves .grad "
            "as under 'ddp'"
        )


TRAINS_NOTHING = (
    "gradients were reduced twice, and no optimizer that the strategy knows has stepped with them. After a "
    "reduce-scatter .grad is None, so an optimizer that was made elsewhere finds nothing to do: return it from "
    "configure_optimizers (in Fabric: give it to setup or setup_optimizers), or pass " + ALL_REDUCE_OPTION
)


def is_compiled(model: Module) -> bool:
    """Whether torch.compile may trace any of it, which it would have to do again inside a mode."""
    return any(
        child._compiled_call_impl is not None or hasattr(child, "_orig_mod") or getattr(child, "_compiler_ctx", None)
        for child in model.modules()
    )


_GRAD: Any = Tensor.grad  # the descriptor
_GET, _SET, _DELETE = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__


def _is_engine(namespace: dict[str, Any]) -> bool:
    """Whether code of this package runs there: what it does to ``.grad`` in a hook (clipping) is no user's doing."""
    return str(namespace.get("__name__", "")).startswith(f"{__package__}.")


def _watched(module: pl.LightningModule, hooks: Iterable[str]) -> contextlib.AbstractContextManager[object]:
    trainer = module.trainer
    watch: HookWatch | None = getattr(trainer.strategy, "hook_watch", None)
    if watch is None or not watch.is_needed((module, *trainer.callbacks), hooks):  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return watch
