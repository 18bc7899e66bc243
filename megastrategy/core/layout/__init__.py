"""Plans the address and the owner of every element of parameters, gradients and shards. No tensors."""

from .arrival_order import better_layout_order
from .blocks import block_numel, neighbours
from .build import build_layout, domain_of_all
from .domain import Domain
from .layout import (
    CHUNKS_HEADING,
    NUM_RECEIVE_BUFFERS,
    NUM_STAGING_BUFFERS,
    SIXTEEN_BIT_DTYPES,
    Bucket,
    BufferLayout,
    ParamSpec,
    Part,
    Spans,
)
from .memory import describe_setup, memory_use
from .owners import EVERY_RANK, Owners
from .recurrent_weights import ChunkPlace, find_weight_chunks
from .strides import contiguous_stride, dense_stride

__all__ = [
    "CHUNKS_HEADING",
    "EVERY_RANK",
    "NUM_RECEIVE_BUFFERS",
    "NUM_STAGING_BUFFERS",
    "SIXTEEN_BIT_DTYPES",
    "Bucket",
    "BufferLayout",
    "ChunkPlace",
    "Domain",
    "Owners",
    "ParamSpec",
    "Part",
    "Spans",
    "better_layout_order",
    "block_numel",
    "build_layout",
    "contiguous_stride",
    "dense_stride",
    "describe_setup",
    "domain_of_all",
    "find_weight_chunks",
    "memory_use",
    "neighbours",
]
