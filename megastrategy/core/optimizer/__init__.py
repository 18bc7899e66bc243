"""The user's optimizer, stepped on shards."""

from .extra_params import describe_unreduced, join_norm
from .forwarded_methods import forwarding_members
from .grad_scaler import GradScaler, adapt_scaler
from .guarded_state import GuardedState, unguarded_state
from .nested_optimizers import take_back
from .optimizer_checks import check_optimizer
from .rank_state import get_rank_state, layout_digest, load_rank_state, weights_digest
from .sharded_optimizer import ShardedOptimizer
from .state import MAIN_PARAM
from .state_hooks import load_with_hooks, save_with_hooks
from .step_calls import has_others, may_see_shards, split_closure

__all__ = [
    "MAIN_PARAM",
    "GradScaler",
    "GuardedState",
    "ShardedOptimizer",
    "adapt_scaler",
    "check_optimizer",
    "describe_unreduced",
    "forwarding_members",
    "get_rank_state",
    "has_others",
    "join_norm",
    "layout_digest",
    "load_rank_state",
    "load_with_hooks",
    "may_see_shards",
    "save_with_hooks",
    "split_closure",
    "take_back",
    "unguarded_state",
    "weights_digest",
]
