"""Gloo has released its tensors before the process ends, and before the group does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import Collectives, GlooCollectives, Handle
from megastrategy.core.collectives.gloo_references import GlooReferences
from megastrategy.core.collectives.instanced import InstanceCollectives
from tests.support.ranks import run_ranks, with_instances
from tests.support.timeouts import HANG_S

# All that is carried out by those threads of gloo's that know tensors, and how many it gives them.
OPERATIONS: dict[str, tuple[Callable[[Collectives], Handle], int]] = {
    "all_reduce": (lambda collectives: collectives.all_reduce(torch.ones(4), 1.0), 1),
    "all_reduce_max": (lambda collectives: collectives.all_reduce_max(torch.ones(4)), 1),
    "broadcast": (lambda collectives: collectives.broadcast(torch.ones(4)), 1),
    # the first exchange between two ranks broadcasts a number
    "reduce_scatter_into": (lambda collectives: collectives.reduce_scatter_into(torch.ones(1), torch.ones(4), 1.0), 1),
    "all_gather": (lambda collectives: collectives.all_gather(torch.ones(4)), 1),
    "between instances": (lambda collectives: collectives.instances[2].reduce_scatter(torch.ones(4), 1.0), 1 + 1),
}


class HeldTensors(GlooReferences):
    """In place of a thread of gloo's that is late to let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def view_for_gloo(self, tensor: Tensor) -> Tensor:
        self.held.append(super().view_for_gloo(tensor))
        return self.held[-1]


@pytest.mark.real_collectives("tells of what gloo's threads have")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_close_returns_when_gloo_has_let_go(operation: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        collectives = with_instances(group, 2)
        assert isinstance(collectives, GlooCollectives)
        instance = collectives.instances[2]
        assert isinstance(instance, InstanceCollectives)
        references = HeldTensors()
        for owner in (collectives, instance.inside, instance.across):
            assert isinstance(owner, GlooCollectives)
            owner._gloo_references = owner._rings._gloo_references = references
        start, num_passed = OPERATIONS[operation]
        start(collectives).wait()
        assert len(references.held) == num_passed
        events: list[str] = []

        def let_go() -> None:
            events.append("let go")
            references.held.clear()

        timer = threading.Timer(0.3, let_go)
        timer.start()
        collectives.close()
        events.append("closed")
        timer.join()
        assert events == ["let go", "closed"]

    run_ranks(4, run)


def test_wait_for_held_tensor_is_bounded() -> None:
    references, tensor = GlooReferences(), torch.zeros(2)
    kept = references.view_for_gloo(tensor)
    kept += 1
    assert tensor.tolist() == [1, 1], "it is the same memory"
    assert not references.wait_until_released(0.05)
    del kept
    assert references.wait_until_released(0.0)


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from megastrategy.core import private_group
from megastrategy.core.collectives import GlooCollectives
from megastrategy.core.collectives.worker import Worker

Worker.CLOSE_TIMEOUT_S = 600.0  # a loaded machine may give idle threads no time for longer than the 5 s of users
cpu = torch.device("cpu")
sys.setswitchinterval(100)  # who waits for the GIL gets it when another thread has nothing to do
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
every = [GlooCollectives(private_group(None, cpu)) for _ in range(8)]  # which a rank alone is not given
idle = []
for thread in {int(name) for name in os.listdir("/proc/self/task")} - {os.getpid()}:
    try:
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        idle.append(thread)
    except ProcessLookupError:  # one that made connections, and has ended
        pass
assert len(idle) >= 18, "two or three threads a group, as many of the default one, and those of gloo's sockets"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for handle in [collectives.all_reduce(torch.ones(1000), 1.0) for collectives in every]:
    handle.wait()
"""


def test_a_process_ends_well_right_after_a_collective() -> None:
    """Gloo's threads get to run only when all others wait. Without a wait for them, most such processes aborted
    ("terminate called without an active exception"): 12 of 12 with eight groups, 7 with three."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
