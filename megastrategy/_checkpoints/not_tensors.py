"""The values in the states of modules that are no tensors, in directories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

NOT_TENSORS = "megatron_ddp_not_tensors"
"""In ``EXTRA_FILE``, by the key of each module: the values in its state that are no tensors (``_extra_state``). The
format of directories would flatten them: empty dictionaries are lost in it, and keys become strings."""


def not_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of the file beside the tensors for the states of modules, by key; empty if they are tensors alone."""
    found = {
        key: {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for key, values in state.items()
    }
    found = {key: values for key, values in found.items() if values}
    return {NOT_TENSORS: found} if found else {}
