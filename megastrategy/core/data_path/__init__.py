"""The path of one gradient, from its hook to the gather of the weights."""

from .backward_tracker import DeferredBatch
from .bucket import Bucket
from .engine import Engine
from .memory import Memory
from .norms import check_finite, norms_over_owners, scale_to_norm_, total_grad_norm, unscale_grads_
from .reduced_grad import ReducedGrad, inside_backward
from .replica_hook import ReplicaHook
from .tokens import read_count

__all__ = [
    "Bucket",
    "DeferredBatch",
    "Engine",
    "Memory",
    "ReducedGrad",
    "ReplicaHook",
    "check_finite",
    "inside_backward",
    "norms_over_owners",
    "read_count",
    "scale_to_norm_",
    "total_grad_norm",
    "unscale_grads_",
]
