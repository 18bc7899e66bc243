"""Shows the options of the classes of all doors as a signature, and the package that each class is made for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast, get_type_hints

from torch.nn import Module

from megastrategy_autoload import DOORS

from .._checkpoints.directories import StateDictType
from .._replicas import Replicas
from ..core import ConfigOptions, DistributedDataParallelConfig, config_from_arguments

_Class = TypeVar("_Class", bound=type)

_TORCH_DDP_ARGUMENTS = {
    "bucket_cap_mb": None,
    "gradient_as_bucket_view": True,
    "ddp_comm_hook": None,
    "ddp_comm_wrapper": None,
}
"""Arguments of torch DDP that are understood and are no fields of the config, with their defaults."""


class StrategyOptions(ConfigOptions, total=False):
    """The config's fields and those arguments of torch DDP, for type checkers."""

    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    ddp_comm_hook: Callable[..., Any] | None
    ddp_comm_wrapper: Callable[..., Any] | None


ALL_REDUCE_OPTION = 'strategy="megatron_ddp_all_reduce" or MegatronDDPStrategy(use_distributed_optimizer=False)'
"""The way to an all-reduce for users of a Trainer or Fabric, in errors that it solves."""


NO_SCALER = "choose a precision without a scaler, like 'bf16-mixed'"
"""The way to train without gradient scaling for users of a Trainer or Fabric, in errors."""


SAVE_ON_ALL_RANKS = (
    "Call trainer.save_checkpoint(...) on every rank, not under `if trainer.is_global_zero:`: rank 0 writes"
)
"""The way to save for users of a Trainer, in errors."""


def strategy_class(cls: _Class) -> _Class:
    """Decorates a class that takes the config's fields as ``**options`` and derives from a package's ``DDPStrategy``.

    ``help()``, an editor and LightningCLI see a field only if it is in the signature of ``__init__``. It should not be
    written a second time, so the signature is made from the config. The package's own types are taken from its
    ``DDPStrategy``, since they are other classes in each package.
    """
    initialise: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(initialise)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: N807 - it becomes the method
        initialise(self, *arguments, **options)

    signature = _signature(cls, initialise)
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {name: item.annotation for name, item in signature.parameters.items() if name != "self"}
    __init__.__annotations__["return"] = None
    package = next(name for name, door in DOORS.items() if door == cls.__module__)

    def __repr__(self: Any) -> str:  # noqa: N807
        return _describe(self, package)

    cls.__init__ = __init__  # type: ignore[misc]
    cls.__repr__ = __repr__  # type: ignore[assignment]
    return cls


def read_options(strategy: object, options: StrategyOptions) -> DistributedDataParallelConfig:
    """Makes the configuration out of a strategy's options."""
    # of a user's subclass those of ours
    ours = next(cls for cls in type(strategy).__mro__ if hasattr(vars(cls).get("__init__"), "__signature__"))
    return config_from_arguments(cast(dict[str, Any], options), list(inspect.signature(ours).parameters))


def _signature(cls: type, initialise: Any) -> Signature:
    base = next(base for base in cls.__mro__ if base.__name__ == "DDPStrategy")
    not_inherited = {
        "state_dict_type": StateDictType,
        "tensor_parallel_size": int,
        "pipeline_parallel_size": int,
        "stage_order": Sequence[int] | None,
        "context_parallel_size": int,
        "expert_parallel_size": int,
        "replicas": Replicas | None,
        "parallelize_fn": Callable[..., Module] | None,
    }
    types: dict[str, Any] = get_type_hints(base.__init__) | not_inherited  # type: ignore[misc]
    parameters = [
        item.replace(annotation=types.get(item.name, Parameter.empty))
        for item in inspect.signature(initialise).parameters.values()
        if item.kind is not Parameter.VAR_KEYWORD
    ]
    option_types = get_type_hints(StrategyOptions)
    defaults = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=option_types[name])
        for name, default in {**defaults, **_TORCH_DDP_ARGUMENTS}.items()
    ]
    return Signature([*parameters, *options], return_annotation=None)


def _describe(strategy: Any, package: str) -> str:
    """Names the classes for other packages, too. Lightning shows a strategy that it refuses, as one made for another of
    its packages is, so the remedy is in its ``repr``."""
    options = ", ".join(
        f"{field.name}={getattr(strategy.config, field.name)!r}"
        for field in dataclasses.fields(strategy.config)
        if getattr(strategy.config, field.name) != field.default
    )
    other_doors = ", ".join(f"{door}.MegatronDDPStrategy for {name}" for name, door in DOORS.items() if name != package)
    cls = type(strategy)
    return f"<{cls.__module__}.{cls.__qualname__}({options}) made for {package}; elsewhere use {other_doors}>"
