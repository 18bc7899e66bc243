"""A test that hangs shows within a minute where each of its ranks waits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.processes import run_processes
from tests.support.timeouts import write_stacks


def wait_in_a_barrier(folder: Path) -> None:
    """Rank 1 comes to it when the stacks were written."""
    (folder / str(dist.get_rank())).touch()
    while dist.get_rank() == 1 and not (folder / "written").exists():
        time.sleep(0.5)
    dist.barrier()


def test_stacks_of_ranks_have_native_frames(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = threading.Thread(target=run_processes, args=(2, wait_in_a_barrier, tmp_path))
    job.start()
    while not {tmp_path / "0", tmp_path / "1"} <= set(tmp_path.iterdir()):
        time.sleep(0.1)
        assert job.is_alive(), "a rank failed"
    stacks = ""
    while job.is_alive() and "Work::wait" not in stacks and "Permission" not in stacks:  # rank 0 is on its way to it
        write_stacks()
        stacks = capfd.readouterr().err
    (tmp_path / "written").touch()
    job.join()
    if "Permission" in stacks:
        pytest.skip("the kernel lets no process look into another: kernel.yama.ptrace_scope is not 0, without root")
    assert "barrier (torch/distributed" in stacks, "rank 0 waits for the barrier, inside c10d"
    assert "clock_nanosleep" in stacks, "rank 1 sleeps"
    assert "run_processes (" in stacks, "the test waits for both"
