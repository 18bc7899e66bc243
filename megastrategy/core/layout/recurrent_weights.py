"""Weights that a kernel wants at fixed offsets of one storage: those of recurrent layers.

[Note: weights in one chunk]
cuDNN takes all weights of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` as one stretch of memory, in an order of its own. On
CUDA torch lays them out so (``flatten_parameters``), and asks in each forward whether they still are: the storage of
the first weight has to begin with it and to hold as many elements as cuDNN wants, and each weight has to be at its
offset from there (``try_get_weight_buf`` in torch's aten/src/ATen/native/cudnn/RNN.cpp). Otherwise torch copies all of
them in every forward, keeps the copy until the backward, and warns.

So weights that were in one storage stay in one: the layout gives the whole of it a place in one bucket, in which each
weight is at the offset that it had, and they share a storage that spans just that. Which offsets cuDNN wants, and what
it leaves between them, need not be known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn import Parameter

from ..config import DistributedDataParallelConfig

MAX_CHUNK_RATIO = 2
"""A chunk has at most so many times the elements of its weights. cuDNN's has room for biases that a layer without them
does not have, which is less. A storage that has far more is somebody's file, or all of a model's weights."""


@dataclasses.dataclass(frozen=True)
class ChunkPlace:
    """A parameter lies in a chunk from element ``start`` on. The chunk has ``numel`` elements, and is called ``name``
    after its module; see [Note: weights in one chunk]."""

    name: str
    start: int
    numel: int


def find_weight_chunks(
    module: nn.Module, params: Iterable[Parameter], config: DistributedDataParallelConfig
) -> dict[int, ChunkPlace]:
    """Finds weights of recurrent layers that lie in one chunk, by ``id`` of the parameter.

    Only whole layers are found, all of whose weights are in ``params``: one that stays behind, frozen or in another
    dtype, would leave a hole that nobody fills. None where weights stay where they are, nor where they are sent in
    blocks, of which each has numbers of one parameter (wire's [Note: blocks]).
    """
    if not config.use_distributed_optimizer or "int8" in (config.grad_wire_dtype, config.param_wire_dtype):
        return {}
    joining = {id(param) for param in params}
    found: dict[int, ChunkPlace] = {}
    for name, child in module.named_modules():
        if isinstance(child, nn.RNNBase):
            weights = list(child.parameters(recurse=False))
            if weights and all(id(weight) in joining for weight in weights) and _are_one_chunk(weights):
                numel = weights[0].untyped_storage().nbytes() // weights[0].element_size()
                found |= {id(weight): ChunkPlace(name, int(weight.storage_offset()), numel) for weight in weights}
    return found


def _are_one_chunk(weights: Sequence[Parameter]) -> bool:
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    # A weight tied to another layer's lies in that one's chunk, and neither layer is one that cuDNN takes as it is.
    if len(storages) > 1 or len({weight.dtype for weight in weights}) > 1:
        return False
    numel = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    return (
        min(weight.storage_offset() for weight in weights) == 0
        and all(weight.is_contiguous() for weight in weights)
        and numel <= MAX_CHUNK_RATIO * sum(weight.numel() for weight in weights)
    )


def placement_units(chunks: Sequence[ChunkPlace | None], order: Iterable[int]) -> list[list[int]]:
    """Parameters that are placed together, by address: those of a chunk, in ``order`` where the first of them is, and
    every other one alone.

    Args:
        chunks: by parameter.
        order: parameters.
    """
    units: dict[int | str, list[tuple[int, int]]] = {}
    for index in order:
        chunk = chunks[index]
        start, key = (0, index) if chunk is None else (chunk.start, chunk.name)
        units.setdefault(key, []).append((start, index))
    return [[index for _, index in sorted(unit)] for unit in units.values()]
