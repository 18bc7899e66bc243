"""The user's module: its parameters, their hooks, and the ranks that share it."""

from .equal_weights import check_equal_weights
from .grad_accumulators import GradAccumulators
from .grad_hooks import GradHooks, is_wrapped
from .graph_splits import GraphSplits
from .local_parts import CutParam, LocalParts, cut_state, dtensors_of, empty_like_part
from .meta_modules import materialise, replace_meta
from .model_parallel import (
    GroupState,
    ModelGroup,
    ModelParallel,
    NamedOptimizer,
)
from .module_checks import (
    NOT_IN_BUFFER,
    agree_on_layout,
    check_memory_is_own,
    check_module,
    check_no_experts,
    check_no_renormed_rows,
    check_not_inside_torch_ddp,
    common_device,
    is_in_shared_memory,
    option_rows,
    param_spec,
)
from .module_params import ignored_names, named_buffers, named_params
from .module_watch import ModuleWatch
from .staged_module import StagedModule, find_groups, names_elsewhere
from .wrapped_again import close_other_engines

__all__ = [
    "NOT_IN_BUFFER",
    "CutParam",
    "GradAccumulators",
    "GradHooks",
    "GraphSplits",
    "GroupState",
    "LocalParts",
    "ModelGroup",
    "ModelParallel",
    "ModuleWatch",
    "NamedOptimizer",
    "StagedModule",
    "agree_on_layout",
    "check_equal_weights",
    "check_memory_is_own",
    "check_module",
    "check_no_experts",
    "check_no_renormed_rows",
    "check_not_inside_torch_ddp",
    "close_other_engines",
    "common_device",
    "cut_state",
    "dtensors_of",
    "empty_like_part",
    "find_groups",
    "ignored_names",
    "is_in_shared_memory",
    "is_wrapped",
    "materialise",
    "named_buffers",
    "named_params",
    "names_elsewhere",
    "option_rows",
    "param_spec",
    "replace_meta",
]
