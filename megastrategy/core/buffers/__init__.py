"""The memory of gradients and weights, and ``.grad``: see grad_buffers' [Note: life of a gradient view]."""

from .contiguous_buffers import ContiguousGradBuffers
from .flattened_buffers import FlattenedGradBuffers
from .grad_buffers import GradBuffers, has_unreduced, late_grad, pop_late_grad, slice_view, stepped_in_backward
from .main_grads import declare_main_grads, withdraw_main_grads
from .nonfinite import FiniteCheck, NonFinite, describe_nonfinite
from .param_buffers import ParamBuffers
from .pooled_buffers import PooledGradBuffers
from .reduced_grad import NO_GRAPH_TASK, ReducedGrad, inside_backward, inside_node

__all__ = [
    "NO_GRAPH_TASK",
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
    "has_unreduced",
    "inside_backward",
    "inside_node",
    "late_grad",
    "pop_late_grad",
    "slice_view",
    "stepped_in_backward",
    "withdraw_main_grads",
]
