"""The optimizer's state in torch's formats, gathered from shards and cut into them."""

from .completeness import describe_hole, describe_missing_part
from .directory import own_share, read_share
from .directory_reader import OpenDirectory, is_directory_checkpoint, open_directory
from .full_state import load_full_state_dict
from .model_parallel import (
    as_on_rank_zero,
    completed_state,
    has_main_params,
    parts_of_main_params,
    parts_of_state,
    require_everybody,
    whole_main_params,
    whole_state,
)
from .pipeline_stages import is_staged
from .remote_directory import EXTRA_FILE, MARKER, Directory, RemoteDirectory, extra_name, own_prefix

__all__ = [
    "EXTRA_FILE",
    "MARKER",
    "Directory",
    "OpenDirectory",
    "RemoteDirectory",
    "as_on_rank_zero",
    "completed_state",
    "describe_hole",
    "describe_missing_part",
    "extra_name",
    "has_main_params",
    "is_directory_checkpoint",
    "is_staged",
    "load_full_state_dict",
    "open_directory",
    "own_prefix",
    "own_share",
    "parts_of_main_params",
    "parts_of_state",
    "read_share",
    "require_everybody",
    "whole_main_params",
    "whole_state",
]
