"""The engine: torch and the standard library only.

Reading order: config, layout, buffers, reducer, collectives, clip_grads, distributed_optimizer, param_gather,
checkpoint,
distributed_data_parallel. To follow one gradient: ``layout`` gives it an address, ``buffers`` makes the address
memory, the ``reducer``'s hook counts it ready, ``collectives`` sends its bucket, ``clip_grads`` and
``distributed_optimizer`` use the shard, and ``param_gather`` brings every rank the new weight.
"""

from .clip_grads import GradScaler
from .collectives import Collectives, make_collectives, private_group
from .config import DistributedDataParallelConfig, config_from_arguments, field_names
from .distributed_data_parallel import DistributedDataParallel
from .distributed_optimizer import DistributedOptimizer
from .elementwise import probe_state_tensors
from .events import Event, EventKind
from .memory import describe_setup, memory_use, memory_use_of_ddp

__all__ = [
    "Collectives",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Event",
    "EventKind",
    "GradScaler",
    "config_from_arguments",
    "describe_setup",
    "field_names",
    "make_collectives",
    "memory_use",
    "memory_use_of_ddp",
    "private_group",
    "probe_state_tensors",
]
