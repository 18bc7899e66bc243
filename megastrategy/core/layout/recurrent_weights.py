"""Weights of recurrent layers, which cuDNN needs at fixed offsets of one storage.

[Note: weights in one chunk]
cuDNN expects all weights of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` in one contiguous chunk of memory, in an order of
its own. On CUDA torch lays them out in this way (``flatten_parameters``), and checks in each forward whether they still
are: the storage of the first weight has to begin with it and to have as many elements as cuDNN needs, and each weight
has to be at its offset from there (``try_get_weight_buf`` in torch's aten/src/ATen/native/cudnn/RNN.cpp). Otherwise
torch copies all of them in every forward, keeps the copy until the backward, and warns.

So weights that shared one storage stay in one: the layout places the whole chunk in one bucket, in which each weight is
at the offset that it had, and they share a storage of exactly the chunk's size. The offsets that cuDNN wants, and the
gaps between them, need not be known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn import Parameter

from ..config import DistributedDataParallelConfig

MAX_CHUNK_RATIO = 2
"""The maximum ratio of a chunk's elements to those of its weights. cuDNN's chunk has space for biases
that a layer without them lacks, which is less. A storage with far more elements is that of a file, or of
all of a model's weights."""


@dataclasses.dataclass(frozen=True)
class ChunkPlace:
    """The place of a parameter in a chunk: from element ``start`` on, of ``numel`` elements. ``name`` is the module's
    name; see [Note: weights in one chunk]."""

    name: str
    start: int
    numel: int


def find_weight_chunks(
    module: nn.Module, params: Iterable[Parameter], config: DistributedDataParallelConfig
) -> dict[int, ChunkPlace]:
    """Finds weights of recurrent layers that share one chunk of memory, by ``id`` of the parameter.

    Finds a layer only if all of its weights are in ``params``: a frozen one, or one of a different dtype, would leave a
    gap in the chunk that no rank fills. Finds none where weights stay in the module's memory.
    """
    if not config.use_distributed_optimizer:
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
    # A weight that is tied to another layer's is in that layer's chunk, and cuDNN accepts neither layer as it is.
    if len(storages) > 1 or len({weight.dtype for weight in weights}) > 1:
        return False
    numel = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    return (
        min(weight.storage_offset() for weight in weights) == 0
        and all(weight.is_contiguous() for weight in weights)
        and numel <= MAX_CHUNK_RATIO * sum(weight.numel() for weight in weights)
    )


def placement_units(chunks: Sequence[ChunkPlace | None], order: Iterable[int]) -> list[list[int]]:
    """Returns groups of parameters that are placed together, each by address: those of a chunk, where ``order`` has the
    first of them, and every other parameter by itself."""
    units: dict[int | str, list[tuple[int, int]]] = {}
    for index in order:
        chunk = chunks[index]
        start, key = (0, index) if chunk is None else (chunk.start, chunk.name)
        units.setdefault(key, []).append((start, index))
    return [[index for _, index in sorted(unit)] for unit in units.values()]
