"""The division of layers into stages, and of stages onto ranks. No tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
"""The schedules by torch's names, with the smallest number of stages per rank."""
SPLIT_BACKWARDS = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""torch's schedules that compute the gradients of weights outside of backward."""


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The division of a chain of layers into stages.

    Attributes:
        split_spec: the number of layers of each stage, in the order of the layers.
        num_ranks: the ranks that have them. Stage ``s`` is on rank ``s % num_ranks``, as Megatron-LM interleaves them.
    """

    split_spec: tuple[int, ...]
    num_ranks: int

    @property
    def num_stages(self) -> int:
        return len(self.split_spec)

    def layers(self, stage: int) -> range:
        """Returns the numbers of a stage's layers."""
        start = sum(self.split_spec[:stage])
        return range(start, start + self.split_spec[stage])

    def stages_of(self, rank: int) -> range:
        return range(rank, self.num_stages, self.num_ranks)

    def rank_of(self, layer: int) -> int:
        """Returns the rank that has a layer."""
        ends = list(itertools.accumulate(self.split_spec))
        return next(stage for stage, end in enumerate(ends) if layer < end) % self.num_ranks


def check_schedule(schedule: str) -> None:
    """Raises ValueError for a name that is not in :data:`SCHEDULES`."""
    if schedule not in SCHEDULES:
        why = (
            "it computes the gradients of weights apart from backward, where no hook of a parameter fires"
            if schedule.removeprefix("Schedule") in SPLIT_BACKWARDS
            else "there is no such schedule"
        )
        raise ValueError(f"schedule={schedule!r}: {why}. Choose one of {', '.join(map(repr, SCHEDULES))}")


def make_plan(
    names: Sequence[str],
    split_spec: Sequence[int],
    num_ranks: int,
    schedule: str,
    keep_together: Sequence[tuple[int, int]] = (),
) -> StagePlan:
    """Returns a plan for a division that fits the layers and the ranks.

    Args:
        names: descriptions of the layers for error messages.
        split_spec: the number of layers of each stage.
        num_ranks: the number of ranks for stages.
        schedule: one of :data:`SCHEDULES`.
        keep_together: first and last layer of parts that are not to be cut.

    Raises:
        ValueError: if it does not fit, with the layers' names.
    """
    check_schedule(schedule)
    num_layers = len(names)
    spec = list(split_spec)
    if any(count < 1 for count in spec):
        raise ValueError(f"split_spec={spec}: every stage has at least one layer")
    if sum(spec) != num_layers:
        raise ValueError(
            f"split_spec={spec} divides {sum(spec)} layers, and there are {num_layers}, from {names[0]} to {names[-1]}"
        )
    fewest = SCHEDULES[schedule] * num_ranks
    if len(spec) % num_ranks or (len(spec) != num_ranks if fewest == num_ranks else len(spec) < fewest):
        wanted = f"{num_ranks}" if fewest == num_ranks else f"{fewest}, or another multiple of {num_ranks} above it"
        raise ValueError(
            f"split_spec={spec} has {len(spec)} stages, and schedule={schedule!r} on {num_ranks} ranks needs {wanted}"
        )
    for first, last in keep_together:
        if not 0 <= first <= last < num_layers:
            raise ValueError(f"keep_together has ({first}, {last}): expected numbers of layers, 0 to {num_layers - 1}")
        for end in itertools.accumulate(spec):
            if first < end <= last:
                raise ValueError(
                    f"split_spec={spec} cuts between layer {end - 1} ({names[end - 1]}) and layer {end} "
                    f"({names[end]}), which keep_together=({first}, {last}) holds together"
                )
    return StagePlan(tuple(spec), num_ranks)
