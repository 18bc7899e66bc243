"""Measures what rounding for the wire costs, and how far off its numbers are: every format that is or might be.

python -m benchmarks.rounding
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megastrategy.core.wire import BLOCK_NUMEL, read_wire, wire_numel, wire_part, write_wire_

_PIECE_NUMEL = 2**16
_TURNS = 7


def _write(wire: Tensor, values: Tensor) -> None:
    for start in range(0, values.numel(), _PIECE_NUMEL):
        write_wire_(wire_part(wire, start, start + _PIECE_NUMEL), values[start : start + _PIECE_NUMEL])


def _add(wire: Tensor, sums: Tensor) -> None:
    for start in range(0, sums.numel(), _PIECE_NUMEL):
        came = read_wire(wire_part(wire, start, start + _PIECE_NUMEL), _PIECE_NUMEL)
        sums[start : start + _PIECE_NUMEL].add_(came, alpha=0.5)


class _Fp8:
    """No format of the engine: fp8 in the same blocks, whose codes and scales are in two tensors here."""

    def __init__(self, numel: int) -> None:
        self.codes = torch.empty(numel, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(numel // BLOCK_NUMEL, 1, dtype=torch.bfloat16)

    def write(self, values: Tensor) -> None:
        for start in range(0, values.numel(), _PIECE_NUMEL):
            blocks = values[start : start + _PIECE_NUMEL].view(-1, BLOCK_NUMEL)
            scale = blocks.abs().amax(1, keepdim=True).mul_(1 / 448).clamp_min_(2.0**-120).bfloat16()
            self.scales[start // BLOCK_NUMEL :][: len(scale)].copy_(scale)
            self.codes[start : start + _PIECE_NUMEL].view(-1, BLOCK_NUMEL).copy_(blocks * scale.float().reciprocal_())

    def read(self, start: int) -> Tensor:
        codes = self.codes[start : start + _PIECE_NUMEL].float().view(-1, BLOCK_NUMEL)
        return codes.mul_(self.scales[start // BLOCK_NUMEL :][: len(codes)].float()).view(-1)

    def add(self, sums: Tensor) -> None:
        for start in range(0, sums.numel(), _PIECE_NUMEL):
            sums[start : start + _PIECE_NUMEL].add_(self.read(start), alpha=0.5)


def _ns_an_element(turn: Callable[[], object], numel: int) -> str:
    times = []
    for _ in range(_TURNS + 1):
        begun = time.thread_time_ns()
        turn()
        times.append((time.thread_time_ns() - begun) / numel)
    quartiles = statistics.quantiles(times[1:], n=4)
    return f"{quartiles[1]:.2f} ({quartiles[0]:.2f} to {quartiles[2]:.2f})"


@click.command(help="Measures rounding: nanoseconds of one core an element, and the error, root mean square.")
@click.option("--numel", type=click.IntRange(1), default=2**22, show_default=True, help="Rounded to whole pieces.")
def main(*, numel: int) -> None:
    """The command."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numel = max(numel // _PIECE_NUMEL, 1) * _PIECE_NUMEL
    normal = torch.randn(numel)
    numbers = {
        "normal": normal,
        "Student's t, 3 degrees": torch.distributions.StudentT(3.0).sample((numel,)),
        "normal times lognormal": normal * torch.exp(1.5 * torch.randn(numel)),
    }
    table = Table("", "write, ns", "read and add, ns", *(f"error, {name}" for name in numbers))
    for name in ("bf16", "fp16", "int8", "fp8"):
        sums, errors = torch.zeros(numel), []
        write, add = _ways(name, numel)
        times = [_ns_an_element(lambda w=write: w(normal), numel), _ns_an_element(lambda a=add, s=sums: a(s), numel)]
        for values in numbers.values():
            write(values)
            add(came := torch.zeros(numel))
            errors.append(f"{(2 * came - values).norm() / values.norm():.4f}")
        table.add_row(name, *times, *errors)
    Console(width=120).print(table)


def _ways(name: str, numel: int) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    if name == "fp8":
        blocks = _Fp8(numel)
        return blocks.write, blocks.add
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}[name]
    wire = torch.empty(wire_numel(numel, dtype), dtype=dtype)
    return lambda values: _write(wire, values), lambda sums: _add(wire, sums)


if __name__ == "__main__":
    main()
