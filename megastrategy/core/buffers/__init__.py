"""The memory of gradients and weights, and the contents of ``.grad``."""

from .contiguous_buffers import ContiguousGradBuffers
from .flattened_buffers import FlattenedGradBuffers
from .grad_buffers import GradBuffers, slice_view
from .main_grads import declare_main_grads, withdraw_main_grads
from .nonfinite import FiniteCheck, NonFinite, describe_nonfinite
from .param_buffers import ParamBuffers
from .pooled_buffers import PooledGradBuffers
from .reduced_grad import NO_TASK, ReducedGrad, inside_backward, inside_node

__all__ = [
    "NO_TASK",
    "ContiguousGradBuffers",
    "FiniteCheck",
    "FlattenedGradBuffers",
    "GradBuffers",
    "NonFinite",
    "ParamBuffers",
    "PooledGradBuffers",
    "ReducedGrad",
    "declare_main_grads",
    "describe_nonfinite",
    "inside_backward",
    "inside_node",
    "slice_view",
    "withdraw_main_grads",
]
