"""The chart of docs/speed.md, drawn from the page's first table.

python -m benchmarks.speed_chart
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
INK = "#7d8590"


def rows(page: str) -> list[tuple[str, float, float, float]]:
    """Each row's engine, its median and its quartiles, which are the median where the table has none."""
    first = page.partition("\n## ")[0]
    found = re.findall(r"^\| ([^|]+) \| ([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))? \|$", first, re.MULTILINE)
    return [
        (name.replace("`", ""), float(median), float(low or median), float(high or median))
        for name, median, low, high in found
    ]


def draw(path: Path) -> None:
    """Bars with quartiles, readable on light and dark pages."""
    names, medians, lows, highs = zip(*rows(PAGE.read_text(encoding="utf-8")), strict=True)
    rcParams.update({"svg.hashsalt": "speed", "svg.fonttype": "none"})
    figure = Figure(figsize=(4.4, 2.8), layout="constrained")
    figure.patch.set_alpha(0)
    figure.suptitle("A step on two ranks at 1 Gbit/s is shorter", color=INK, fontsize=11)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    ours = [name.startswith(("megatron_ddp", "overlap")) for name in names]
    spread = [
        [m - low for m, low in zip(medians, lows, strict=True)],
        [h - m for m, h in zip(medians, highs, strict=True)],
    ]
    colors = ["#1d4ed8" if own else "#93c5fd" for own in ours]
    bars = axes.barh(range(len(names)), medians, xerr=spread, height=0.6, color=colors, ecolor=INK)
    axes.bar_label(bars, [f"{median:g}" for median in medians], padding=4, fontsize=9, color=INK)
    labels = [name.partition(",")[0].replace(" with", "\nwith").replace("=True", "") for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("step time, as a part of torch DDP's", fontsize=9, color=INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(PAGE.with_suffix(".svg"))
