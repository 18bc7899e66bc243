"""The parameters that one rank steps, and their optimizer state."""

from .flat_run import CHUNK_NUMEL, FlatRun, build_runs, cut_shards, own_state
from .flat_shard import FlatShard
from .gathered_state import Gather, gather_main_params, gather_state_dict, number_params, state_by_number
from .host_copies import to_host
from .own_parts import MAIN_PARAMS, STATE, MainParamWhenRead, OwnParts, Piece
from .param_shard import ParamShard, begin_step, drop_remainders, end_step, take_outside_changes
from .saved_state import (
    MAIN_PARAM,
    REMAINDER,
    as_saved,
    copied,
    cut_value,
    groups_as_saved,
    load_main_params,
    main_params_to_come,
    per_element_keys,
    saved_name,
    shard_state,
)
from .whole_states import entries_of_rank_zero, gather_whole

__all__ = [
    "CHUNK_NUMEL",
    "MAIN_PARAM",
    "MAIN_PARAMS",
    "REMAINDER",
    "STATE",
    "FlatRun",
    "FlatShard",
    "Gather",
    "MainParamWhenRead",
    "OwnParts",
    "ParamShard",
    "Piece",
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
    "gather_whole",
    "groups_as_saved",
    "load_main_params",
    "main_params_to_come",
    "number_params",
    "own_state",
    "per_element_keys",
    "saved_name",
    "shard_state",
    "state_by_number",
    "take_outside_changes",
    "to_host",
]
