"""The training in which each row of user code is played, under whatever door, and what it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastrategy.errors import MegastrategyError

from .comparison import assert_equal
from .user_code import ACTING_STEPS, STEPS, Site, UserCode


class Net(nn.Module):
    """Statistics of batches, a tied weight, weights of one shape, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)  # whose gradient would be what rounding leaves of zero
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        generator = torch.Generator().manual_seed(0)  # of its own: ranks are threads, and share torch's
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x)).relu()
        return self.scale * self.tied(self.outer(x)).pow(2).mean()


@dataclasses.dataclass
class Ended:
    """The results of one rank's training: copies of weights and module buffers, the optimizer's state, and ``seen``."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    seen: list[Any]

    @classmethod
    def of(cls, site: Site) -> Ended:
        weights = {name: value.detach().clone() for name, value in site.module.state_dict().items()}
        return cls(weights, site.optimizer.state_dict(), site.seen)


def play(
    site: Site,
    code: UserCode | None,
    refusal: type[MegastrategyError] | None = None,
    wrap_again: Callable[[], Any] | None = None,
) -> Ended:
    """Trains, with the row in its place; where a refusal is expected, nothing else may come of it."""

    def act() -> Any:
        assert code is not None
        if refusal is None:
            return code.run(site)
        with pytest.raises(refusal):
            code.run(site)
        return None

    for step in range(STEPS):
        place = code.place if code is not None and step in ACTING_STEPS else None
        site.optimizer.zero_grad()
        loss = site.forward()
        if place == "before backward":
            other = act()
            loss = loss if other is None else loss + other
        site.backward(loss)
        if place == "before step":
            act()
        site.optimizer.step()
        if place == "after step":
            act()
            if code is not None and code.parts_torch_ddp and wrap_again is not None:
                site.model = wrap_again()
    return Ended.of(site)


def site_of(
    module: nn.Module,
    model: Any,
    optimizer: Any,
    rank: int,
    backward: Callable[[Tensor], object] = lambda loss: loss.backward(),
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Site:
    """A site whose forwards, all in one count, have batches of their own."""
    numbers = itertools.count()

    def batch() -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + next(numbers))
        return torch.randn(4, 6, generator=generator)

    site = Site(
        module,
        model,
        optimizer,
        rank,
        backward,
        forward=lambda: site.model(batch()),
        direct=lambda: module(batch()),
        no_sync=no_sync or (lambda: site.model.no_sync()),
    )
    return site


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.01)


def compare(ours: list[Ended], reference: list[Ended], *, rtol: float = 0.0) -> None:
    """By rank; of the state that of the first, which has all of it."""
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        assert_equal(mine.weights, theirs.weights, rtol, f"rank {rank}, weights")
        assert_equal(mine.seen, theirs.seen, rtol, f"rank {rank}, read")
    mine, theirs = (dict(sorted(ended[0].state["state"].items())) for ended in (ours, reference))
    assert_equal([dict(values) for values in mine.values()], list(theirs.values()), rtol, "state")
    assert_equal(ours[0].state["param_groups"], reference[0].state["param_groups"], rtol, "groups")
