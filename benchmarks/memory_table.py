"""Bytes a parameter on one of d ranks, for this engine and its peers: the table of docs/memory.md and its chart.

    python -m benchmarks.memory_table                          # prints the table
    python -m benchmarks.memory_table --draw docs/memory.svg   # draws the chart

Counted is what lives between two steps with Adam: weights, gradients, two moments, and fp32 copies of 16-bit weights;
not counted are activations, padding and step counters. Sources: figure 1 of Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (2020), for ZeRO-1 and ZeRO-2; the theoretical memory in
Megatron-core's guide to its distributed optimizer; FSDP2 shards parameters, gradients and state.
``tests/core/properties/test_memory.py`` holds this engine's rows to the byte.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = (2, 8, 64)


@dataclass(frozen=True)
class Method:
    """``whole`` bytes a parameter on every rank, and ``divided`` bytes a parameter over all of them."""

    label: str
    name: str
    whole: int
    divided: int = 0

    def bytes_on(self, ranks: int) -> float:
        return self.whole + self.divided / ranks

    @property
    def formula(self) -> str:
        parts = [str(self.whole)] * bool(self.whole) + [f"{self.divided}/d"] * bool(self.divided)
        return " + ".join(parts)


FP32 = (
    Method("torch DDP", "torch DDP (`gradient_as_bucket_view=True`; else 4 more)", 4 + 4 + 8),
    Method("megatron_ddp", "**`megatron_ddp`**", 4 + 4, 8),
    Method("Megatron-core", "Megatron-core, distributed optimizer", 4 + 4, 8),
    Method("ZeRO-1", "ZeRO-1", 4 + 4, 8),
    Method("ZeRO-2", "ZeRO-2", 4, 4 + 8),
    Method("FSDP2", "FSDP2 (and a layer's weights while it runs)", 0, 4 + 4 + 8),
)
BF16 = (
    Method("torch DDP", "torch DDP, an optimizer with fp32 copies", 2 + 2 + 12),
    Method("megatron_ddp", "**`megatron_ddp`**, gradients in fp32", 2 + 4, 12),
    Method("... pooled", '**`megatron_ddp`**, `grad_buffer="pooled"` (and a few buckets during backward)', 2, 4 + 12),
    Method("Megatron-core", "Megatron-core, distributed optimizer, gradients in fp32", 2 + 4, 12),
    Method("ZeRO-1", "ZeRO-1", 2 + 2, 12),
    Method("ZeRO-2", "ZeRO-2", 2, 2 + 12),
    Method("FSDP2", "FSDP2, fp32 parameters cast to bf16 (and a layer's weights while it runs)", 0, 4 + 4 + 8),
)


def table() -> str:
    """Both groups as one Markdown table."""
    header = ["| bytes a parameter, Adam | formula | " + " | ".join(f"d = {ranks}" for ranks in RANKS) + " |"]
    header.append("|---|---|" + "---|" * len(RANKS))
    return "\n".join([*header, "| **fp32** |||||", *map(_row, FP32), "| **bf16 weights** |||||", *map(_row, BF16)])


def _row(method: Method) -> str:
    figures = " | ".join(f"{method.bytes_on(ranks):.4g}" for ranks in RANKS)
    return f"| {method.name} | {method.formula} | {figures} |"


def draw(path: Path) -> None:
    """The same figures as bars, readable on light and dark pages."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    ink = "#7d8590"
    rcParams.update({"svg.hashsalt": "memory", "svg.fonttype": "none"})
    figure = Figure(figsize=(4.4, 5.6), layout="constrained")
    figure.patch.set_alpha(0)
    figure.suptitle("What a rank keeps falls with the number of ranks", color=ink, fontsize=11)
    for axes, title, methods in zip(figure.subplots(2, 1), ("fp32 weights", "bf16 weights"), (FP32, BF16), strict=True):
        axes.patch.set_alpha(0)
        _bars(axes, title, methods, ink)
    bars = axes.get_legend_handles_labels()
    figure.legend(*bars, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=ink)
    figure.savefig(path, metadata={"Date": None})


def _bars(axes, title: str, methods: Sequence[Method], ink: str) -> None:  # type: ignore[no-untyped-def]
    for place, ranks in enumerate(RANKS):
        axes.barh(
            [row + 0.27 * (place - 1) for row in range(len(methods))],
            [method.bytes_on(ranks) for method in methods],
            height=0.25,
            color=("#93c5fd", "#3b82f6", "#1d4ed8")[place],
            label=f"{ranks} ranks",
        )
    for row, method in enumerate(methods):
        figures = " · ".join(f"{method.bytes_on(ranks):.3g}" for ranks in RANKS)
        axes.text(method.bytes_on(2) + 0.3, row, figures, fontsize=9, color=ink, va="center")
    axes.set_yticks(range(len(methods)), [method.label for method in methods], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 22)
    axes.set_xticks(range(0, 17, 4))
    axes.set_xlabel(f"bytes per parameter: {title}, gradients, Adam", fontsize=9, color=ink)
    axes.tick_params(colors=ink, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="the file that gets the chart")
    path = parser.parse_args().draw
    if path is None:
        print(table())
    else:
        draw(path)


if __name__ == "__main__":
    main()
