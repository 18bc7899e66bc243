"""The ways in which the engine keeps gradients and reduces them, as options, by name."""

from __future__ import annotations

from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "reduce-scatter": {},
    "late": {"overlap_grad_reduce": False},
    "forward": {"overlap_param_gather": True},
    "pooled": {"grad_buffer": "pooled"},
    "all-reduce": {"use_distributed_optimizer": False},
    "late all-reduce": {"use_distributed_optimizer": False, "overlap_grad_reduce": False},
    "flattened": {"use_distributed_optimizer": False, "use_contiguous_buffers": False, "overlap_grad_reduce": False},
    "instances": {"num_distributed_optimizer_instances": 2},
}


def engines(*names: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Returns some of them, with further options."""
    return {name: {**ENGINES[name], **options} for name in names}


COMMON = engines("reduce-scatter", "forward", "pooled", "all-reduce", bucket_size=100)
