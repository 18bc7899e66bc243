"""Counts what ranks send to agree: before every batch, after every backward, and when a model is wrapped.

    python -m benchmarks.agreement [RANKS ...]

Ranks are threads over gloo, on one machine. Counted is what a rank gives to gloo, not timed: messages, their bytes, and
how many of them come one after the other. With a latency of ``alpha`` a message and ``beta`` a byte the time is
``alpha * hops + beta * bytes``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo, Store

from megastrategy import DistributedDataParallelConfig
from megastrategy._lightning.checked_collectives import compare_calls
from megastrategy.core.collectives import Collectives, GlooCollectives
from megastrategy.core.data_path.agreement import Agreement
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import ParamSpec
from megastrategy.core.module.module_checks import agree_on_layout

NUM_PARAMS = 300
"""The model's parameters: a byte each is sent after a backward."""


@dataclasses.dataclass
class Cost:
    """Counts what one rank sends.

    Attributes:
        messages: to single ranks.
        sent_bytes: in them.
        hops: messages that come one after the other, until the last rank has all.
    """

    messages: int = 0
    sent_bytes: int = 0
    hops: int = 0

    def add(self, messages: int, sent_bytes: int, hops: int) -> None:
        self.messages, self.sent_bytes, self.hops = (
            self.messages + messages,
            self.sent_bytes + sent_bytes,
            self.hops + hops,
        )


class CountingGroup:
    """A rank's process group that counts what is given to it. What else it is asked for is the group's."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.cost = group, Cost()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        # rings send a word before each message, and wait for one from the other end: each is a hop of its own
        self.cost.add(1, tensors[0].nbytes, 1)
        return self._group.send(tensors, to, tag)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Gloo's ring: a reduce-scatter and an all-gather of ``size`` parts."""
        size, nbytes = self._group.size(), tensors[0].nbytes
        self.cost.add(2 * (size - 1), math.ceil(2 * (size - 1) * nbytes / size), 2 * (size - 1))
        return self._group.allreduce(tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Gloo's tree, in which rank 0 sends the most."""
        depth = math.ceil(math.log2(self._group.size()))
        self.cost.add(depth, depth * tensors[0].nbytes, depth)
        return self._group.broadcast(tensors, options)


def before_a_batch(collectives: Collectives) -> None:
    """A Trainer's ranks meet, and tell each other of signals."""
    compare_calls(collectives, "batch")


def after_a_backward(collectives: Collectives) -> None:
    """Which gradients there are, the microbatch, whether any is not finite."""
    facts = Agreement(
        used=bytes([1] * NUM_PARAMS),
        late=bytes(1),
        has_failed=False,
        has_nonfinite=False,
        counting=(False, True),
        microbatch=7,
    )
    facts.over_ranks(collectives, None)


def when_wrapped(collectives: Collectives) -> None:
    """Layouts are compared."""
    config = DistributedDataParallelConfig()
    specs = [ParamSpec(f"p{n}", (64,), (1,), torch.float32, torch.float32) for n in range(NUM_PARAMS)]
    agree_on_layout(build_layout(specs, config, collectives.size), config, collectives, {})


PLACES: dict[str, Callable[[Collectives], None]] = {
    "before a batch": before_a_batch,
    f"after a backward, {NUM_PARAMS} parameters": after_a_backward,
    "layouts compared": when_wrapped,
}


def costs(size: int, timeout_s: float = 600.0) -> dict[str, Cost]:
    """Counts, by place, what the rank that sends the most sends; the second time, when nothing has to be set up."""
    by_rank: list[dict[str, Cost]] = [{} for _ in range(size)]
    store = HashStore()

    def run(rank: int) -> None:
        counting = CountingGroup(_group(store, rank, size, timeout_s))
        collectives = GlooCollectives(counting)  # type: ignore[arg-type]  # as good as one
        for name, agree in PLACES.items():
            agree(collectives)
            counting.cost = Cost()
            agree(collectives)
            by_rank[rank][name], counting.cost = counting.cost, Cost()
        collectives.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(found) == len(PLACES) for found in by_rank), "some rank failed, and said why"
    return {name: max((found[name] for found in by_rank), key=lambda cost: cost.sent_bytes) for name in PLACES}


def _group(store: Store, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[call-arg]
    group: Any = ProcessGroup(store, rank, size)
    group._register_backend(
        torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, size, options)
    )
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    made: ProcessGroup = group
    return made


def rows(sizes: Sequence[int]) -> Iterator[str]:
    """The table."""
    yield "| | ranks | messages | bytes | one after the other |"
    yield "|---|---|---|---|---|"
    for size in sizes:
        for name, cost in costs(size).items():
            yield f"| {name} | {size} | {cost.messages} | {cost.sent_bytes:,} | {cost.hops} |"


@contextmanager
def _many_files() -> Iterator[None]:
    """Each two ranks have a connection, which is two files here."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    with _many_files():
        for row in rows([int(size) for size in sys.argv[1:]] or [2, 8, 32, 128]):
            print(row, flush=True)
