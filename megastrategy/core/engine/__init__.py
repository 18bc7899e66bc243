"""The engine of one wrapped model, and its move to another layout."""

from .engine import Engine, GiveBack
from .shard_holder import Contents, PerElement, ShardHolder
from .whole_grads import full_grad, grad_norms

__all__ = [
    "Contents",
    "Engine",
    "GiveBack",
    "PerElement",
    "ShardHolder",
    "full_grad",
    "grad_norms",
]
