"""The ways in which the engine keeps gradients and reduces them, as options, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., None])

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


def each_of(table: Mapping[str, Mapping[str, Any]]) -> Callable[[F], F]:
    """Parametrises a test by ``options`` and ``size``: each engine on two ranks and on one.

    ``make test`` has the second of the table on one rank, the others on two.
    """

    def parametrised(test: F) -> F:
        of_sizes = pytest.mark.parametrize("size", [2, 1])(test)
        return pytest.mark.parametrize("options", table.values(), ids=table)(of_sizes)

    return parametrised


COMMON = engines("reduce-scatter", "forward", "pooled", "all-reduce", bucket_size=100)
all_options = pytest.mark.parametrize("options", COMMON.values(), ids=COMMON)
both_numbers_of_ranks = pytest.mark.parametrize("size", [1, 2])
