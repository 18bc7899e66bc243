"""Every switch of the configuration and its values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

MAY_CONTRADICT: dict[str, Sequence[Any]] = {
    "bucket_size": [None, 1, 200, 10**9],  # the default, a bucket for each parameter, several, and one
    "overlap_grad_reduce": [True, False],
    "use_distributed_optimizer": [True, False],
    "num_distributed_optimizer_instances": [1, 2],
    "use_contiguous_buffers": [True, False],
    "grad_buffer": ["contiguous", "pooled"],
    "dtype": [torch.float32, torch.bfloat16],  # the weights'; no field, but two fields are about 16 bits alone
    "grad_reduce_in_fp32": [True, False],
    "reduce_scatter_with_fp32_accumulation": [False, True],
    "find_unused_parameters": [True, False],
    "static_graph": [False, True],
    "grad_wire_dtype": [None, "bf16"],
    "offload_optimizer_states": [False, True],
}
GO_WITH_ALL: dict[str, Sequence[Any]] = {
    "overlap_param_gather": [False, True],
    "broadcast_buffers": [True, False],
    "check_for_nan_in_grad": [False, True],
}
SWITCHES = {**MAY_CONTRADICT, **GO_WITH_ALL}


def product(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
