"""The collectives of hosts that cannot connect, over the key-value store that all of them reach."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from ..layout import Spans
from .interface import GLANCE_S, Collectives, Handle
from .roll_call import RollCall
from .single_rank import Done
from .tensor_parts import add_parts_, bytes_of

_POLL_S = 0.001


class StoreCollectives(Collectives):
    """For tensors in host memory: every rank writes its own into the store and reads all others'.

    The store has ``size`` writes and ``size ** 2`` reads for each of them, in one process: good for the few bytes that
    ranks agree on, and for nothing else. Each is done when it has been started.

    Args:
        group: the ranks, which need not be connected.
        store: in which nothing else is.
        roll_call: as for all collectives.
    """

    def __init__(self, group: ProcessGroup, store: Store, roll_call: RollCall | None = None) -> None:
        super().__init__(group, roll_call)
        self._store = store
        self._num_rounds = 0
        self._timeout_s = group._get_backend(group._device_types[0]).options._timeout.total_seconds()

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        parts = self._exchange("all-reduce", tensor)
        tensor.zero_()
        add_parts_(tensor, parts, scale, scale_sum)
        return Done()

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        tensor.copy_(torch.stack(self._exchange("all-reduce", tensor)).amax(0))
        return Done()

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        return self.all_reduce(tensor, scale, scale_sum=scale_sum)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        parts = [part.chunk(self.size)[self.rank] for part in self._exchange("reduce-scatter", tensor)]
        add_parts_(sums, parts, scale, scale_sum)
        return Done()

    def all_gather(self, tensor: Tensor) -> Handle:
        parts = self._exchange("all-gather", tensor.chunk(self.size)[self.rank])
        tensor.copy_(torch.cat(parts))
        return Done()

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        parts = self._exchange("all-gather", tensor)
        for part, of_rank in zip(parts, spans, strict=True):
            for start, end in of_rank:
                tensor[start:end] = part[start:end]
        return Done()

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        # What all send is of one size here, and nobody knows how much others send to others.
        everybody = self.all_gather_bytes(pickle.dumps((tensor, list(sizes))))
        parts = [pickle.loads(data) for data in everybody]
        received.copy_(torch.cat([sent.split(given)[self.rank] for sent, given in parts]))
        return Done()

    def broadcast(self, tensor: Tensor) -> Handle:
        tensor.copy_(self._exchange("broadcast", tensor)[0])
        return Done()

    def _exchange(self, what: str, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, by rank; they are of one size."""
        self._count(what)
        self._num_rounds += 1
        number, store = self._num_rounds, self._store
        with self.named_failures(what):
            own: Any = bytes(bytes_of(tensor))  # which a store takes
            store.set(f"{number}/{self.rank}", own)
            keys = [f"{number}/{rank}" for rank in range(self.size)]
            self._wait_for(keys, what)
            found = [bytearray(store.get(key)) for key in keys]
            # All are in this round, so all have read the one before: what stays in the store is two rounds at most.
            store.delete_key(f"{number - 1}/{self.rank}")
        return [torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape) for data in found]

    def _wait_for(self, keys: list[str], what: str) -> None:
        began = time.monotonic()
        next_glance = began + GLANCE_S
        # Looked at, as the store's own wait can be neither watched nor interrupted.
        while not self._store.check(keys):
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now > next_glance:
                next_glance = now + GLANCE_S
                self.glance(what, self.num_started)
            if now > began + self._timeout_s:
                self._give_up(what, f"not all ranks came within {self._timeout_s:g} s, the group's timeout")
