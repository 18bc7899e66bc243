"""The data path written anew, from hook to gather, beside the old one until that is deleted."""

from .distributed_optimizer import DistributedOptimizer
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "DistributedOptimizer"]
