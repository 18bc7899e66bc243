"""Finds the best cut of a model for cards that differ: every order of the cards, every partition of the layers.

Two objectives. ``time`` is the simulated step. ``waste`` is a weighted memory waste ratio, from a study of unequal
cards: ``T = sum_i compute_i / capacity_i * (1 - peak_i / capacity_i)`` over the stages, in TFLOPS and GB, to be least.

[Note: exact pruning]
Partitions are grown stage by stage, all of an order at once, as columns of tensors. Three things drop one for good.
Its stage does not fit: memory only grows with layers. Its terms of T, and the least that those to come can be with all
that is left in their memory, are no less than the best T. Its bound on time is no less than the best time. For stage k
with microbatch time ``c_k = f_k + b_k``, ``P_k`` and ``D_k`` the sums of c before and behind it, and ``n_k``
microbatches ahead of its first backward, a step takes at least ``P_k + m c_k + max(0, D_k - (n_k - 1) f_k)``: the first
microbatch comes after the forwards before k, the last leaves by the backwards before k, and the first backward comes no
sooner than everything behind has done it. Layers that have no stage yet count with the fastest card that is left. What
remains is simulated in the order of its bounds, until a bound is no less than the best.

A bound drops little before something good is known. So each order is first grown with few partitions, the most
promising of each stage: whatever that finds is a limit for the whole search, and no more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .cards import Card
from .schedule import Schedule, StageTimes, num_in_flight, step_ms
from .stage_memory import Layer, StageBytes, stages_from

Objective = Literal["time", "waste"]

MOST_ORDERS = 100_000
"""More are not all looked at: of ten cards that all differ there are 36 times as many."""
MOST_PARTIAL = 2_000_000
"""Partitions that are grown at once, which take 1 GB. Where more of them cannot be dropped, not all are looked at."""
BEAM = 256
"""Partitions of a stage that are kept to find a limit, and orders in which that is done."""


class TooManyError(ValueError):
    """Says why the best of so many cuts is not known for sure.

    Attributes:
        best: the best of the tried cuts; None if none of them fits.
    """

    best: Candidate | None = None


@dataclasses.dataclass(frozen=True)
class Question:
    """A model and the cards for it.

    Attributes:
        layers: in order.
        cards: one a stage, in any order.
        num_microbatches: of a step.
        schedule: "1f1b" or "gpipe".
        keep_together: pairs of first and last layer of a group that is not cut.
        slack: the part of a card's memory that stays free.
    """

    layers: Sequence[Layer]
    cards: Sequence[Card]
    num_microbatches: int
    schedule: Schedule = "1f1b"
    keep_together: Sequence[tuple[int, int]] = ()
    slack: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"schedule={self.schedule!r}: expected '1f1b' or 'gpipe'")
        if self.num_microbatches < 1:
            raise ValueError(f"{self.num_microbatches} microbatches: expected at least one")
        if not 0 <= self.slack < 1:
            raise ValueError(f"slack={self.slack}: expected a part of a card's memory, from 0 to below 1")
        for first, last in self.keep_together:
            if not 0 <= first <= last < len(self.layers):
                raise ValueError(
                    f"keep_together has ({first}, {last}): expected layers from 0 to {len(self.layers) - 1}"
                )
        num_with_params = sum(layer.has_params for layer in self.layers)
        if 1 < len(self.cards) <= len(self.layers) and num_with_params < len(self.cards):
            raise ValueError(
                f"{num_with_params} of {len(self.layers)} layers have parameters, for {len(self.cards)} cards: "
                "expected one in each stage, since torch has no optimizer for a stage without"
            )
        if not self.cards or len(self.cuts) < len(self.cards) - 1:
            raise ValueError(
                f"{len(self.layers)} layers, which may be cut in {len(self.cuts)} places, for {len(self.cards)} cards: "
                "expected at least one layer, or group that is kept together, for each card"
            )

    @property
    def cuts(self) -> list[int]:
        """The layers that a stage other than the first may begin with."""
        inside = {cut for first, last in self.keep_together for cut in range(first + 1, last + 1)}
        return [cut for cut in range(1, len(self.layers)) if cut not in inside]

    def stages_from(self, start: int) -> Iterator[StageBytes]:
        """Yields what the stages hold that begin with a layer, of one layer, of two and so on."""
        return stages_from(self.layers, start, keeps_sent=self.schedule == "gpipe")

    @property
    def num_candidates(self) -> int:
        """The number of orders and partitions, whether they fit or not."""
        return self.num_orders * math.comb(len(self.cuts), len(self.cards) - 1)

    @property
    def num_orders(self) -> int:
        """The number of orders of the cards: cards of a kind are alike."""
        alike = Counter(self.cards).values()
        return math.factorial(len(self.cards)) // math.prod(map(math.factorial, alike))

    def orders(self) -> Iterator[tuple[Card, ...]]:
        """Yields every order of the cards, once."""

        def rest(left: Counter[Card]) -> Iterator[tuple[Card, ...]]:
            kinds = [card for card, number in left.items() if number]
            if not kinds:
                yield ()
            for card in kinds:
                yield from ((card, *others) for others in rest(left - Counter([card])))

        return rest(Counter(self.cards))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to cut the model.

    Attributes:
        order: the card of each stage.
        split: how many layers each stage has.
        peak_bytes: by stage.
        step_ms: simulated.
        waste: the study's T.
    """

    order: tuple[Card, ...]
    split: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    step_ms: float
    waste: float


