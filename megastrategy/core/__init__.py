"""The engine: torch and the standard library only.

README.md beside this file lists its ten folders, and the path of one gradient through them. Users and doors
see ``distributed_data_parallel`` and ``distributed_optimizer``.
"""

from .checkpoint import (
    EXTRA_FILE,
    MARKER,
    Directory,
    OpenDirectory,
    RemoteDirectory,
    describe_missing_file,
    is_directory_checkpoint,
    place_at,
)
from .collectives import (
    Collectives,
    SingleRankCollectives,
    check_all_agree,
    host_collectives,
    make_collectives,
    num_collectives,
    private_group,
    subgroup,
)
from .config import (
    ConfigOptions,
    DistributedDataParallelConfig,
    check_expert_options,
    field_names,
    refuses_unknown_options,
)
from .data_path import DeferredBatch, Engine, ReplicaHook, norms_over_owners, scale_to_norm_, total_grad_norm
from .distributed_data_parallel import DistributedDataParallel, announce_tokens, forget_announced
from .distributed_optimizer import DistributedOptimizer
from .errors import CheckpointError, CollectiveError, NotOnAllRanksError, ReplicaMismatchError
from .events import Event, EventKind, combine_listeners
from .judge import Sharding
from .layout import (
    Bucket,
    BufferLayout,
    Domain,
    ParamSpec,
    better_layout_order,
    build_layout,
    domain_of_all,
    memory_use,
)
from .module import (
    GroupState,
    LocalParts,
    ModelGroup,
    NamedOptimizer,
    StagedModule,
    cut_state,
    dtensors_of,
    materialise,
    named_params,
    names_elsewhere,
    replace_meta,
)
from .optimizer import GradScaler, adapt_scaler, describe_unreduced, join_norm, may_see_shards
from .states import gather_states, number_params, to_host
from .torch_ddp_surface import config_from_arguments

__all__ = [
    "EXTRA_FILE",
    "MARKER",
    "Bucket",
    "BufferLayout",
    "CheckpointError",
    "CollectiveError",
    "Collectives",
    "ConfigOptions",
    "DeferredBatch",
    "Directory",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Domain",
    "Engine",
    "Event",
    "EventKind",
    "GradScaler",
    "GroupState",
    "LocalParts",
    "ModelGroup",
    "NamedOptimizer",
    "NotOnAllRanksError",
    "OpenDirectory",
    "ParamSpec",
    "RemoteDirectory",
    "ReplicaHook",
    "ReplicaMismatchError",
    "Sharding",
    "SingleRankCollectives",
    "StagedModule",
    "adapt_scaler",
    "announce_tokens",
    "better_layout_order",
    "build_layout",
    "check_all_agree",
    "check_expert_options",
    "combine_listeners",
    "config_from_arguments",
    "cut_state",
    "describe_missing_file",
    "describe_unreduced",
    "domain_of_all",
    "dtensors_of",
    "field_names",
    "forget_announced",
    "gather_states",
    "host_collectives",
    "is_directory_checkpoint",
    "join_norm",
    "make_collectives",
    "materialise",
    "may_see_shards",
    "memory_use",
    "named_params",
    "names_elsewhere",
    "norms_over_owners",
    "num_collectives",
    "number_params",
    "place_at",
    "private_group",
    "refuses_unknown_options",
    "replace_meta",
    "scale_to_norm_",
    "subgroup",
    "to_host",
    "total_grad_norm",
]
