"""The engine of one wrapped model, and its move to another layout."""

from .engine import Engine
from .shard_holder import Contents, PerElement, ShardHolder
from .whole_grads import full_grad, grad_norms

__all__ = [
    "Contents",
    "Engine",
    "PerElement",
    "ShardHolder",
    "full_grad",
    "grad_norms",
]
