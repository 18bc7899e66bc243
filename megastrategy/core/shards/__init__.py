"""The parameters that one rank steps, and their optimizer state."""

from .flat_run import FlatRun, build_runs, cut_shards
from .flat_shard import FlatShard
from .gathered_state import Gather, gather_main_params, gather_state_dict, number_params, state_by_number
from .host_copies import to_host
from .param_shard import ParamShard, begin_step, drop_remainders, end_step, take_outside_changes
from .pickled_states import entries_of_rank_zero, gather_states
from .saved_state import (
    MAIN_PARAM,
    REMAINDER,
    as_saved,
    copied,
    cut_value,
    groups_as_saved,
    load_main_params,
    pending_main_params,
    per_element_keys,
    saved_name,
    shard_state,
)
from .state_fragments import MAIN_PARAMS, STATE, Fragment, StateFragments

__all__ = [
    "MAIN_PARAM",
    "MAIN_PARAMS",
    "REMAINDER",
    "STATE",
    "FlatRun",
    "FlatShard",
    "Fragment",
    "Gather",
    "ParamShard",
    "StateFragments",
    "as_saved",
    "begin_step",
    "build_runs",
    "copied",
    "cut_shards",
    "cut_value",
    "drop_remainders",
    "end_step",
    "entries_of_rank_zero",
    "gather_main_params",
    "gather_state_dict",
    "gather_states",
    "groups_as_saved",
    "load_main_params",
    "number_params",
    "pending_main_params",
    "per_element_keys",
    "saved_name",
    "shard_state",
    "state_by_number",
    "take_outside_changes",
    "to_host",
]
