"""The engine: torch and the standard library only.

To follow one gradient: ``layout`` gives it an address, ``buffers`` makes the address memory, the ``reducer``'s hook
counts it ready, ``collectives`` sends its bucket, ``clip_grads`` and ``sharded_step`` use the shard, and
``param_gather`` brings every rank the new weight. These lie open, with what holds them together:
``distributed_data_parallel`` and ``distributed_optimizer``. Folders have a question each: ``collectives`` how bytes
travel (and only it calls torch.distributed), ``checkpoint`` how state is saved and loaded, ``trials`` which optimizers
may be sharded, ``rebucketing`` which buckets would be better.
"""

from .checkpoint.completeness import describe_hole, describe_missing_part
from .checkpoint.open_directory import OpenDirectory, is_directory_checkpoint
from .checkpoint.remote_directory import EXTRA_FILE, MARKER, Directory, RemoteDirectory, extra_name, own_prefix
from .clip_grads import norms_over_owners, scale_to_norm_, total_grad_norm
from .collectives import Collectives, LoneCollectives, host_collectives, make_collectives
from .collectives.process_groups import private_group, subgroup
from .config import DistributedDataParallelConfig, field_names
from .distributed_data_parallel import DistributedDataParallel, announce_tokens, weigh_announced, weigh_by_tokens
from .distributed_optimizer import DistributedOptimizer
from .engine import Engine
from .errors import CheckpointError, CollectiveError, NotOnAllRanksError
from .events import Event, EventKind, one_listener
from .grad_scaler import GradScaler, adapt_scaler
from .host_copies import to_host
from .layout import Bucket, BufferLayout, ParamSpec
from .layout_build import build_layout
from .local_parts import cut_state, dtensors_of
from .memory import MemoryUse, memory_use, memory_use_of_ddp
from .meta_modules import materialise, replace_meta
from .rebucketing.arrival_order import better_layout_order
from .stages import Copies, FollowsStages, StagedModule, names_elsewhere
from .step_watchers import may_see_shards
from .strangers import describe_unreduced
from .torch_ddp_surface import (
    DDP_FUNCTIONS,
    NOT_USED,
    OF_TORCHS_REDUCER,
    SHOWN,
    config_from_arguments,
    describe_translation,
    refuse_function,
)
from .trials.known_findings import KnownFindings
from .whole_states import gather_whole

__all__ = [
    "DDP_FUNCTIONS",
    "EXTRA_FILE",
    "MARKER",
    "NOT_USED",
    "OF_TORCHS_REDUCER",
    "SHOWN",
    "Bucket",
    "BufferLayout",
    "CheckpointError",
    "CollectiveError",
    "Collectives",
    "Copies",
    "Directory",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Engine",
    "Event",
    "EventKind",
    "FollowsStages",
    "GradScaler",
    "KnownFindings",
    "LoneCollectives",
    "MemoryUse",
    "NotOnAllRanksError",
    "OpenDirectory",
    "ParamSpec",
    "RemoteDirectory",
    "StagedModule",
    "adapt_scaler",
    "announce_tokens",
    "better_layout_order",
    "build_layout",
    "config_from_arguments",
    "cut_state",
    "describe_hole",
    "describe_missing_part",
    "describe_translation",
    "describe_unreduced",
    "dtensors_of",
    "extra_name",
    "field_names",
    "gather_whole",
    "host_collectives",
    "is_directory_checkpoint",
    "make_collectives",
    "materialise",
    "may_see_shards",
    "memory_use",
    "memory_use_of_ddp",
    "names_elsewhere",
    "norms_over_owners",
    "one_listener",
    "own_prefix",
    "private_group",
    "refuse_function",
    "replace_meta",
    "scale_to_norm_",
    "subgroup",
    "to_host",
    "total_grad_norm",
    "weigh_announced",
    "weigh_by_tokens",
]
