"""The engine: torch and the standard library only.

Reading order: config, layout, buffers, reducer, collectives, gloo_rings, clip_grads, param_gather,
distributed_data_parallel, strangers, sharded_step, distributed_optimizer, checkpoint, flat_shard, sharded_checkpoint;
then other ways to do one of these: pooled_buffers, instanced_collectives, and what finds better buckets:
bucket_planner, bucket_order, bucket_tuning, relayout. To follow one gradient: ``layout`` gives it an address,
``buffers`` makes the address memory, the ``reducer``'s hook counts it ready, ``collectives`` sends its bucket,
``clip_grads`` and ``sharded_step`` use the shard, and ``param_gather`` brings every rank the new weight.
"""

from .clip_grads import GradScaler, scale_to_norm_, total_grad_norm
from .collectives import Collectives, host_collectives, make_collectives
from .config import DistributedDataParallelConfig, config_from_arguments, field_names
from .distributed_data_parallel import DistributedDataParallel
from .distributed_optimizer import DistributedOptimizer
from .errors import CheckpointError, CollectiveError, NotOnAllRanksError
from .events import Event, EventKind, one_listener
from .known_findings import KnownFindings
from .memory import describe_setup, memory_use, memory_use_of_ddp
from .process_groups import private_group
from .sharded_checkpoint import (
    EXTRA_FILE,
    check_replaceable,
    directory_keys,
    is_directory_checkpoint,
    read_directory,
    replace_path,
    save_directory,
    sync_directory,
    to_host,
)
from .strangers import describe_unreduced

__all__ = [
    "EXTRA_FILE",
    "CheckpointError",
    "CollectiveError",
    "Collectives",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Event",
    "EventKind",
    "GradScaler",
    "KnownFindings",
    "NotOnAllRanksError",
    "check_replaceable",
    "config_from_arguments",
    "describe_setup",
    "describe_unreduced",
    "directory_keys",
    "field_names",
    "host_collectives",
    "is_directory_checkpoint",
    "make_collectives",
    "memory_use",
    "memory_use_of_ddp",
    "one_listener",
    "private_group",
    "read_directory",
    "replace_path",
    "save_directory",
    "scale_to_norm_",
    "sync_directory",
    "to_host",
    "total_grad_norm",
]
