"""The effect of ``optimizer_state_dtype="bf16"`` on an optimizer's state, written a second time, for whole parameters.

Nothing is taken from the engine: the hash is computed in 64 bits, and rounding by the two neighbours of a number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

COUNT = "rounding_step"
WORD = 2**32


def hashed(word: Any) -> Any:
    """``lowbias32``: of a number of Python, or of int64 in [0, 2**32)."""
    word = word ^ (word // 2**16)
    word = (word * 0x7FEB352D) % WORD
    word = word ^ (word // 2**15)
    word = _times(word, 0x846CA68B)
    return word ^ (word // 2**16)


def _times(word: Any, factor: int) -> Any:
    """The product modulo 2**32, which in int64 has to stay below 2**63."""
    low, high = word % 2**16, word // 2**16
    return (low * factor + (high * factor) % 2**16 * 2**16) % WORD


def chances(name: str, numel: int, step: int, number: int) -> Tensor:
    """For each element of a parameter, int64 in [0, 2**16); ``number``: of the state among those of the parameter."""
    places = (torch.arange(numel) + zlib.crc32(name.encode())) % WORD
    words = hashed(places ^ hashed(hashed(step) ^ number // 2))
    return words % 2**16 if number % 2 == 0 else words // 2**16


def rounded_at_random(values: Tensor, chance: Tensor) -> Tensor:
    """The neighbour in bf16 that is nearer to zero, or the other one as often as the chance says."""
    toward_zero = torch.nextafter(values.bfloat16(), torch.zeros((), dtype=torch.bfloat16))
    inner = torch.where(values.bfloat16().double().abs() <= values.double().abs(), values.bfloat16(), toward_zero)
    infinity = torch.copysign(torch.tensor(torch.inf), values).bfloat16()
    outer = torch.nextafter(inner, infinity)
    left = (values.double() - inner.double()).abs() / (outer.double() - inner.double()).abs()
    away = left * 2**16 + chance.double() >= 2**16
    return torch.where(away & (left > 0), outer, inner).float()


def round_states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """After a step: the state of all parameters with a gradient. ``names``: of parameters, by ``id``."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if param.grad is None or not state:
                continue
            kept = sorted(name for name, value in state.items() if is_kept(name, value))
            if "step" not in state and kept:
                state[COUNT] = state.get(COUNT, 0) + 1
            for number, name in enumerate(kept):
                step = int(state["step"] if "step" in state else state[COUNT])
                chance = chances(names[id(param)], param.numel(), step, number)
                flat = _in_memory_order(state[name], param)
                flat.copy_(rounded_at_random(flat.clone(), chance))


def round_to_nearest(optimizer: torch.optim.Optimizer, wanted: Callable[[Tensor], bool] = lambda param: True) -> None:
    """As a state is loaded."""
    for param, state in optimizer.state.items():
        for name, value in state.items() if wanted(param) else ():
            if is_kept(name, value):
                value.copy_(value.bfloat16())


def is_kept(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and name != "step"


def _in_memory_order(value: Tensor, param: Tensor) -> Tensor:
    assert value.stride() == param.stride() or value.numel() <= 1 or value.dim() <= 1
    return value.as_strided((value.numel(),), (1,))
