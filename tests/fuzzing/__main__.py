"""``python -m tests.fuzzing --minutes 60``: random programs until the time is over, or one fails.

A case that ends the process (gloo does, where ranks are in different collectives) is left in the file ``--in-work``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .runs import run_for


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first cases; counts up")
    parser.add_argument("--in-work", type=Path, default=Path("runs/fuzzing/test_in_work.py"), help="gets each case")
    arguments = parser.parse_args()
    arguments.in_work.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    begun = time.monotonic()

    def tell(seed: int, num_cases: int) -> None:
        print(f"{time.monotonic() - begun:5.0f} s, seed {seed}: {num_cases} cases", flush=True)  # noqa: T201

    num_cases = run_for(60 * arguments.minutes, arguments.seed, tell=tell, in_work=arguments.in_work)
    print(f"{num_cases} cases. None failed in {time.monotonic() - begun:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
