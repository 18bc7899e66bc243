"""Plain fits: accumulation, validation between, several epochs."""

from __future__ import annotations

from typing import Any

from ..fits import Fit, fit
from ..matrix import Feature


def plain(name: str, strategy_options: dict[str, Any], **trainer_options: Any) -> Fit:
    return fit(name, strategy_options=strategy_options, **trainer_options)


FEATURES = [
    Feature("Training", "fit with validation", plain),
    Feature("Training", "accumulate_grad_batches, short last window", plain, {"accumulate_grad_batches": 3}),
]
