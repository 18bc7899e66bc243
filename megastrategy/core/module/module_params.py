"""The parameters and buffers of a module that torch DDP would reduce and broadcast.

[Note: what torch DDP calls a parameter]
torch DDP asks each module of ``named_modules()`` for its own parameters. So an overridden ``named_parameters()`` of the
whole module, by which user code hides callbacks or a frozen guide, hides nothing from it, and may have any signature.
What the module names in ``_ddp_params_and_buffers_to_ignore`` is each rank's own, such as a part of a table: neither
broadcast nor reduced, and stepped on its rank. torch's two loops name a parameter of the outermost module differently:
``"w"`` in the list leaves it out of the broadcast, and ``".w"`` out of the reduction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn
from torch.nn import Parameter

IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignored_names(module: nn.Module) -> frozenset[str]:
    """The names that a module, which is about to be wrapped, asks to leave alone."""
    return frozenset(getattr(module, IGNORED, ()))


def named_params(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Parameter]:
    """The parameters to be reduced once they require gradients, by their first names; see [Note: what torch DDP calls a
    parameter]."""
    found: dict[int, tuple[str, Parameter]] = {}
    for prefix, key, param in _own_params(module):
        # A shared one is left alone only if each of its names is.
        if f"{prefix}.{key}" not in ignored:
            found.setdefault(id(param), (_joined(prefix, key), param))
    return dict(found.values())


def broadcast_params(module: nn.Module, ignored: Collection[str]) -> list[Parameter]:
    """The parameters that become rank 0's when the module is wrapped."""
    first = {id(param): (_joined(prefix, key), param) for prefix, key, param in reversed([*_own_params(module)])}
    return [param for name, param in reversed(first.values()) if name not in ignored]


def named_buffers(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """The buffers that become rank 0's, by name."""
    return {name: buffer for name, buffer in nn.Module.named_buffers(module) if name not in ignored}


def keys_ignored(prefix: str, buffers: Collection[str], ignored: Collection[str]) -> frozenset[str]:
    """The keys of a module's own buffers, of a module of this name, that are left alone."""
    return frozenset(key for key in buffers if _joined(prefix, key) in ignored) if ignored else frozenset()


def _own_params(module: nn.Module) -> Iterator[tuple[str, str, Parameter]]:
    """The prefix, key and parameter of each module's own."""
    for prefix, child in module.named_modules():
        overridden = getattr(child.named_parameters, "__func__", None) is not nn.Module.named_parameters
        own = child.named_parameters(recurse=False) if overridden else child._parameters.items()
        for key, param in own:
            if param is not None:
                yield prefix, key, param


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
