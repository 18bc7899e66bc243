"""The parameters that one rank steps, and their optimizer state."""

from .flat_run import FlatRun, build_runs, cut_shards
from .flat_shard import FlatShard
from .gathered_state import Gather, gather_main_params, gather_state_dict, number_params, state_by_number
from .host_copies import to_host
from .param_shard import ParamShard, take_outside_changes
from .pickled_states import entries_of_rank_zero, gather_states
from .saved_state import (
    MAIN_PARAM,
    as_saved,
    copied,
    cut_value,
    groups_as_saved,
    load_main_params,
    pending_main_params,
    per_element_keys,
    shard_state,
)
from .state_fragments import MAIN_PARAMS, STATE, Fragment, StateFragments

__all__ = [
    "MAIN_PARAM",
    "MAIN_PARAMS",
    "STATE",
    "FlatRun",
    "FlatShard",
    "Fragment",
    "Gather",
    "ParamShard",
    "StateFragments",
    "as_saved",
    "build_runs",
    "copied",
    "cut_shards",
    "cut_value",
    "entries_of_rank_zero",
    "gather_main_params",
    "gather_state_dict",
    "gather_states",
    "groups_as_saved",
    "load_main_params",
    "number_params",
    "pending_main_params",
    "per_element_keys",
    "shard_state",
    "state_by_number",
    "take_outside_changes",
    "to_host",
]
