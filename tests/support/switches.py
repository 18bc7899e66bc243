"""Every switch of the configuration, and few rows in which any two values of any two of them meet."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.config import CONTRADICTIONS

from .training import Run

MAY_CONTRADICT: dict[str, Sequence[Any]] = {
    "bucket_size": [None, 1, 200, 10**9],  # the default, a bucket for each parameter, several, and one
    "overlap_grad_reduce": [True, False],
    "use_distributed_optimizer": [True, False],
    "num_distributed_optimizer_instances": [1, 2],
    "use_contiguous_buffers": [True, False],
    "grad_buffer": ["contiguous", "pooled"],
    "dtype": [torch.float32, torch.bfloat16],  # the weights'; no field, but two fields are about 16 bits alone
    "grad_reduce_in_fp32": [True, False],
    "reduce_scatter_with_fp32_accumulation": [False, True],
    "find_unused_parameters": [True, False],
    "static_graph": [False, True],
    "grad_wire_dtype": [None, "bf16"],
    "offload_optimizer_states": [False, True],
}
GO_WITH_ALL: dict[str, Sequence[Any]] = {
    "overlap_param_gather": [False, True],
    "broadcast_buffers": [True, False],
    "check_for_nan_in_grad": [False, True],
}
SWITCHES = {**MAY_CONTRADICT, **GO_WITH_ALL}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A value for every switch."""

    config: DistributedDataParallelConfig
    dtype: torch.dtype

    def __str__(self) -> str:
        """Names the values that differ from the defaults."""
        chosen = [f"{self.dtype}".removeprefix("torch.")]
        for field in dataclasses.fields(self.config):
            value = getattr(self.config, field.name)
            if value != field.default and isinstance(value, bool):
                chosen.append(field.name if value else f"no {field.name}")
            elif value != field.default:
                chosen.append(f"{field.name}={value}")
        return ", ".join(chosen)

    @property
    def num_ranks(self) -> int:
        """Two in each instance."""
        return 2 * self.config.num_distributed_optimizer_instances

    @property
    def grads_have_sixteen_bits(self) -> bool:
        return self.dtype == torch.bfloat16 and not self.config.grad_reduce_in_fp32

    @property
    def rounds_grads(self) -> bool:
        """Whether gradients are sent in fewer bits than they have."""
        return self.config.grad_wire_dtype is not None and not self.grads_have_sixteen_bits

    @property
    def run(self) -> Run:
        """Chooses what is trained, so that torch DDP's result has to be met to the bit.

        Parameters are used as the row promises. fp32 on two ranks, where a sum has one order only: the awkward model,
        whose every operation rounds; pooled gradients of one microbatch a step, since of several the mean over ranks
        is taken first, which rounds elsewhere. In all other rows sums over ranks have another order than torch DDP's,
        or another dtype: there gradients are integers, whose sums are not rounded, of up to 127 (two microbatches
        are 8 bits, of several ranks more than bf16 has) unless they are summed in bf16 itself. So they are where
        something is sent in fewer bits; they do not depend on the weights, then.
        """
        config, pooled = self.config, self.config.grad_buffer == "pooled"
        used = "same" if config.static_graph else "some" if config.find_unused_parameters else "all"
        options = (("lr", 0.01), ("weight_decay", 0.01))
        if self.dtype == torch.float32 and self.num_ranks == 2 and not self.rounds_grads:
            return Run("AdamW", options, groups=3, accumulate=1 if pooled else 2, steps=6, used=used)
        in_bf16 = self.grads_have_sixteen_bits and not (pooled or config.reduce_scatter_with_fp32_accumulation)
        largest = 15 if in_bf16 else 127
        return Run(
            "AdamW", options, groups=3, accumulate=2, steps=6, dtype=self.dtype, used=used, largest_whole=largest
        )


def make_row(values: Mapping[str, Any]) -> Row:
    """Raises ValueError for values that contradict each other."""
    fields = dict(values)
    row = Row(dtype=fields.pop("dtype"), config=DistributedDataParallelConfig(**fields))
    if not row.config.grad_reduce_in_fp32 and row.dtype == torch.float32:
        raise ValueError("grad_reduce_in_fp32=False says nothing of fp32 gradients")
    return row


def product(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def is_allowed(values: Mapping[str, Any]) -> bool:
    """Whether these values of :data:`MAY_CONTRADICT` may be chosen together."""
    try:
        make_row(values)
    except ValueError:
        return False
    return True


def pairs(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[tuple[str, Any, str, Any]]:
    """Each of the first switches with each of the others."""
    return [(a, values[a], b, others[b]) for a in values for b in others]


def pairwise(**fixed: Any) -> list[Row]:
    """Few rows in which any two values of two switches meet, if they may: greedily one that has many pairs not met yet.
    Of the switches in ``fixed`` there is this value only."""
    may_contradict, go_with_all = (
        {name: [fixed[name]] if name in fixed else values for name, values in switches.items()}
        for switches in (MAY_CONTRADICT, GO_WITH_ALL)
    )
    number_of: dict[tuple[str, Any, str, Any], int] = {}

    def bits_of(met: list[tuple[str, Any, str, Any]]) -> int:
        bits = 0
        for pair in met:
            bits |= 1 << number_of.setdefault(pair, len(number_of))
        return bits

    allowed, anywhere = _allowed_rows(may_contradict), product(go_with_all)
    own, others = [bits_of(_within(values)) for values in allowed], [bits_of(_within(values)) for values in anywhere]
    items = [(name, value) for name, values in may_contradict.items() for value in values]
    between = {item: [bits_of(pairs(dict([item]), values)) for values in anywhere] for item in items}
    # The most that a row of the first switches can bring, with whatever others.
    at_most = {item: functools.reduce(operator.or_, bits) for item, bits in between.items()}
    reach = [
        functools.reduce(operator.or_, map(at_most.__getitem__, values.items()), bits)
        for bits, values in zip(own, allowed, strict=True)
    ]
    missing, chosen = functools.reduce(operator.or_, [*reach, *others]), list[Row]()
    while missing:
        # Hundreds of thousands of rows are made of these, so that only some of the best are looked at whole.
        adds = [(bits & missing).bit_count() for bits in reach]
        firsts = sorted(range(len(allowed)), key=adds.__getitem__)[-_MOST_FIRSTS:]
        rows = [
            (
                functools.reduce(operator.or_, (between[item][place] for item in allowed[number].items()), bits),
                number,
                place,
            )
            for number in firsts
            for place, bits in enumerate(own[number] | rest for rest in others)
        ]
        met, number, place = max(rows, key=lambda row: (row[0] & missing).bit_count())
        chosen.append(make_row({**allowed[number], **anywhere[place]}))
        missing &= ~met
    return chosen


_MOST_FIRSTS = 50
"""Rows of the first switches that are looked at with all others: more give no fewer rows."""


def _allowed_rows(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination that the configuration takes."""
    rows: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        # Cut off where two contradict each other: the others double the number of rows each.
        rows = [
            {**row, name: value}
            for row in rows
            for value in values
            if not any(_contradict(*pair) or _contradict(*pair[2:], *pair[:2]) for pair in pairs({name: value}, row))
        ]
    return list(filter(is_allowed, rows))


@functools.cache
def _contradict(option: str, chosen: Any, other: str, value: Any) -> bool:
    known = [row for row in CONTRADICTIONS if option in row.options and row.other == other]
    return any(chosen != _DEFAULTS[option] and value == row.value for row in known)


def _within(values: Mapping[str, Any]) -> list[tuple[str, Any, str, Any]]:
    return [(a, values[a], b, values[b]) for a, b in itertools.combinations(values, 2)]
