"""python -m campaigns.replica_kills [--seeds 1-20] [--script loop.py]: kills processes of replicas.

A seed draws the replicas that are killed (never all), one or all ranks of them, and when: while all train, or as soon
as a replica has come back, when it meets the others or takes their state. Prints a line for each run, and ends with an
error if ranks have different weights, a survivor was started again, or has not trained each of its samples once.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.support.replica_jobs import HEARTBEAT_S, Job, check_ends, check_survivor, longest_pause

EPOCHS, PAUSE_S, NUM_KILLS = 20, 0.05, 3
MOST_S = HEARTBEAT_S + 5.0
"""A pause of a survivor. The heartbeat and a second are promised; a busy machine takes some for a step alone."""
LAYOUTS = ((2, 2), (3, 1))
"""Replicas, and the ranks of each."""


def run(seed: int, of: int, ranks: int, script: str, folder: Path) -> str:
    """Returns a line of the table."""
    draw = random.Random(f"{seed} {of} {ranks}")
    victims = draw.sample(range(of), draw.randint(1, of - 1))
    kinds = []
    slot = victims[0]
    job = Job.start(script, folder, EPOCHS, PAUSE_S, of=of, ranks=ranks)
    start = time.monotonic()
    try:
        for number in range(NUM_KILLS):
            comes_back = number > 0 and draw.random() < 0.5
            if comes_back:
                job.wait_for_start(slot)
                time.sleep(draw.uniform(0.0, 1.0))
            else:
                slot = draw.choice(victims)
                job.wait_until_together(draw.randint(1, 4) if number > 0 else draw.randint(2, 6))
            killed = range(ranks) if draw.random() < 0.5 else [draw.randrange(ranks)]
            job.kill(slot, *killed)
            kinds.append(f"{slot}{'*' if len(killed) > 1 else ''}{' back' if comes_back else ''}")
        check_ends(job, EPOCHS)
    finally:
        job.stop()
    survivors = [slot for slot in range(of) if slot not in victims]
    pauses = []
    for slot in survivors:
        check_survivor(job, slot, EPOCHS)
        pauses += [longest_pause(lines) for rank in range(ranks) for lines in job.journals(slot, rank).values()]
    assert max(pauses) < MOST_S, f"a survivor has paused for {max(pauses):.1f} s"
    lines = [line for slot in survivors for one in job.journals(slot).values() for line in one]
    dropped = sum(line["dropped"] for line in lines)
    load = os.getloadavg()[0]
    return (
        f"| {seed} | {of} x {ranks} | {', '.join(kinds)} | {max(pauses):.2f} | {dropped} | "
        f"{time.monotonic() - start:.0f} | {load:.0f} |"
    )


@click.command(help=__doc__)
@click.option("--seeds", default="1-20", show_default=True, help="A number, or the first and the last one.")
@click.option("--script", type=click.Choice(["loop.py", "trainer.py"]), default="loop.py", show_default=True)
def main(*, seeds: str, script: str) -> None:
    """The command."""
    first, _, last = seeds.partition("-")
    failures = 0
    click.echo("| seed | replicas x ranks | kills | longest pause of a survivor, s | dropped batches | s | load |")
    click.echo("|---|---|---|---|---|---|---|")
    for seed in range(int(first), int(last or first) + 1):
        for of, ranks in LAYOUTS if script == "loop.py" else ((2, 1), (3, 1)):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    click.echo(run(seed, of, ranks, script, Path(folder)))
                except AssertionError as error:
                    failures += 1
                    click.echo(f"| {seed} | {of} x {ranks} | FAILED: {error} |")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
