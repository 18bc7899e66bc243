"""When gradients are reduced and weights gathered.

``reducer`` decides when a bucket is launched, ``launched_buckets`` launches it and waits. ``replicas`` and ``across``
are for jobs that train one model together.
"""

from .across import AcrossReplicas
from .backward import BackwardWatch, DeferredBatch
from .bucket_planner import BucketPlanner
from .clip_grads import (
    check_finite,
    norms_of,
    norms_over_owners,
    scale_to_norm_,
    total_grad_norm,
    unscale_grads_,
    zero_norms,
)
from .loss_tokens import read_count, weigh
from .param_gather import ParamGather
from .reducer import Reducer
from .replica_facts import WORD
from .replicas import Replicas

__all__ = [
    "WORD",
    "AcrossReplicas",
    "BackwardWatch",
    "BucketPlanner",
    "DeferredBatch",
    "ParamGather",
    "Reducer",
    "Replicas",
    "check_finite",
    "norms_of",
    "norms_over_owners",
    "read_count",
    "scale_to_norm_",
    "total_grad_norm",
    "unscale_grads_",
    "weigh",
    "zero_norms",
]
