"""The keys of this package in checkpoints; the values in module states that are not tensors, in directories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MAIN_PARAMS_KEY = "megatron_ddp_main_params"
"""Key in a checkpoint of 16-bit weights: the full fp32 main params by parameter name, in a list by optimizer (Trainer)
or by the optimizer's key in the saved state (Fabric)."""

NOT_TENSORS = "megatron_ddp_not_tensors"
"""The key in ``EXTRA_FILE`` of values in module states that are not tensors (``_extra_state``), by module.

The format of directories would flatten them, drop empty dictionaries and make strings of keys."""


def not_tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entry of ``EXTRA_FILE`` for the states of modules, by key; empty if they contain only tensors."""
    values_by_key = {
        key: {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for key, values in state.items()
    }
    values_by_key = {key: values for key, values in values_by_key.items() if values}
    return {NOT_TENSORS: values_by_key} if values_by_key else {}
