"""Couplings that only some tensors and gradients show: see [Note: trial tensors] in ``core.trials.trial``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megastrategy.core.trials.probe import probe
from tests.support.optimizers import LambWithMoments, Simple, stepped

CPU = torch.device("cpu")


def params() -> list[Parameter]:
    return [Parameter(torch.ones(9, 4)), Parameter(torch.ones(5)), Parameter(torch.ones(90, 60))]


class Clips(Simple):
    """Clips by the norm of all gradients, which only large ones exceed."""

    def __init__(self, params: Any, max_norm: float) -> None:
        super().__init__(params, max_norm=max_norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(list(stepped(self)), self.param_groups[0]["max_norm"])
        super().step()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"])


class ClipsLamb(Clips, LambWithMoments):
    """The same before steps of whole parameters, each by its own norm."""

    update = LambWithMoments.update


@pytest.mark.parametrize("kind", [Clips, ClipsLamb])
@pytest.mark.parametrize("max_norm", [1.0, 10.0, 1000.0])
def test_a_norm_that_clips_large_gradients_alone_is_seen(kind: type[Clips], max_norm: float) -> None:
    reason = probe(kind(params(), max_norm), CPU, torch.float32).reason
    assert "; nor can ranks step whole parameters each: " in str(reason)


class ByPlace(Simple):
    """Decays the rate by the place in the group, as where layers come in their order."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for place, param in enumerate(stepped(self)):
            param.sub_(param.grad, alpha=0.1 * 0.9**place)  # type: ignore[arg-type]


def test_a_rate_that_goes_by_the_place_in_a_group_is_seen() -> None:
    reason = probe(ByPlace(params()), CPU, torch.float32).reason
    assert "was cut into flat pieces" in str(reason)
    assert "was stepped without the others of the group" in str(reason)
