"""Equality of what two trainings have left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor


def assert_equal(actual: Any, expected: Any, rtol: float = 0.0, where: str = "result") -> None:
    """Tensors, numbers, strings, None, and dataclasses, sequences and mappings of them; fields that a dataclass does
    not compare are skipped."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            if field.compare:
                name = f"{where}.{field.name}"
                assert_equal(getattr(actual, field.name), getattr(expected, field.name), rtol, name)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where}: {list(actual)} are not {list(expected)}"
        for key, value in expected.items():
            assert_equal(actual[key], value, rtol, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, not {len(expected)}"
        for index, value in enumerate(expected):
            assert_equal(actual[index], value, rtol, f"{where}[{index}]")
    elif isinstance(expected, float):
        same = actual == expected or (math.isnan(actual) and math.isnan(expected))
        assert same or math.isclose(actual, expected, rel_tol=rtol, abs_tol=rtol), f"{where}: {actual} != {expected}"
    else:
        assert actual == expected, f"{where}: {actual!r} != {expected!r}"


def message(error: type[Exception], run: Callable[[], Any]) -> str:
    """The words of the error that ``run`` raises."""
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)
