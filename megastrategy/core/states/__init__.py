"""An optimizer's state in host memory, on the wire, and as a part of a full tensor."""

from .flat_shard import FlatShard
from .host_copies import to_host
from .mover import LocalState, Parts, redistribute, redistribute_state
from .pickled_states import entries_of_rank_zero, gather_states
from .saved_state import (
    MAIN_PARAMS,
    STATE,
    as_saved,
    copied,
    groups_as_saved,
    number_params,
    per_element_keys,
    state_by_number,
)

__all__ = [
    "MAIN_PARAMS",
    "STATE",
    "FlatShard",
    "LocalState",
    "Parts",
    "as_saved",
    "copied",
    "entries_of_rank_zero",
    "gather_states",
    "groups_as_saved",
    "number_params",
    "per_element_keys",
    "redistribute",
    "redistribute_state",
    "state_by_number",
    "to_host",
]
