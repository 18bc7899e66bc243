"""The parameters and buffers of a module that torch DDP would reduce and broadcast.

[Note: which parameters torch DDP reduces]
torch DDP reads the own parameters of each module of ``named_modules()``. So an overridden ``named_parameters()`` of the
outermost module, with which user code hides callbacks or a frozen model, hides nothing from it. Names in
``_ddp_params_and_buffers_to_ignore`` belong to each rank, such as a part of a table: they are neither broadcast nor
reduced, and each rank steps its own. torch's two loops name a parameter of the outermost module differently: ``"w"`` in
the list leaves it out of the broadcast, and ``".w"`` out of the reduction. Here both are expected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn
from torch.nn import Parameter

IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Returns the names of parameters and buffers that the module leaves to each rank.

    Raises:
        ValueError: if torch DDP would only broadcast, or only reduce a parameter.
    """
    names = frozenset(getattr(module, IGNORED, ()))
    for key in module._parameters.keys() if names else ():
        if (key in names) != (f".{key}" in names):
            raise ValueError(
                f"{IGNORED} has one of {key!r}, which torch DDP leaves out of the broadcast, and '.{key}', which it "
                "leaves out of the reduction: list both, or none"
            )
    return names


def named_params(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Parameter]:
    """Returns the parameters that are broadcast, and reduced once they require gradients, by their first names; see
    [Note: which parameters torch DDP reduces]."""
    found: dict[int, tuple[str, Parameter]] = {}
    for prefix, key, param in _own_params(module):
        # A shared one is ignored only if each of its names is.
        name = _joined(prefix, key)
        if name not in ignored:
            found.setdefault(id(param), (name, param))
    return dict(found.values())


def named_buffers(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Returns the buffers that rank 0 broadcasts, by name."""
    return {name: buffer for name, buffer in nn.Module.named_buffers(module) if name not in ignored}


def keys_ignored(prefix: str, buffers: Collection[str], ignored: Collection[str]) -> frozenset[str]:
    """Returns the keys of ignored buffers among a module's own; ``prefix``: the module's name."""
    return frozenset(key for key in buffers if _joined(prefix, key) in ignored) if ignored else frozenset()


def _own_params(module: nn.Module) -> Iterator[tuple[str, str, Parameter]]:
    """Yields the module's name, key and parameter for the own parameters of each module."""
    for prefix, child in module.named_modules():
        overridden = getattr(child.named_parameters, "__func__", None) is not nn.Module.named_parameters
        own = child.named_parameters(recurse=False) if overridden else child._parameters.items()
        for key, param in own:
            if param is not None:
                yield prefix, key, param


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
