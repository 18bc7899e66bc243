"""docs/optimizers.md says what its script finds, and the script notices what is neither equal nor refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import optimizers
from benchmarks.optimizers import LIBRARIES, Library, Outcome, compare, main, try_optimizer

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
TORCH = LIBRARIES[0]


def results_on_the_page() -> dict[tuple[str, str], str]:
    """By package and optimizer."""
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \S+ \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {(package, name): result for name, package, result in rows}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", TORCH.names)
def test_what_the_page_says_of_torchs_optimizers_is_what_the_script_finds(name: str) -> None:
    found = " ".join(try_optimizer(TORCH, name).split()).replace("|", "\\|")
    assert results_on_the_page()["torch", name] == found


def test_the_page_has_every_optimizer_of_the_script_each_equal_or_refused() -> None:
    results = results_on_the_page()
    assert set(results) == {(library.package, name) for library in LIBRARIES for name in library.names}
    assert len(results) >= 60
    for key, result in results.items():
        assert result in ("equal to the bit", "within 1e-6") or result.startswith("refused at wrap: "), key


def test_the_page_says_how_it_was_made() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(r"Written on 20\d\d-\d\d-\d\d, on a CPU, with torch \d", text)
    assert "\npython -m benchmarks.optimizers --write docs/optimizers.md\n" in text
    for library in LIBRARIES[1:]:
        assert library.package in re.search(r"\npip install (.+)\n", text)[1].split()  # type: ignore[index]


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


class OfItsRank(torch.optim.SGD):
    """Passes every trial, and steps otherwise when its tensors are a model's shards."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shards = [param for group in self.param_groups for param in group["params"] if param.dim() == 1]
        super().step()
        for shard in shards:
            if shard.numel() not in (500, 760, 7001, 9639):
                shard.data.mul_(1.001)


def test_what_is_silently_different_ends_the_script_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lying = Library("torch", __name__, ("OfItsRank",))
    monkeypatch.setattr(optimizers, "LIBRARIES", (lying, Library("no-such-package", "none", ("Any",))))
    done = CliRunner().invoke(main)
    assert done.exit_code == 1
    assert "| DIFFERENT: weights by " in done.output
    assert "left out: pip install no-such-package" in done.output


def test_the_page_is_not_written_without_some_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(optimizers, "LIBRARIES", (Library("no-such-package", "none", ("Any",)),))
    done = CliRunner().invoke(main, ["--write", str(tmp_path / "page.md")])
    assert done.exit_code == 1
    assert not list(tmp_path.iterdir())
