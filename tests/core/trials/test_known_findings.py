"""An optimizer of torch's own is tried once for the same options; whatever might make a difference is tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from megastrategy.core.trials.known_findings import KnownFindings

CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Counts those of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


def asked(known: KnownFindings, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> Any:
    """The findings, and whether a trial was made for them."""
    with Operations() as operations:
        findings = known.probe(optimizer, CPU, dtype)
    return findings, operations.count > 0


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: AdamW(params(), lr=0.2), torch.float32),
        (lambda: AdamW(params(), lr=0.1, amsgrad=True), torch.float32),
        (lambda: AdamW([{"params": params()}, {"params": params(), "eps": 1e-3}], lr=0.1), torch.float32),
        (lambda: AdamW(params(), lr=0.1), torch.float64),
        (lambda: torch.optim.Adam(params(), lr=0.1), torch.float32),
    ],
    ids=["lr", "option", "group", "dtype", "class"],
)
def test_what_differs_is_tried(make: Callable[[], torch.optim.Optimizer], dtype: torch.dtype) -> None:
    known = KnownFindings()
    asked(known, AdamW(params(), lr=0.1))
    assert asked(known, make(), dtype)[1]
    assert not asked(known, make(), dtype)[1]


def test_an_optimizer_with_another_inside_is_looked_at_each_time() -> None:
    known, outer = KnownFindings(), SGD(params(), lr=0.1)
    outer.inner = None  # type: ignore[attr-defined]
    assert asked(known, outer)[0].reason is None
    outer.inner = SGD(params(), lr=0.1)  # type: ignore[attr-defined]
    assert "steps another optimizer" in (asked(known, outer)[0].reason or "")
