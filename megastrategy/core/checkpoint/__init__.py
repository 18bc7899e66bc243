"""The optimizer's state in torch's formats, gathered from shards and cut into them."""

from .directories import parts_to_write, read_parts
from .directory_reader import OpenDirectory, describe_missing_file, is_directory_checkpoint
from .model_parallel import (
    as_on_rank_zero,
    completed_state,
    parts_of_main_params,
    parts_of_state,
    require_everybody,
    whole_main_params,
    whole_state,
)
from .remote_directory import EXTRA_FILE, MARKER, Directory, RemoteDirectory, place_at
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
    "is_directory_checkpoint",
    "parts_of_main_params",
    "parts_of_state",
    "parts_to_write",
    "place_at",
    "read_parts",
    "require_everybody",
    "whole_main_params",
    "whole_state",
    "with_device",
    "without_device",
]
