"""``campaigns.slurm`` in a Slurm that is made for it on this machine, and ends with it. In the long tier."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.extra_packages import run_or_skip
from tests.support.scripts import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]  # a quarter of an hour: Slurm's limits are in minutes


def left_behind() -> set[str]:
    """The traces of a Slurm on this machine."""
    daemons = {"slurmctld", "slurmd", "slurmstepd", "munged"}
    found = {process.info["name"] for process in psutil.process_iter(["name"])} & daemons
    found |= {command for command in ("srun", "sbatch", "munged") if shutil.which(command)}
    found |= {str(path) for path in (Path("/etc/slurm"), Path("/etc/munge"), Path("/var/log/slurm")) if path.exists()}
    return found | {str(path) for path in Path(tempfile.gettempdir()).glob("slurm-??????")}


def test_jobs_end_and_go_on_as_they_should() -> None:
    before = left_behind()
    if before:
        pytest.skip(f"this machine has a Slurm of its own: {', '.join(sorted(before))}")
    command = [ROOT / "tests" / "slurm" / "cluster.sh", sys.executable, "-m", "campaigns.slurm"]
    done = run_or_skip(command, "root, apt-get, unshare and overlayfs", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 11 + 2 + 15 + 2 + 4, done.stdout
    assert left_behind() == set()
