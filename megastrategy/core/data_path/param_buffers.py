"""Contiguous memory for parameters. The only file that assigns ``param.data``.

[Note: why a view has a storage of its own]
A parameter (or gradient) in a flat buffer is made from a *slice of the buffer's storage*, not from a view of the
buffer: the same memory, but its storage covers exactly its own bytes. So ``torch.save``, ``safetensors``, ``deepcopy``
and pickling see tensors that share nothing, and write one parameter where a plain view would write the whole buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ..errors import ParameterChangedError
from ..layout import BufferLayout, ChunkPlace, ParamSpec, contiguous_stride
from ..module import NOT_IN_BUFFER, LocalParts, is_in_shared_memory


class ParamBuffers:
    """Contiguous parameters, so that a bucket of updated shards can be gathered in place.

    The parameters' memory moves into ``flats`` (1-D, the layout of the gradients) when this is made; values, shapes and
    strides stay. Weights in a chunk share a storage there (recurrent_weights' [Note: weights in one chunk]), and every
    other parameter has a storage of its own. :meth:`restore_params` gives parameters memory
    of their own again, except those that other code has moved out of here (``module.double()``).
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[Parameter],
        device: torch.device,
        parts: LocalParts,
    ) -> None:
        self._device = device
        self._local_parts = parts
        self.params: list[Parameter] = []
        self._parts: list[Tensor] = []  # the local parts of the parameters, in this memory
        self.flats: list[Tensor] = []
        self._addresses: list[int] = []  # of the parameters, by index
        self._chunks: dict[str, UntypedStorage] = {}
        self.extend(layout, params)

    def extend(self, layout: BufferLayout, params: Sequence[Parameter]) -> None:
        """Moves in the parameters that ``layout`` has beyond those known so far."""
        first = len(self.params)
        self.layout = layout
        self.params += params[first:]
        self._parts += map(self._local_parts.local_view, params[first:])
        for buffer in layout.buffers[len(self.flats) :]:
            self.flats.append(torch.zeros(buffer.numel, dtype=buffer.dtype, device=self._device))
        self._addresses += [0] * (len(self._parts) - first)
        for index in range(first, len(self._parts)):
            self._move_in(index)

    def bucket(self, bucket: int) -> Tensor:
        """Returns the bucket's parameters: 1-D view, ``bucket.numel`` elements of the parameter dtype."""
        place = self.layout.buckets[bucket]
        return self.flats[place.buffer][place.start : place.end]

    def recapture(self) -> None:
        """Moves back in the parameters that other code has re-pointed (``p.data = x``), with their present values.

        Raises:
            ParameterChangedError: if one of them has a different dtype, shape or device than when
                the model was wrapped, or is in shared memory.
        """
        self._local_parts.refresh(self._parts, self.params)
        if list(map(Tensor.data_ptr, self._parts)) == self._addresses:  # a loop in C
            return
        moved: list[int] = []
        for index, part in enumerate(self._parts):
            # Compared, since p.data = x leaves no other trace. Empty tensors have no address.
            if part.data_ptr() != self._addresses[index] and part.numel() > 0:
                spec = self.layout.params[index]
                check_unchanged(part, spec)
                if is_in_shared_memory(part):
                    raise ParameterChangedError(
                        f"parameter {spec.name!r} was moved into shared memory, {NOT_IN_BUFFER}"
                    )
                moved.append(index)
        # Hazard: after a.data, b.data = b.data, a.data each has its value in the other's place, and the first that
        # moves back would overwrite the second's. So values that are in the buffers are copied before any moves.
        for index in moved:
            if self._is_inside(self._parts[index]):
                self._parts[index].data = self._parts[index].detach().clone(memory_format=torch.preserve_format)
        for index in moved:
            self._move_in(index)

    def restore_params(self) -> None:
        """Gives every parameter in the buffers memory of its own, with the present values and strides."""
        copies = {name: storage.clone() for name, storage in self._chunks.items()}
        self._local_parts.refresh(self._parts, self.params)
        for part, spec in zip(self._parts, self.layout.params, strict=True):
            if self._is_inside(part):
                # A copy, or the flat buffer would live as long as any parameter in it.
                if spec.chunk is not None:
                    part.data = _in_chunk(part.detach(), copies[spec.chunk.name], spec.chunk, spec.shape)
                else:
                    part.data = part.detach().clone(memory_format=torch.preserve_format)
        self.flats = []
        self._chunks = {}

    def _is_inside(self, part: Tensor) -> bool:
        """Whether the memory of a parameter is in the buffers: not if user code has moved it out
        (``module.double()``)."""
        return any(flat.data_ptr() <= part.data_ptr() < flat.data_ptr() + flat.nbytes for flat in self.flats)

    def _move_in(self, index: int) -> None:
        part = self._parts[index]
        view = self._view(index)
        view.copy_(part.detach())
        part.data = view
        self._addresses[index] = part.data_ptr()

    def _view(self, index: int) -> Tensor:
        """Returns the parameter's place in the flat buffer."""
        spec = self.layout.params[index]
        slot = self.layout.slots[index]
        flat = self.flats[slot.buffer]
        chunk = spec.chunk
        if chunk is None:
            return slice_view(flat, slot.start, spec.shape, spec.stride, spec.numel)
        start = slot.start - chunk.start
        storage = self._chunks.get(chunk.name)
        if storage is None:
            storage = slice_storage(flat, start, chunk.numel)
            self._chunks[chunk.name] = storage
        return _in_chunk(flat, storage, chunk, spec.shape)


def _in_chunk(like: Tensor, storage: UntypedStorage, chunk: ChunkPlace, shape: Sequence[int]) -> Tensor:
    """Returns a contiguous tensor of ``shape``, of the dtype of ``like``, in the storage of its chunk."""
    return like.new_empty(0).set_(storage, chunk.start, tuple(shape), contiguous_stride(shape))


def slice_view(flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int], numel: int) -> Tensor:
    """Returns elements ``[start, start + numel)`` of ``flat`` (1-D, offset 0) as a tensor of ``shape``; see [Note: why
    a view has a storage of its own]."""
    if numel == 0:
        return flat.new_empty(shape)
    return flat.new_empty(0).set_(slice_storage(flat, start, numel), 0, tuple(shape), tuple(stride))


def slice_storage(flat: Tensor, start: int, numel: int) -> UntypedStorage:
    """Returns a separate storage over the memory of elements ``[start, start + numel)`` of ``flat``."""
    itemsize = flat.element_size()
    storage: UntypedStorage = flat.untyped_storage()[start * itemsize : (start + numel) * itemsize]
    return storage


def check_unchanged(part: Tensor, spec: ParamSpec) -> None:
    """Raises ParameterChangedError if a parameter's part no longer has the dtype and shape of its place."""
    if part.dtype != spec.dtype or part.shape != spec.shape:
        raise ParameterChangedError(
            f"parameter {spec.name!r} was {spec.dtype} of shape {spec.shape} when the model was wrapped and is now "
            f"{part.dtype} of shape {tuple(part.shape)}. Change dtypes and shapes before wrapping, or wrap the "
            "model again"
        )
