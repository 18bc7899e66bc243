"""python -m campaigns.old_checkpoints --commit COMMIT: the working tree loads what an older commit has saved.

Two and four ranks with the package of that commit, in a git worktree in a temporary folder, write checkpoints of every
kind: :file:`ranks.py` lists them. One to four ranks with the working tree's package load each. It fails where a bit of
the state differs from the saved one, or, with the same ranks, from that of the older commit two steps later.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ranks.py")


def run(tree: Path, size: int, task: str, folder: Path) -> str:
    """Runs the script on ``size`` ranks with a tree's package, and returns what rank 0 prints."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    env = {**os.environ, **where, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(SCRIPT), task, str(folder)]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, cwd=folder, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=1800)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{task} on {size} ranks failed: exit codes {[rank.returncode for rank in ranks]}")
    return printed[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="whose checkpoints are loaded")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as temporary:
        tree, folder = Path(temporary, "tree"), Path(temporary, "checkpoints")
        folder.mkdir()
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            for size in (2, 4):
                run(tree, size, "write", folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        lines = [line for size in (1, 2, 3, 4) for line in run(ROOT, size, "load", folder).splitlines()]
    sys.stdout.write("\n".join([*lines, ""]))
    different = [line for line in lines if not line.endswith(": equal")]
    if different:
        raise SystemExit(f"{len(different)} of {len(lines)} differ")
    sys.stdout.write(f"{len(lines)} equal\n")


if __name__ == "__main__":
    main()
