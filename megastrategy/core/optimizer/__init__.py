"""The user's optimizer, stepped on shards."""

from .extra_params import describe_unreduced, join_norm
from .forwarded_methods import forwarding_members
from .grad_scaler import GradScaler, adapt_scaler
from .nested_optimizers import take_back
from .optimizer_checks import check_main_params, check_optimizer, not_shardable
from .optimizer_copies import StateOfCopy, same
from .sharded_step import ShardedStep
from .shown_state import ShownState, own_state_of
from .state_hooks import load_with_hooks, save_with_hooks, without_state_hooks
from .step_watchers import may_see_shards

__all__ = [
    "GradScaler",
    "ShardedStep",
    "ShownState",
    "StateOfCopy",
    "adapt_scaler",
    "check_main_params",
    "check_optimizer",
    "describe_unreduced",
    "forwarding_members",
    "join_norm",
    "load_with_hooks",
    "may_see_shards",
    "not_shardable",
    "own_state_of",
    "same",
    "save_with_hooks",
    "take_back",
    "without_state_hooks",
]
