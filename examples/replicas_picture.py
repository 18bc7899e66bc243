"""Draws losses and times of steps that runs of examples/replicas.py wrote, such as one with kills beside one without.

python examples/replicas_picture.py PICTURE RUN [RUN ...]
"""

from __future__ import annotations

import collections
import csv
import itertools
import sys
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

Step = tuple[int, float, float, int]
"""Its number, the time of its end, the mean loss, and the number of replicas."""


def read_steps(run: Path) -> list[Step]:
    """Returns the steps of a run in order; what several replicas wrote of one step is one."""
    rows = collections.defaultdict(list)
    for path in run.glob("steps-*.csv"):
        with path.open(newline="") as file:
            for step, time, loss, members in csv.reader(file):
                rows[int(step)].append((float(time), float(loss), int(members)))
    return [
        (step, max(time for time, _, _ in found), mean(loss for _, loss, _ in found), min(num for _, _, num in found))
        for step, found in sorted(rows.items())
    ]


def main() -> None:
    picture, *runs = map(Path, sys.argv[1:])
    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, times = figure.subplots(2, sharex=True)
    for run in runs:
        steps = read_steps(run)
        numbers, ends = [step for step, _, _, _ in steps], [end for _, end, _, _ in steps]
        smoothed = [mean(loss for _, _, loss, _ in steps[max(0, i - 9) : i + 1]) for i in range(len(steps))]
        losses.plot(numbers, smoothed, label=f"{run.name}: {ends[-1] - ends[0]:.0f} s")
        times.plot(numbers[1:], [end - before for before, end in itertools.pairwise(ends)], linewidth=0.8)
        largest = max(num for _, _, _, num in steps)
        for step in (step for step, _, _, num in steps if num < largest):
            losses.axvspan(step - 0.5, step + 0.5, color="0.9", linewidth=0)
    losses.set(ylabel="loss, mean of 10 steps", yscale="log", title="grey: a replica is away")
    times.set(xlabel="step", ylabel="seconds a step", yscale="log")
    losses.set_yticks([0.1, 0.2, 0.5, 1, 2], labels=["0.1", "0.2", "0.5", "1", "2"])
    times.set_yticks([0.2, 0.5, 1, 2], labels=["0.2", "0.5", "1", "2"])
    for axes in (losses, times):
        axes.minorticks_off()
    losses.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
