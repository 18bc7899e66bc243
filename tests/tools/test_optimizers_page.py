"""docs/optimizers.md says what its script finds, and the script notices what is neither equal nor refused."""

from __future__ import annotations

import collections
import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import optimizers
from benchmarks.optimizer_libraries import LIBRARIES, Library
from benchmarks.optimizers import Found, Outcome, compare, main, try_optimizer

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
TORCH = LIBRARIES[0]


def found_on_the_page() -> dict[tuple[str, str], Found]:
    """By package and optimizer."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \S+ \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {(package, name): Found(how, result) for name, package, how, result in rows}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TORCH.names)
def test_what_the_page_says_of_torchs_optimizers_is_what_the_script_finds(name: str) -> None:
    how, result = found_on_the_page()["torch", name]
    assert try_optimizer(TORCH, name).cells == f"{how} | {result}"


def test_the_page_has_every_optimizer_of_the_script_each_equal_or_refused() -> None:
    found = found_on_the_page()
    assert set(found) == {(library.package, name) for library in LIBRARIES for name in library.names}
    assert len(found) >= 60
    for key, (how, result) in found.items():
        is_sharded = how in ("flat", "whole", "mixed") and result in ("equal to the bit", "within 1e-6")
        assert is_sharded or (how == "refused" and not result.startswith(("DIFFERENT", "FAILED"))), key


def test_the_page_counts_its_rows() -> None:
    counts = collections.Counter(found.how for found in found_on_the_page().values())
    said = re.search(r"^Of (\d+): (.+?);", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert said is not None
    assert int(said[1]) == counts.total()
    assert said[2] == ", ".join(f"{count} {how}" for how, count in counts.most_common())


def test_the_page_says_how_it_was_made() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(r"Written on 20\d\d-\d\d-\d\d, on a CPU, with torch \d", text)
    assert "\npython -m benchmarks.optimizers --write docs/optimizers.md\n" in text
    for library in LIBRARIES[1:]:
        assert library.requirement in re.search(r"\npip install (.+)\n", text)[1].split()  # type: ignore[index]


def test_writing_the_page_again_changes_nothing_but_its_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `.+? \|$", text, re.MULTILINE)
    written = optimizers.page(rows, "python -m benchmarks.optimizers --write docs/optimizers.md")

    def undated(page: str) -> str:
        return re.sub(r"Written on .+, by", "Written, by", page)

    assert undated(written) == undated(text)


def outcome(weight: float, state: Any = 0) -> Outcome:
    weights = {"weight": torch.tensor([1.0, weight], dtype=torch.float64)}
    return Outcome(weights, {"state": {0: {"step": state}}}, weights)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ([outcome(2.0), outcome(2.0)], "equal to the bit"),
        ([outcome(2.0), outcome(2.000001)], "within 1e-6"),
        ([outcome(2.0), outcome(2.00001)], "DIFFERENT: weights by 5.0e-06, saved state by 0.0e+00"),
        ([outcome(2.0, state=1), outcome(2.0)], "DIFFERENT: weights by 0.0e+00, saved state by inf"),
        ([outcome(float("nan")), outcome(2.0)], "DIFFERENT: weights by inf"),
    ],
)
def test_a_difference_on_any_rank_is_said(mine: list[Outcome], said: str) -> None:
    assert compare(mine, [outcome(2.0), outcome(2.0)]).startswith(said)


class Quantised(torch.Tensor):
    """A tensor that consists of others, and knows no operation; not even ``==``."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Kept:
    """State that an optimizer may keep."""

    def __init__(self, value: float) -> None:
        self.values = [torch.tensor([value])]


@pytest.mark.parametrize(
    "kept",
    [
        lambda value: [torch.tensor([value])],
        lambda value: {"q": [None, (torch.tensor([value]),)]},
        lambda value: collections.deque([torch.tensor([value])]),
        lambda value: Quantised(torch.tensor([int(value)], dtype=torch.uint8)),
        Kept,
    ],
)
def test_state_of_any_kind_is_compared_by_what_it_consists_of(kept: Any) -> None:
    one, same, other = ([outcome(2.0, state=kept(value))] for value in (2.0, 2.0, 3.0))
    assert compare(one, same) == "equal to the bit"
    assert compare(one, other).startswith("DIFFERENT: weights by 0.0e+00, saved state by 3.3e-01")


def test_containers_of_another_kind_are_not_equal() -> None:
    assert "by inf" in compare([outcome(2.0, state=[1])], [outcome(2.0, state=(1,))])


def test_what_rank_is_at_fault_is_said_and_not_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "TIMEOUT", datetime.timedelta(seconds=5))  # that the other rank waits
    found = try_optimizer(Library("torch", __name__, ("FailsOnAnOwner",)), "FailsOnAnOwner")
    assert found.result.startswith("FAILED after it was wrapped: RuntimeError: no step of this many elements")


class FailsOnAnOwner(torch.optim.SGD):
    """Passes every trial, and raises on the rank that steps the model's largest parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(param.numel() == 192 * 96 for group in self.param_groups for param in group["params"]):
            raise RuntimeError("no step of this many elements")
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(), alpha=0.01)


class OfItsRank(torch.optim.SGD):
    """Passes every trial, and steps otherwise when its tensors are a model's shards."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shards = [param for group in self.param_groups for param in group["params"] if param.dim() == 1]
        super().step()
        for shard in shards:
            if shard.numel() not in (500, 760, 7001, 13479, 250, 326, 1001, 2199, 2003, 1197):
                shard.data.mul_(1.001)


def test_what_is_silently_different_ends_the_script_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lying = Library("torch", __name__, ("OfItsRank",))
    monkeypatch.setattr(optimizers, "LIBRARIES", (lying, Library("no-such-package", "none", ("Any",))))
    done = CliRunner().invoke(main)
    assert done.exit_code == 1
    assert "| flat | DIFFERENT: weights by " in done.output
    assert "left out: pip install no-such-package" in done.output


def test_the_page_is_not_written_without_some_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(optimizers, "LIBRARIES", (Library("no-such-package", "none", ("Any",)),))
    done = CliRunner().invoke(main, ["--write", str(tmp_path / "page.md")])
    assert done.exit_code == 1
    assert not list(tmp_path.iterdir())
