"""The optimizer's state in torch's formats, gathered from shards and cut into them."""

from .completeness import describe_missing_file
from .directory_reader import OpenDirectory, is_directory_checkpoint, open_directory
from .directory_state import read_state, state_to_write
from .full_state import load_full_state
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
from .remote_directory import EXTRA_FILE, MARKER, Directory, RemoteDirectory
from .torch_helpers import with_device, without_device

__all__ = [
    "EXTRA_FILE",
    "MARKER",
    "Directory",
    "OpenDirectory",
    "RemoteDirectory",
    "as_on_rank_zero",
    "completed_state",
    "describe_missing_file",
    "has_main_params",
    "is_directory_checkpoint",
    "load_full_state",
    "open_directory",
    "parts_of_main_params",
    "parts_of_state",
    "read_state",
    "require_everybody",
    "state_to_write",
    "whole_main_params",
    "whole_state",
    "with_device",
    "without_device",
]
