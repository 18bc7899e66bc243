"""Divisions into stages: which layers each has, and which are refused."""

from __future__ import annotations

import pytest

from megastrategy.pipeline.plan import StagePlan, make_plan

NAMES = ["Embedding", "Block", "Block", "Projector", "Projector", "Block", "Head"]


def test_stages_have_their_layers_and_ranks_their_stages() -> None:
    plan = make_plan(NAMES, [1, 2, 2, 2], 2, "Interleaved1F1B", [(3, 4)])
    assert [list(plan.layers(stage)) for stage in range(4)] == [[0], [1, 2], [3, 4], [5, 6]]
    assert [list(plan.stages_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [plan.rank_of(layer) for layer in range(7)] == [0, 1, 1, 0, 0, 1, 1]
    assert plan == StagePlan((1, 2, 2, 2), 2)


@pytest.mark.parametrize(
    ("spec", "ranks", "schedule", "together", "said"),
    [
        ([3, 3], 2, "1F1B", [], "divides 6 layers, and there are 7, from Embedding to Head"),
        ([7, 0], 2, "1F1B", [], "every stage has at least one layer"),
        ([3, 4], 3, "1F1B", [], "has 2 stages, and schedule='1F1B' on 3 ranks needs 3"),
        ([2, 2, 2, 1], 2, "GPipe", [], "has 4 stages, and schedule='GPipe' on 2 ranks needs 2"),
        ([3, 4], 2, "Interleaved1F1B", [], "needs 4, or another multiple of 2 above it"),
        ([2, 2, 1, 1, 1], 2, "Interleaved1F1B", [], "has 5 stages"),
        ([4, 3], 2, "1F1B", [(3, 4)], "cuts between layer 3 (Projector) and layer 4 (Projector)"),
        ([4, 3], 2, "1F1B", [(5, 7)], "expected numbers of layers, 0 to 6"),
        ([4, 3], 2, "ZBVZeroBubble", [], "computes the gradients of weights apart from backward"),
        ([4, 3], 2, "ScheduleInterleavedZeroBubble", [], "computes the gradients of weights apart from backward"),
        ([4, 3], 2, "1f1b", [], "there is no such schedule. Choose one of 'GPipe', '1F1B', 'Interleaved1F1B'"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    spec: list[int], ranks: int, schedule: str, together: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make_plan(NAMES, spec, ranks, schedule, together)
    assert said in str(caught.value)
