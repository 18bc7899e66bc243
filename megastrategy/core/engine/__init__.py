"""The engine of one wrapped model, and its move to another layout."""

from .engine import Engine
from .shard_holder import ShardHolder
from .whole_grads import full_grad, grad_norms

__all__ = [
    "Engine",
    "ShardHolder",
    "full_grad",
    "grad_norms",
]
