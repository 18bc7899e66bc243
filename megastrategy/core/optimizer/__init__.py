"""The user's optimizer, stepped on shards."""

from .extra_params import describe_unreduced, join_norm
from .forwarded_methods import forwarding_members
from .grad_scaler import GradScaler, adapt_scaler
from .guarded_state import GuardedState, unguarded_state
from .nested_optimizers import take_back
from .norms import norm_of_grads, owned_grads
from .optimizer_checks import check_optimizer, not_shardable
from .shard_set import ShardSet, gather_from
from .sharded_optimizer import ShardedOptimizer
from .state_hooks import load_with_hooks, save_with_hooks, without_state_hooks
from .step_arguments import StepArguments
from .step_hooks import may_see_shards

__all__ = [
    "GradScaler",
    "GuardedState",
    "ShardSet",
    "ShardedOptimizer",
    "StepArguments",
    "adapt_scaler",
    "check_optimizer",
    "describe_unreduced",
    "forwarding_members",
    "gather_from",
    "join_norm",
    "load_with_hooks",
    "may_see_shards",
    "norm_of_grads",
    "not_shardable",
    "owned_grads",
    "save_with_hooks",
    "take_back",
    "unguarded_state",
    "without_state_hooks",
]
