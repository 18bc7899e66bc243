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

from ..matrix import DOCUMENT, MODES, Beyond, Feature, collect, table
from ..rank_processes import Ranks, assert_failed

FEATURES, BEYOND = collect()
UnderDDP = Callable[[int], list[Any]]


def cases(is_often: Callable[[Feature, str], bool]) -> pytest.MarkDecorator:
    """Each feature in both modes, one after the other; those that are not often run are for ``make nightly``."""
    params = [
        pytest.param(number, mode, id=f"{feature}-{mode}", marks=() if is_often(feature, mode) else pytest.mark.nightly)
        for number, feature in enumerate(FEATURES)
        for mode in MODES
    ]
    return pytest.mark.parametrize(("number", "mode"), params)


def is_often(feature: Feature, mode: str) -> bool:
    return feature.often and (mode == "reduce-scatter" or feature.area in ("Training", "Precision"))


def is_often_on_one_rank(feature: Feature, mode: str) -> bool:
    return feature.often and mode == "reduce-scatter" and feature.area == "Training"


@pytest.fixture(scope="module")
def under_ddp(ranks: Ranks) -> UnderDDP:
    """The results of a feature under ``"ddp"``, run once for both modes."""
    return functools.lru_cache(maxsize=1)(functools.partial(run_under_ddp, ranks))


@pytest.fixture(scope="module")
def alone_under_ddp(one_rank: Ranks) -> UnderDDP:
    """The same on one rank."""
    return functools.lru_cache(maxsize=1)(functools.partial(run_under_ddp, one_rank))


def run_under_ddp(ranks: Ranks, number: int) -> list[Any]:
    feature = FEATURES[number]
    return ranks.run(feature.job, "ddp", {}, **feature.options)


@cases(is_often)
def test_feature_equals_ddp(ranks: Ranks, under_ddp: UnderDDP, number: int, mode: str) -> None:
    feature = FEATURES[number]
    if mode == "reduce-scatter" and feature.refused:
        for outcome in ranks.outcomes(feature.job, "megatron_ddp", MODES[mode], **feature.options):
            assert_failed(outcome, feature.refused)
        return
    theirs = under_ddp(number)
    ours = ranks.run(feature.job, "megatron_ddp", MODES[mode], **feature.options)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, feature.rtol if mode == "reduce-scatter" else 0.0)


@cases(is_often_on_one_rank)
def test_feature_equals_ddp_on_one_rank(one_rank: Ranks, alone_under_ddp: UnderDDP, number: int, mode: str) -> None:
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
