"""Does an optimizer update each element by itself? A numerical probe, never a list of names.

Flat shards cut parameters anywhere and forget their shapes. That changes nothing for an optimizer whose update of an
element depends on that element's own gradient and state (SGD, Adam and most others), and everything for one that
looks at norms, rows or matrices (LAMB, Adafactor, Muon, Shampoo).
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_SHAPE = (6, 10)
_CUTS = (0, 7, 33, 60)  # inside rows and between them
_STEPS = 5
_LR = 0.01


def why_not_elementwise(optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype) -> str | None:
    """Steps copies of the optimizer on a small parameter, whole and cut into flat pieces, and compares.

    Args:
        optimizer: left untouched; its class, hyper-parameters and other attributes are used, its state is not.
        device, dtype: of the tensors that it will step.

    Returns:
        None if whole and cut agree (to rounding) in every group, else the reason in words.
    """
    for number, group in enumerate(optimizer.param_groups):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(_SHAPE, generator=generator)
        # Magnitudes that differ by piece and by row: any norm taken over a piece differs from that over the whole.
        size = torch.logspace(-3, 3, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE)
        grads = [torch.randn(_SHAPE, generator=generator) * size for _ in range(_STEPS)]
        start, grads = start.to(device, dtype), [grad.to(device, dtype) for grad in grads]
        whole, flat = start.clone(), start.clone().reshape(-1)
        try:
            _step_on(_double(optimizer, group, [whole]), whole, grads)
            for a, b in itertools.pairwise(_CUTS):
                # each piece by an optimizer of its own, as on ranks: what is summed over an optimizer's tensors shows
                piece = flat[a:b]
                _step_on(_double(optimizer, group, [piece]), piece, [grad.reshape(-1)[a:b] for grad in grads])
        except Exception as error:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            said = f"{type(error).__name__}: {error}".rstrip(".")
            return f"a trial step of parameter group {number} on flat tensors raised {said}"
        moved, difference = (whole - start).abs().reshape(-1), (whole.reshape(-1) - flat).abs()
        if not bool(moved.any()):
            return f"trial steps of parameter group {number} moved nothing, so they tell nothing"
        # 1e-6 of the value: rounding of the weight itself
        if not bool((difference <= 1e-4 * moved + 1e-6 * start.abs().reshape(-1)).all()):
            return (
                f"on a trial tensor of shape {_SHAPE}, parameter group {number} gave other results when the tensor was "
                f"cut into flat pieces (largest difference {difference.max().item():.3g} where the step was "
                f"{moved.max().item():.3g})"
            )
    return None


def steps_in_parts(optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step may be several calls, each with some of the tensors in the groups: tried on copies, to the bit.

    Not if the optimizer keeps anything but state of tensors: a count of its calls, in itself or in a group.
    """
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        starts = [torch.randn(_SHAPE, generator=generator).to(device, dtype) for _ in range(2)]
        grads = [[torch.randn(_SHAPE, generator=generator).to(device, dtype) for _ in range(2)] for _ in range(_STEPS)]
        together, apart = ([start.clone() for start in starts] for _ in range(2))
        try:
            at_once, in_parts = _double(optimizer, group, together), _double(optimizer, group, apart)
            before = _values_of(in_parts)
            for step_grads in grads:
                for params in (together, apart):
                    for param, grad in zip(params, step_grads, strict=True):
                        param.grad = grad.clone()
                at_once.step()
                for param in apart:
                    in_parts.param_groups[0]["params"] = [param]
                    in_parts.step()
            after = _values_of(in_parts)
        except Exception:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            return False
        same_values = before.keys() == after.keys() and all(equal(before[name], after[name]) for name in before)
        if not same_values or not all(map(torch.equal, together, apart)):
            return False
    return True


def _values_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What it keeps beside the state of tensors, as it is now."""
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("state", "param_groups")}
    own.update({f"state.{key}": value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    (group,) = optimizer.param_groups
    options = {f"param_groups.{name}": value for name, value in group.items() if name != "params"}
    return {name: _own(value) for name, value in {**own, **options}.items()}


def _own(value: Any) -> Any:
    """A copy of what a step may change in place: tensors in containers, and containers."""
    if isinstance(value, Parameter):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        shallow = copy.copy(value)  # of its class
        for key, item in value.items():
            shallow[key] = _own(item)
        return shallow
    if isinstance(value, list | set):
        return type(value)(map(_own, value))
    return value


def equal(a: Any, b: Any) -> bool:
    """Whether two values of an optimizer's state or options are alike; what cannot be compared is not."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    try:
        return bool(a is b or a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def is_per_element(name: str, value: Any, shape: Sequence[int], names: set[str] | None) -> bool:
    """Whether a state value has a number for each element of a tensor of this shape.

    ``names`` of those that do (:func:`probe_state_names`) decides for a tensor of one element, where it is known.
    """
    is_shaped = isinstance(value, Tensor) and value.shape == tuple(shape)
    return is_shaped and (value.numel() > 1 or names is None or name in names)


def probe_state_tensors(optimizer: torch.optim.Optimizer) -> int | None:
    """How many numbers the optimizer keeps for each element (Adam: 2), from a trial step; None if that fails."""
    by_group = _probe_state(optimizer)
    return None if by_group is None else max((len(names) for names in by_group), default=0)


def probe_state_names(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """The names under which the optimizer keeps one number for each element, in any group; None if that fails."""
    by_group = _probe_state(optimizer)
    return None if by_group is None else set().union(*by_group)


def _probe_state(optimizer: torch.optim.Optimizer) -> list[set[str]] | None:
    names = []
    for group in optimizer.param_groups:
        param = torch.zeros(_SHAPE)
        double = _double(optimizer, group, [param])
        try:
            _step_on(double, param, [torch.ones(_SHAPE)])
        except Exception:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            return None
        values = double.state[param].items()
        names.append({key for key, value in values if isinstance(value, Tensor) and value.shape == param.shape})
    return names


def _double(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[Tensor]) -> torch.optim.Optimizer:
    """An optimizer like the given one, with one group of its own and no state.

    Its hooks and wrapped ``step`` stay behind, and so does its learning rate: at the start of a warm-up that is zero.
    """
    double = object.__new__(type(optimizer))
    shared = ("step", "state", "param_groups")
    double.__dict__.update({name: _own(value) for name, value in optimizer.__dict__.items() if name not in shared})
    double.__dict__.update({name: collections.OrderedDict() for name in optimizer.__dict__ if name.endswith("_hooks")})
    double.state = collections.defaultdict(dict)
    lr = group.get("lr")
    trial_lr = {"lr": torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR} if "lr" in group else {}
    options = {name: _own(value) for name, value in group.items() if name != "params"}
    double.param_groups = [{**options, **trial_lr, "params": params}]
    enter_training(double)
    return double


def enter_training(optimizer: torch.optim.Optimizer) -> None:
    """Calls ``train()`` where the optimizer has modes (Schedule-Free's ``train()`` and ``eval()``): one that begins in
    evaluation refuses to step."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _step_on(optimizer: torch.optim.Optimizer, param: Tensor, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
