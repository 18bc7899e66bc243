"""Two hosts whose names and interfaces are as people have them: it starts wherever "ddp" starts. In
the long tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.comparison import assert_equal
from tests.support.extra_packages import run_or_skip
from tests.support.scripts import outside_of_ranks
from tests.support.timeouts import HANG_S

from .__main__ import TRAINING

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

HOSTS = Path(__file__).with_name("hosts.sh")


def started(kind: str, strategy: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """The results of the hosts that ended: weights, or an error; and how long it took."""
    variables |= {"MASTER_PORT": "29511", "LOCAL_RANK": "0"}
    # host 0's address, and each host's number, are known on the hosts alone
    rank = 'MASTER_ADDR=$FIRST NODE_RANK=$HOST exec "$@"'
    found, done = run_on_hosts(kind, rank, [TRAINING, strategy, folder], folder, **variables)
    assert (done.returncode == 0) == all("weights" in one for one in found), done.stdout + done.stderr
    return found


def run_on_hosts(
    kind: str, shell: str, arguments: list[Path | str], folder: Path, **variables: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Runs a script by a command line of each host, which has its arguments; returns what is in ``folder`` then."""
    folder.mkdir()
    ours = {name: value for name, value in outside_of_ranks().items() if not name.startswith("GLOO_")} | variables
    ours |= {"TMPDIR": str(folder)}
    command = [HOSTS, kind, "bash", "-c", shell, "", sys.executable, *arguments]
    done = run_or_skip(command, "root, unshare and iproute2", env=ours, cwd=folder, timeout=HANG_S)
    found = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
    assert found, done.stdout + done.stderr
    return found, done


@pytest.mark.parametrize("kind", ["names", "debian", "dead-end", "ipv6"])
def test_it_starts_where_ddp_starts_and_says_what_to_do_where_not(tmp_path: Path, kind: str) -> None:
    ddp = started(kind, "ddp", tmp_path / "ddp")
    ours = started(kind, "megatron_ddp", tmp_path / "ours")
    if kind in ("names", "ipv6"):
        assert_equal([one["weights"] for one in ours], [one["weights"] for one in ddp])
        assert len(ours) == 2
        return
    for one in ddp:
        assert "Gloo connectFullMesh failed" in one["error"]
    for one in ours:
        *_, note = one["error"].strip().splitlines()
        assert note.startswith("gloo listens where the machine's name leads to, and host")
        assert "Set GLOO_SOCKET_IFNAME on every machine to an interface that the others reach" in note
        assert "eth0 (10.77.0." in note
        assert one["seconds"] < 30
    # and what it says helps
    told = started(kind, "megatron_ddp", tmp_path / "told", GLOO_SOCKET_IFNAME="eth0")
    like_others = started("names", "ddp", tmp_path / "names")
    assert_equal([one["weights"] for one in told], [one["weights"] for one in like_others])
