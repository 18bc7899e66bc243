"""Plans sections into a number of seconds: ``--budget``.

[Note: what a budget buys]
Whether anything is wrong comes first: sections about correctness run side by side, since none of them takes times, and
one GPU has space for all. Sections that take times or measure memory follow one at a time, the most important first.
Figures come last, with a part of the time kept for them. No section is cut off in the middle of a case: it begins none
for which the time left is not enough, and says which those are.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping

FIRST = ("A",)
SIDE_BY_SIDE = (("C",), ("B", "E", "N", "L"), ("F", "H", "K"), ("O",))
"""Lanes that take about as long as each other."""
IN_TURNS = ("I", "M", "J", "G", "P", "Q", "R", "D", "T")
LAST = ("S",)

_OF_CORRECTNESS, _OF_FIGURES = 0.5, 0.2
"""Shares of the budget: the most that correctness may take, and what is kept for figures."""
_TO_END_S = 12.0
"""For the last case of the last section, and for processes to end."""
_OVERDUE = 0.1
"""The share of the budget by which a case may be longer than the longest before it, until it is taken for hung."""
_WORTHWHILE_S = 5.0
THREADS = 2
"""Threads of each process of lanes that run side by side."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One section's.

    Attributes:
        ends_at: from then on no case is begun, by ``time.monotonic``; infinite without a budget.
        box_s: after so many seconds from now its process is ended.
        threads: of each of its processes; 0 for torch's own choice.
    """

    letter: str
    ends_at: float = math.inf
    box_s: float = math.inf
    threads: int = 0


class Plan:
    """Divides a budget among the chosen sections.

    Attributes:
        left_out: the letters of sections for which there was no time.
    """

    def __init__(
        self, letters: Collection[str], expected_s: Mapping[str, float], budget_s: float, num_gpus: int
    ) -> None:
        self._letters, self._expected_s, self._budget_s = letters, expected_s, budget_s
        self._finish = time.monotonic() + budget_s - _TO_END_S
        # Several groups of NCCL's kernels on the same GPUs may wait for each other in turns.
        lanes = SIDE_BY_SIDE if num_gpus == 1 else (tuple(letter for lane in SIDE_BY_SIDE for letter in lane),)
        self._beside = [[letter for letter in lane if letter in letters] for lane in lanes]
        self.left_out: list[str] = []

    def stages(self) -> Iterator[list[Iterator[Turn]]]:
        """Yields lanes that run side by side; each is asked for a turn when the one before has ended."""
        yield [self._turns(FIRST, self._finish, is_limited=True)]
        end = min(self._finish, time.monotonic() + _OF_CORRECTNESS * self._budget_s)
        threads = THREADS if len(self._beside) > 1 else 0
        yield [self._turns(lane, end, threads) for lane in self._beside]
        kept_s = _OF_FIGURES * self._budget_s if LAST[0] in self._letters else 0.0
        yield [self._turns(IN_TURNS, self._finish - kept_s, is_limited=True)]
        yield [self._turns(LAST, self._finish)]

    def _turns(
        self, letters: Collection[str], end: float, threads: int = 0, *, is_limited: bool = False
    ) -> Iterator[Turn]:
        for letter in letters:
            if letter not in self._letters:
                continue
            now = time.monotonic()
            if end - now < _WORTHWHILE_S:
                self.left_out.append(letter)
                continue
            # One that takes longer than expected shall not take all that the next ones need.
            ends_at = min(end, now + 1.5 * self._expected_s[letter]) if is_limited else end
            overdue = min(ends_at + _OVERDUE * self._budget_s, self._finish + _TO_END_S / 2)
            yield Turn(letter=letter, ends_at=ends_at, box_s=overdue - now, threads=threads)