def evaluate(question: Question, order: Sequence[Card], split: Sequence[int]) -> Candidate:
    """One candidate, by the definitions; whether it fits is left to the caller."""
    starts = [0, *itertools.accumulate(split)]
    stages = stage_times(question, order, split)
    peaks = [_peak_bytes(question, n, len(order), *pair) for n, pair in enumerate(itertools.pairwise(starts))]
    time = step_ms(stages, question.num_microbatches, question.schedule)
    return Candidate(tuple(order), tuple(split), tuple(peaks), time, waste(order, peaks))


def stage_times(question: Question, order: Sequence[Card], split: Sequence[int]) -> list[StageTimes]:
    """The milliseconds of each stage, from its operations and its card's speed."""
    stages = []
    for card, start, end in zip(order, [0, *itertools.accumulate(split)], itertools.accumulate(split), strict=False):
        layers = question.layers[start:end]
        forward = sum(x.forward_flops for x in layers)
        backward = sum(x.backward_flops for x in layers)
        stages.append(StageTimes(forward / card.flops * 1e3, backward / card.flops * 1e3))
    return stages


def waste(order: Sequence[Card], peak_bytes: Sequence[float]) -> float:
    """The study's T of a pipeline whose cards hold so many bytes at their peaks."""
    return sum(_weight(card) * (1 - peak / card.memory_bytes) for card, peak in zip(order, peak_bytes, strict=True))


def _weight(card: Card) -> float:
    return (card.flops / 1e12) / (card.memory_bytes / 1e9)


def _peak_bytes(question: Question, stage: int, num_stages: int, start: int, end: int) -> int:
    m = question.num_microbatches
    ahead = num_in_flight(question.schedule, stage, num_stages, question.num_microbatches)
    held = next(itertools.islice(question.stages_from(start), end - start - 1, None))
    fixed = sum(layer.fixed_bytes for layer in question.layers[start:end])
    return fixed + held.peak(ahead, m, alternates=ahead < m)


def search(question: Question, objective: Objective = "time") -> Candidate | None:
    """The best candidate that fits; None if none does. See [Note: exact pruning]. Raises TooManyError if there are too
    many to be sure."""
    tables = _Tables.of(question)
    # First what is found soon, as a limit; then everything that may be better.
    soon = ((order, BEAM) for order in itertools.islice(question.orders(), BEAM))
    best = _best_of(soon, question, tables, objective, None)
    try:
        if question.num_orders > MOST_ORDERS:
            raise TooManyError(f"{len(question.cards)} cards have {question.num_orders:,} orders")
        return _best_of(((order, None) for order in question.orders()), question, tables, objective, best)
    except TooManyError as error:
        error.best = best
        raise


def _best_of(
    orders: Iterable[tuple[tuple[Card, ...], int | None]],
    question: Question,
    tables: _Tables,
    objective: Objective,
    best: Candidate | None,
) -> Candidate | None:
    """The best of ``best`` and these orders, with the most partitions that are grown of each."""
    for order, most in orders:
        for split in _Grown(question, tables, order, objective, most).splits(best):
            candidate = evaluate(question, order, split)
            if best is None or _value(candidate, objective) < _value(best, objective):
                best = candidate
            if objective == "waste":
                break  # in the order of T itself: the first is the least
    return best


def _value(candidate: Candidate, objective: Objective) -> float:
    return candidate.step_ms if objective == "time" else candidate.waste


