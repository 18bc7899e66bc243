"""A few steps of a Fabric loop."""

from __future__ import annotations

import itertools
from typing import Any

from lightning.fabric import Fabric
from torch.nn import functional as F

from .fabric_loops import make_data


def step_with(fabric: Fabric, model: Any, *optimizers: Any, batches: int = 3) -> list[float]:
    """A few steps of all the optimizers; the losses."""
    losses = []
    for features, tokens, targets in itertools.islice(make_data(fabric), batches):
        loss = F.cross_entropy(model(features, tokens), targets)
        fabric.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
