"""Noticing what is replaced in a module after it was wrapped.

[Note: moved, gone, come, replaced]
A Parameter may move to another module or name (pruning, a parametrization), and go, with its module or alone: it is
unused from then on, as under torch DDP. Added modules (a copy that averages the weights) do not matter
until an optimizer takes their parameters in. But a parameter that goes when a trainable one comes was replaced: the
optimizer would step the old one, and the new one would be neither reduced nor stepped.
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
    """Remembers where the parameters of a module are, and which modules it is made of.

    Args:
        top: the wrapper's dictionary in which the module is called ``"module"``.
        ignored: names of parameters and buffers that are each rank's own.

    Attributes:
        frozen: the parameters that do not require gradients and are not among those looked for.
    """

    def __init__(self, top: dict[str, nn.Module | None], ignored: frozenset[str] = frozenset()) -> None:
        self.frozen: list[Parameter] = []
        self._ignored = ignored
        self._top = top
        self._params: list[Parameter] = []
        self._names: list[str] = []
        self._holders: list[dict[str, Parameter | None]] = []  # where each parameter is,
        self._keys: list[str] = []  # and its key there
        self._gone: set[int] = set()  # those of them, by id, that were in the module no more when it was looked at last
        self._others: list[Parameter] = []  # trainable ones that belong to no optimizer
        self._scripted: list[tuple[Any, str, Parameter]] = []  # those in modules of torch.jit, whose containers are no
        # dictionaries: where each is, and its key there
        self._buffers: list[tuple[Any, frozenset[str]]] = []  # each module's, and the keys that are ignored
        # of every module that has some: the dictionary of its children, and what was in it
        self._children: list[dict[str, nn.Module | None]] = []
        self._children_seen: list[dict[str, nn.Module | None]] = []

    def has_changed(self) -> bool:
        """Whether to :meth:`look` again. Compares objects and walks nothing, since it comes before every forward."""
        found = map(dict.get, self._holders, self._keys)
        return (
            any(map(operator.is_not, found, self._params))
            or self._children != self._children_seen
            or any(holder[key] is not param for holder, key, param in self._scripted)
        )

    def look(self, params: Sequence[Parameter]) -> None:
        """Finds out where ``params`` are now, those known so far first.

        Raises:
            ParameterChangedError: if one of them was replaced; see [Note: moved, gone, come, replaced].
        """
        module = self._top["module"]
        assert module is not None, "torch refuses None for a module"
        children, buffers, scripted = (
            [self._top],
            list[tuple[Any, frozenset[str]]](),
            list[tuple[Any, str, Parameter]](),
        )
        places: dict[int, tuple[dict[str, Parameter | None], str]] = {}
        for prefix, child in module.named_modules():
            # torch.jit's modules keep their children; others that have none may get some, and what was their own
            # parameter is missed there then
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
        for name, param in present.items():  # one that a module shows, and keeps elsewhere
            places.setdefault(id(param), ({name: param}, name))
        wanted, known = set(map(id, params)), set(map(id, self._others))
        unwanted = [param for param in present.values() if id(param) not in wanted]
        others = [param for param in unwanted if param.requires_grad]
        came = [names[id(param)] for param in others if id(param) not in known]
        gone = {number: param for number, param in enumerate(params) if id(param) not in places}
        for number, param in gone.items():
            name = names[id(param)] = self._names[number]
            if came and id(param) not in self._gone:
                raise _replaced(name, came[0])
            places[id(param)] = {name: param}, name  # where it cannot be lost any more
        self._gone = set(map(id, gone.values()))
        self.frozen, self._others, self._buffers = [p for p in unwanted if not p.requires_grad], others, buffers
        self._params, self._names = list(params), [names[id(param)] for param in params]
        self._holders, self._keys = (
            [places[id(param)][0] for param in params],
            [places[id(param)][1] for param in params],
        )
        self._children, self._children_seen = children, [dict(each) for each in children]
        self._scripted = [place for place in scripted if id(place[2]) in wanted]

    def buffers(self) -> list[Tensor]:
        """The module's buffers, once each; walking its modules before every forward would take milliseconds."""
        found = {
            id(buffer): buffer
            for buffers, ignored in self._buffers
            for key, buffer in buffers.items()
            if buffer is not None and key not in ignored
        }
        return list(found.values())


def _replaced(name: str, came: str) -> ParameterChangedError:
    what = "another object" if came == name else f"{came!r}"
    return ParameterChangedError(
        f"parameter {name!r} was replaced by {what} (load_state_dict(assign=True), or an assignment to the module or "
        "one of its submodules), which would not be trained. Load in place (assign=False, or param.data = x), or wrap "
        "the model again, with a new optimizer"
    )