class _StageTables(NamedTuple):
    """As :class:`~.stage_memory.StageBytes`, of every range of layers."""

    received: Tensor
    waiting: Tensor
    working: Tensor
    on_their_way: Tensor


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Sums over the layers before each (float64, one longer than the layers); what every range of layers holds as a
    stage, from the row's layer to before the column's; and the most that a stage behind a layer holds beyond what it
    would with one microbatch more that waits."""

    forward: Tensor
    backward: Tensor
    fixed: Tensor
    saved: Tensor
    held: _StageTables
    most_beyond: Tensor
    most_received: float
    most_sent: float
    cuts: Tensor

    @classmethod
    def of(cls, question: Question) -> _Tables:
        layers = question.layers

        def sums(values: Sequence[float]) -> Tensor:
            return torch.tensor([0.0, *itertools.accumulate(values)], dtype=torch.float64)

        size = len(layers) + 1
        held = _StageTables(*torch.zeros(4, size, size, dtype=torch.float64))
        for start in range(len(layers)):
            columns = torch.tensor(list(question.stages_from(start)), dtype=torch.float64).T
            for table, column in zip(held, columns, strict=True):
                table[start, start + 1 :] = column
        beyond = (held.working + held.on_their_way - held.waiting).amax(1).clamp_min(0)
        trainable = sums([layer.has_params for layer in layers])
        held.working[trainable[:, None] == trainable] = float("inf")  # a pipeline refuses such a stage
        return cls(
            sums([layer.forward_flops for layer in layers]),
            sums([layer.backward_flops for layer in layers]),
            sums([layer.fixed_bytes for layer in layers]),
            sums([layer.saved_bytes for layer in layers]),
            held,
            beyond.flip(0).cummax(0).values.flip(0),
            float(held.received.amax()),
            float(max(layer.output_bytes + layer.input_bytes for layer in layers)),
            torch.tensor(question.cuts, dtype=torch.int64),
        )


# Bounds and simulation add the same numbers in another order: what is equal except for that must not be dropped.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class _Partial:
    """Partitions of the first layers into the first stages, a row each.

    Attributes:
        starts: where each stage begins, and the next.
        forward, work: milliseconds of each stage.
        waste: T of these stages.
        bound: the least that all of it can take.
    """

    starts: Tensor
    forward: Tensor
    work: Tensor
    waste: Tensor
    bound: Tensor

    def rows(self, which: Tensor) -> _Partial:
        return _Partial(self.starts[which], self.forward[which], self.work[which], self.waste[which], self.bound[which])

    def pieces(self, size: int) -> Iterator[_Partial]:
        return (self.rows(rows) for rows in torch.arange(len(self.bound)).split(size))

    @staticmethod
    def joined(pieces: Sequence[_Partial]) -> _Partial:
        names = [field.name for field in dataclasses.fields(_Partial)]
        return _Partial(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in names))


class _Grown:
    """Grows the partitions of one order of cards; with ``most`` no more than so many of a stage."""

    def __init__(
        self, question: Question, tables: _Tables, order: Sequence[Card], objective: Objective, most: int | None
    ) -> None:
        self._question = question
        self._tables = tables
        self._order = order
        self._objective = objective
        self._most = most

    def splits(self, best: Candidate | None) -> Iterator[tuple[int, ...]]:
        """Yields what may be better than ``best``, the most promising first; for time, what is known to be no better
        than what was yielded before is left out."""
        limit = float("inf") if best is None else _value(best, self._objective)
        empty = torch.zeros(1, 0, dtype=torch.float64)
        grown = _Partial(torch.zeros(1, 1, dtype=torch.int64), empty, empty, *torch.zeros(2, 1, dtype=torch.float64))
        for stage in range(len(self._order)):
            # In pieces: hardly anything of a piece may stay.
            pieces = []
            num_kept = 0
            for piece in grown.pieces(max(1, MOST_PARTIAL // len(self._question.layers))):
                pieces.append(self._next(piece, stage, limit))
                num_kept += len(pieces[-1].bound)
                if self._most is None and num_kept > MOST_PARTIAL:
                    raise TooManyError(
                        f"more than {MOST_PARTIAL:,} partitions of the first {stage + 1} of {len(self._order)} stages "
                        f"may be the best by {self._objective}"
                    )
            grown = _Partial.joined(pieces)
            if self._most is not None:
                grown = grown.rows(torch.argsort(grown.bound, stable=True)[: self._most])
        yield from self._in_order(grown.starts, grown.bound, limit)

    def _next(self, grown: _Partial, stage: int, limit: float) -> _Partial:
        """Grows by one stage, and keeps what may be better than ``limit``."""
        rows, ends = self._next_ends(grown.starts[:, -1], stage)
        begin = grown.starts[rows, -1]
        peak = self._peaks(stage, begin, ends)
        card = self._order[stage]
        tables = self._tables
        waste = grown.waste[rows] + _weight(card) * (1 - peak / card.memory_bytes)
        own_forward = (tables.forward[ends] - tables.forward[begin]) / card.flops * 1e3
        own_work = own_forward + (tables.backward[ends] - tables.backward[begin]) / card.flops * 1e3
        starts = torch.cat([grown.starts[rows], ends[:, None]], 1)
        forward = torch.cat([grown.forward[rows], own_forward[:, None]], 1)
        work = torch.cat([grown.work[rows], own_work[:, None]], 1)
        bound = (
            self._waste_bound(waste, ends, stage) if self._objective == "waste" else self._bound(forward, work, ends)
        )
        stay = (peak <= card.memory_bytes * (1 - self._question.slack)) & (bound <= limit * (1 + _ROUNDING))
        return _Partial(starts, forward, work, waste, bound).rows(stay)

    def _in_order(self, starts: Tensor, bound: Tensor, limit: float) -> Iterator[tuple[int, ...]]:
        for row in torch.argsort(bound, stable=True).tolist():
            if bound[row].item() >= limit * (1 + _ROUNDING):
                return
            split = tuple(torch.diff(starts[row]).tolist())
            yield split
            if self._objective == "time":
                limit = min(limit, evaluate(self._question, self._order, split).step_ms)

    def _next_ends(self, begin: Tensor, stage: int) -> tuple[Tensor, Tensor]:
        """The rows that go on, each once for every end of its next stage, and the ends."""
        num_layers = len(self._question.layers)
        num_stages_left = len(self._order) - stage - 1
        if not num_stages_left:
            return torch.arange(len(begin)), torch.full_like(begin, num_layers)
        # As many cuts behind it as stages still need.
        cuts = self._tables.cuts[: len(self._tables.cuts) - num_stages_left + 1]
        rows, columns = torch.nonzero(cuts[None, :] > begin[:, None], as_tuple=True)
        return rows, cuts[columns]

    def _peaks(self, stage: int, begin: Tensor, ends: Tensor) -> Tensor:
        tables = self._tables
        m = self._question.num_microbatches
        ahead = num_in_flight(self._question.schedule, stage, len(self._order), m)
        received, waiting, working, on_their_way = (table[begin, ends] for table in tables.held)
        in_flight = (ahead - 1) * waiting + (ahead < m) * on_their_way
        return tables.fixed[ends] - tables.fixed[begin] + m * received + in_flight + working

    def _waste_bound(self, waste: Tensor, ends: Tensor, stage: int) -> Tensor:
        """The least T of these stages and those to come: no card is fuller than it may be, and all that is left takes
        no more than with the most microbatches ahead, and the largest of what else stages hold."""
        question = self._question
        tables = self._tables
        rest = self._order[stage + 1 :]
        if not rest:
            return waste
        m = question.num_microbatches
        ahead = num_in_flight(question.schedule, stage + 1, len(self._order), m)
        fixed = tables.fixed[-1] - tables.fixed[ends]
        saved = tables.saved[-1] - tables.saved[ends]
        of_each = tables.most_beyond[ends] + m * tables.most_received + ahead * tables.most_sent
        nbytes = fixed + ahead * saved + len(rest) * of_each
        emptied = sum(map(_weight, rest)) - max(_weight(card) / card.memory_bytes for card in rest) * nbytes
        return waste + emptied.clamp_min(sum(map(_weight, rest)) * question.slack)

    def _bound(self, forward: Tensor, work: Tensor, ends: Tensor) -> Tensor:
        question = self._question
        tables = self._tables
        num_stages = len(self._order)
        m = question.num_microbatches
        num_grown = work.shape[1]
        rest = torch.zeros_like(ends, dtype=torch.float64)
        if num_grown < num_stages:
            fastest = max(card.flops for card in self._order[num_grown:])
            flops = tables.forward[-1] - tables.forward[ends] + tables.backward[-1] - tables.backward[ends]
            rest = flops / fastest * 1e3
        before = torch.cumsum(work, 1) - work
        behind = work.sum(1, keepdim=True) - before - work + rest[:, None]
        ahead = torch.tensor(
            [num_in_flight(question.schedule, stage, num_stages, m) for stage in range(num_grown)], dtype=torch.float64
        )
        bounds = (before + m * work + (behind - (ahead - 1) * forward).clamp_min(0)).amax(1)
        if num_grown < num_stages:
            # One of the stages to come has no less than its share.
            return torch.maximum(bounds, work.sum(1) + m * rest / (num_stages - num_grown))
        return bounds
