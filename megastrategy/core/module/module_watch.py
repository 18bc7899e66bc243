"""Notices changes of a module's parameters after it was wrapped.

[Note: when a parameter was replaced]
A Parameter may move to another module or name (pruning, a parametrization). It may be removed, with its module or
without: it is unused from then on, as under torch DDP. Added modules (a copy that averages the weights) are ignored
until an optimizer includes their parameters. But if a parameter is removed and a trainable one is added, it was
replaced: the optimizer would step the old one, and the new one would be neither reduced nor stepped.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from ..errors import ParameterChangedError
from .module_params import keys_ignored, named_params


class ModuleWatch:
    """Records which module holds each parameter, and the modules' children.

    ``top``: the wrapper's dictionary of modules, with the module under ``"module"``. ``frozen``: the parameters that do
    not require gradients, without those that were laid out.
    """

    def __init__(self, top: dict[str, nn.Module | None], ignored: frozenset[str] = frozenset()) -> None:
        self.frozen: list[Parameter] = []
        self._ignored = ignored
        self._top = top
        self._params: list[Parameter] = []
        self._names: list[str] = []
        self._holders: list[dict[str, Parameter | None]] = []  # the dictionary of each parameter
        self._keys: list[str] = []  # its key there
        self._removed: set[int] = set()  # ids of parameters outside of the module at the last update
        self._others: list[Parameter] = []  # trainable ones that are not laid out
        # Those in modules of torch.jit, whose containers are no dictionaries: container, key, parameter.
        self._scripted: list[tuple[Any, str, Parameter]] = []
        self._buffers: list[tuple[Any, frozenset[str]]] = []  # each module's, and the keys that are ignored
        # The dictionary of children of each module that has some, and a copy of it.
        self._children: list[dict[str, nn.Module | None]] = []
        self._children_seen: list[dict[str, nn.Module | None]] = []

    def has_changed(self) -> bool:
        """Whether :meth:`update` is due. Only compares objects, since it runs before every forward."""
        found = map(dict.get, self._holders, self._keys)
        return (
            any(map(operator.is_not, found, self._params))
            or self._children != self._children_seen
            or any(holder[key] is not param for holder, key, param in self._scripted)
        )

    def is_overridden(self) -> bool:
        """Whether ``torch.func.functional_call`` is running, which puts tensors in the places of Parameters for one
        call of the module. Whatever else has changed is found in the next forward."""
        present = map(dict.get, self._holders, self._keys)
        return any(isinstance(tensor, Tensor) and not isinstance(tensor, Parameter) for tensor in present)

    def update(self, params: Sequence[Parameter]) -> None:
        """Finds the modules that hold ``params`` now: those of the last update first, then new ones.

        Raises:
            ParameterChangedError: if one of them was replaced; see [Note: when a parameter was replaced].
        """
        module = self._top["module"]
        assert module is not None, "torch refuses None for a module"
        children = [self._top]
        buffers: list[tuple[Any, frozenset[str]]] = []
        scripted: list[tuple[Any, str, Parameter]] = []
        places: dict[int, tuple[dict[str, Parameter | None], str]] = {}
        for prefix, child in module.named_modules():
            # torch.jit's modules keep their children. A module without children may get some, in which case a
            # parameter is missing from its own.
            if child._modules and isinstance(child._modules, dict):
                children.append(child._modules)
            buffers.append((child._buffers, keys_ignored(prefix, child._buffers, self._ignored)))
            own = child._parameters
            for key, param in own.items():
                if not isinstance(own, dict):
                    scripted.append((own, key, param))
                    places.setdefault(id(param), ({key: param}, key))
                places.setdefault(id(param), (own, key))
        present = named_params(module, self._ignored)
        names = {id(param): name for name, param in present.items()}
        for name, param in present.items():  # one that only named_parameters() of a module returns
            places.setdefault(id(param), ({name: param}, name))
        wanted = set(map(id, params))
        known = set(map(id, self._others))
        unwanted = [param for param in present.values() if id(param) not in wanted]
        others = [param for param in unwanted if param.requires_grad]
        added = [names[id(param)] for param in others if id(param) not in known]
        removed = {number: param for number, param in enumerate(params) if id(param) not in places}
        for number, param in removed.items():
            name = names[id(param)] = self._names[number]
            if added and id(param) not in self._removed:
                raise _replaced(name, added[0])
            places[id(param)] = {name: param}, name  # a place of its own, so that it is not missed again
        self._removed = set(map(id, removed.values()))
        self.frozen = [p for p in unwanted if not p.requires_grad]
        self._others = others
        self._buffers = buffers
        self._params, self._names = list(params), [names[id(param)] for param in params]
        self._holders = [places[id(param)][0] for param in params]
        self._keys = [places[id(param)][1] for param in params]
        self._children, self._children_seen = children, [dict(each) for each in children]
        self._scripted = [place for place in scripted if id(place[2]) in wanted]

    def buffers(self) -> list[Tensor]:
        """Returns the module's buffers, each once, without a walk of its modules, which would take milliseconds."""
        found = {
            id(buffer): buffer
            for buffers, ignored in filter(operator.itemgetter(0), self._buffers)
            for key, buffer in buffers.items()
            if buffer is not None and key not in ignored
        }
        return list(found.values())


def _replaced(name: str, added: str) -> ParameterChangedError:
    what = "another object" if added == name else f"{added!r}"
    return ParameterChangedError(
        f"parameter {name!r} was replaced by {what} (load_state_dict(assign=True), or an assignment to the module or "
        "one of its submodules), which would not be trained.\n"
        "Load in place (assign=False, or param.data = x), or wrap the model again, with a new optimizer. To "
        "torch.func.functional_call pass tensors computed from the model's parameters, not new Parameters"
    )
