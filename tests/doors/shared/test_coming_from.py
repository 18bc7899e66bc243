"""``docs/coming_from.md`` names every setting of the other engines' plugins, and none that is not there."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import accelerate
import pytest
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers import TrainingArguments

from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
TEXT = PAGE.read_text(encoding="utf-8")


def rows(heading: str) -> list[tuple[str, str]]:
    """The rows of the table whose first column has this heading."""
    table = TEXT.split(f"| {heading} | here |\n|---|---|\n")[1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert all(len(row) == 2 for row in cells), cells
    return [(left, right) for left, right in cells]


def headings() -> list[str]:
    return re.findall(r"^\| (.+) \| here \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(
    "plugin", [DistributedDataParallelKwargs, DeepSpeedPlugin, FullyShardedDataParallelPlugin, MegatronLMPlugin]
)
def test_every_setting_of_a_plugin_is_there_once(plugin: type) -> None:
    named = [name for left, _ in rows(f"`{plugin.__name__}`") for name in re.findall(r"`(\w+)`", left)]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(plugin))


def test_every_argument_of_the_installed_torch_ddp_is_there() -> None:
    arguments = rows("`torch.nn.parallel.DistributedDataParallel`")
    named = {name for left, _ in arguments for name in re.findall(r"`(\w+)`", left)}
    assert named >= set(inspect.signature(TorchDDP).parameters)


def test_every_argument_of_zero_redundancy_optimizer_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts a function where this is first imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    named = {
        name
        for left, _ in rows("`torch.distributed.optim.ZeroRedundancyOptimizer`")
        for name in re.findall(r"`(\w+)`", left)
    }
    assert named == set(inspect.signature(ZeroRedundancyOptimizer).parameters) - {"defaults"}


def test_what_is_said_to_be_here_is_here() -> None:
    options = {field.name for field in dataclasses.fields(MegatronDDPPlugin)}
    known = options | {field.name for field in dataclasses.fields(TrainingArguments)} | set(dir(Accelerator))
    known |= set(inspect.signature(accelerate.Accelerator.__init__).parameters)
    # values, and the left of the same row
    known |= {"full", "sharded", "reduce_dtype", "comm_hook", "batch_size", "zero_allow_untested_optimizer"}
    known |= {"parallelize_module", "configure_model", "strict_loading"}  # torch's and Lightning's
    for heading in headings():
        for _, right in rows(heading):
            for name in re.findall(r"`(?:accelerator\.)?([a-z]\w+)(?:=\w+)?`", right):
                assert name in known, f"{heading}: {name}"
    assert options <= set(re.findall(r"`(\w+)", TEXT)), "and each option is somewhere"


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (PAGE.parent / (link.partition("#")[0] or PAGE.name)).exists(), link


@pytest.mark.parametrize("name", ["check_reduction", "dim"])
def test_what_is_said_to_be_refused_is(name: str) -> None:
    value = {"check_reduction": True, "dim": 1}[name]
    kwargs = DistributedDataParallelKwargs(**{name: value}).to_kwargs()
    with pytest.raises(ValueError, match=name):
        MegatronDDPPlugin().config(**kwargs)
