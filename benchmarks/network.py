"""A network whose links take time and no processor: namespaces on a bridge, each link shaped by a token bucket.

On plain loopback all communication is processor time, and nothing can be hidden under computation on a machine with as
many cores as ranks. Here every rank has a network namespace with one interface, whose address exists only there.

[Note: teardown]
A namespace has no name: it exists as long as a process in it. Each is held by one that reads from a pipe of ours. So
when this process ends, in whatever way (Ctrl-C, SIGKILL), the holders end, and the kernel removes namespaces,
interfaces and queues. Nothing can be left behind, or be in the way of another run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"
_BURST = "256kb"  # of the token bucket: what one write of 64 kB, not yet cut into packets, needs, with room
_QUEUE = "2mb"  # beyond it packets are dropped; a socket's send buffer is full before that
_SYSCTLS = (
    "net.ipv4.tcp_congestion_control=reno",  # steady where bbr probes and paces
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_no_metrics_save=1",
)


class NetworkError(RuntimeError):
    """The network cannot be made here."""


def check_rate(rate: str) -> str:
    """Returns what tc understands as a rate in bits.

    Raises:
        ValueError: for anything else.
    """
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
        raise ValueError(f"{rate!r} is not a rate: expected something like 1gbit or 200mbit")
    return rate


def check_possible() -> None:
    """Raises NetworkError, with what is missing, where namespaces cannot be made."""
    if not sys.platform.startswith("linux"):
        raise NetworkError("--network needs Linux (network namespaces); leave it out to use the loopback interface")
    missing = [name for name in ("ip", "tc", "unshare", "nsenter", "sysctl") if shutil.which(name) is None]
    if missing:
        raise NetworkError(
            f"--network needs {', '.join(missing)} (packages iproute2, util-linux, procps); leave it out to use the "
            "loopback interface"
        )
    if os.geteuid() != 0:
        raise NetworkError(
            "--network needs root, to make network namespaces; leave it out to use the loopback interface"
        )


class _Namespace:
    """A network namespace, and the process that holds it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # out of the reach of the terminal's Ctrl-C: ranks end first
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, errors = self._holder.communicate()
            raise NetworkError(f"a network namespace could not be made: {errors.strip()}")
        self.path = Path(f"/proc/{self._holder.pid}/ns/net")
        self.pid = self._holder.pid

    def run(self, *command: str) -> None:
        """Runs a command inside."""
        done = subprocess.run(["nsenter", f"--net={self.path}", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")

    def close(self) -> None:
        self._holder.communicate()  # closes the pipe, at whose end it exits


@contextlib.contextmanager
def shaped_network(num_ranks: int, rate: str) -> Iterator[tuple[list[Path], str]]:
    """A namespace for each rank, with links of this rate in each direction; their files, and rank 0's address.

    Raises:
        NetworkError: if the system refuses.
    """
    check_possible()
    with contextlib.ExitStack() as stack:

        def namespace() -> _Namespace:
            made = _Namespace()
            stack.callback(made.close)
            return made

        switch = namespace()
        switch.run("ip", "link", "add", "bridge0", "type", "bridge")
        switch.run("ip", "link", "set", "bridge0", "up")
        members = []
        for rank in range(num_ranks):
            member = namespace()
            member.run("ip", "link", "set", "lo", "up")
            port, peer = f"port{rank}", ("peer", "name", INTERFACE, "netns", str(member.pid))
            switch.run("ip", "link", "add", port, "type", "veth", *peer)
            switch.run("ip", "link", "set", port, "master", "bridge0", "up")
            member.run("ip", "addr", "add", f"10.0.0.{rank + 1}/24", "dev", INTERFACE)
            member.run("ip", "link", "set", INTERFACE, "up")
            for setting in _SYSCTLS:
                member.run("sysctl", "-qw", setting)
            shape = ("tbf", "rate", rate, "burst", _BURST, "limit", _QUEUE)
            member.run("tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
            members.append(member)
        yield [member.path for member in members], "10.0.0.1"
