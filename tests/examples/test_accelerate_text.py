"""The example on ranks that have accelerate's environment, and once by ``accelerate launch`` itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megastrategy.accelerate.checkpoint import DIRECTORY

from .launched import launch_example, run_example

SCRIPT = "accelerate_text.py"


def epochs(printed: str) -> list[tuple[str, str]]:
    """(loss, accuracy) of each, as printed."""
    return re.findall(r"epoch \d+: loss ([\d.]+), ([\d.]+)% of 500 lines", printed)


def test_it_learns_and_resumes(tmp_path: Path) -> None:
    printed = run_example(SCRIPT, "--epochs", "2", cwd=tmp_path)
    assert len(epochs(printed)) == 2
    assert float(epochs(printed)[-1][1]) > 85, "guessing gives 50"
    resumed = run_example(SCRIPT, "--epochs", "3", "--resume", "runs/text/megatron_ddp/last", cwd=tmp_path, processes=1)
    assert re.findall(r"epoch (\d)", resumed) == ["3"], "the one that was left"
    assert float(epochs(resumed)[-1][1]) > 85


@pytest.mark.fresh
@pytest.mark.long
def test_it_learns_as_under_torch_ddp_and_by_the_launcher(tmp_path: Path) -> None:
    """To the bit, if nothing is clipped: the norm that clips is summed shard by shard, and by parameters there."""
    options = ("--clip", "0", "--epochs", "3")
    ours = run_example(SCRIPT, *options, cwd=tmp_path)
    theirs = run_example(SCRIPT, *options, "--engine", "accelerate", cwd=tmp_path)
    assert epochs(ours) == epochs(theirs)
    assert len(epochs(ours)) == 3
    folders = [tmp_path / "runs" / "text" / engine for engine in ("megatron_ddp", "accelerate")]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert sorted(first) == ["embed.weight", "head.bias", "head.weight", "windows.bias", "windows.weight"]
    assert all((first[name] == second[name]).all() for name in second)
    # under the launcher accelerate's own Accelerator is ours
    launched = launch_example(
        SCRIPT,
        *(*options, "--engine", "accelerate", "--out", "launched"),
        cwd=tmp_path,
        MEGATRON_DDP_STATE_DICT_TYPE="sharded",
    )
    assert (tmp_path / "launched" / "accelerate" / "last" / DIRECTORY).is_dir()
    assert epochs(launched) == epochs(ours)
