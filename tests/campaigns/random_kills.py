"""``python -m tests.campaigns.random_kills --minutes 10``: random kills, until the time is over or one fails."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.random_kills", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; counts up")
    arguments = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "warn")  # before torchft is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.support.random_kills import Program, check

    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    multiprocessing.set_forkserver_preload(["tests.support.random_kills"])
    begun, seed = time.monotonic(), arguments.seed
    while time.monotonic() < begun + 60 * arguments.minutes:
        program = Program.draw(seed)
        print(f"seed {seed}: {program.case}", flush=True)  # noqa: T201
        print(*program.kills, sep="\n", flush=True)  # noqa: T201
        with tempfile.TemporaryDirectory() as folder:
            print(check(program, Path(folder)), flush=True)  # noqa: T201
        seed += 1
    print(f"{seed - arguments.seed} programs. None failed in {time.monotonic() - begun:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
