"""The matrix: every feature under ``"ddp"`` and under ours, with reduce-scatter and with all-reduce, on two ranks and
on one."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparison import assert_equal

from ..matrix import DOCUMENT, MODES, Beyond, collect, table
from ..rank_processes import Failure, Ranks

FEATURES, BEYOND = collect()


@pytest.fixture(scope="module")
def under_ddp(ranks: Ranks) -> Callable[[int], list[Any]]:
    """The results of a feature under ``"ddp"``, run once for both modes."""
    return functools.lru_cache(maxsize=1)(functools.partial(run_under_ddp, ranks))


@pytest.fixture(scope="module")
def alone_under_ddp(one_rank: Ranks) -> Callable[[int], list[Any]]:
    """The same on one rank."""
    return functools.lru_cache(maxsize=1)(functools.partial(run_under_ddp, one_rank))


def run_under_ddp(ranks: Ranks, number: int) -> list[Any]:
    feature = FEATURES[number]
    return ranks.run(feature.job, "ddp", {}, **feature.options)


@pytest.mark.sample(10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(len(FEATURES)), ids=[str(feature) for feature in FEATURES])
def test_feature_equals_ddp(ranks: Ranks, under_ddp: Callable[[int], list[Any]], number: int, mode: str) -> None:
    feature = FEATURES[number]
    if mode == "reduce-scatter" and feature.refused:
        for outcome in ranks.outcomes(feature.job, "megatron_ddp", MODES[mode], **feature.options):
            assert isinstance(outcome, Failure)
            assert feature.refused in outcome.message
        return
    theirs = under_ddp(number)
    ours = ranks.run(feature.job, "megatron_ddp", MODES[mode], **feature.options)
    if mode == "reduce-scatter" and feature.differs:
        with pytest.raises(AssertionError):
            assert_equal(ours, theirs, rtol=1e-3)
        theirs = ranks.run(feature.job, "ddp", {}, **{**feature.options, **feature.like})
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, feature.rtol if mode == "reduce-scatter" else 0.0)


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(len(FEATURES)), ids=[str(feature) for feature in FEATURES])
def test_feature_equals_ddp_on_one_rank(
    one_rank: Ranks, alone_under_ddp: Callable[[int], list[Any]], number: int, mode: str
) -> None:
    """To the bit, what is refused on several ranks too: nothing is sharded, and nothing summed in another order."""
    feature = FEATURES[number]
    theirs = alone_under_ddp(number)
    assert_equal(one_rank.run(feature.job, "megatron_ddp", MODES[mode], **feature.options), theirs)


@pytest.mark.parametrize("item", BEYOND, ids=[item.name for item in BEYOND])
def test_what_ddp_cannot_do_has_its_test(item: Beyond) -> None:
    file, name = item.test.split("::")
    tree = ast.parse((Path(__file__).parents[1] / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_document_says_what_the_tests_say() -> None:
    assert DOCUMENT.read_text() == table(), "write it again: python -m tests.doors.matrix"
