"""``megastrategy plan`` of examples that other projects ship, unchanged: a table, and the bytes of a real run.

Their files are fetched with git when the test runs. What they would download is made here, small, and where they look
for it before they ask the net.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megastrategy.tools.rendering import size

from ..support.extra_packages import python_with, sources_of
from ..support.patience import HANG_S
from ..support.scripts import outside_of_ranks, run_script
from .local_files import write_bert, write_digits, write_glue, write_text

pytestmark = [pytest.mark.long, pytest.mark.fresh, pytest.mark.timeout(1800)]

COMMITS = {
    "huggingface/accelerate": "beb0672aa8444ea7647aee056f624effe5996346",  # 1.14.0
    "huggingface/transformers": "70179949f7899e0ca235210f7188c6c9e0add77b",  # of 2025-12-19, before 5.0.0
    "Lightning-AI/pytorch-lightning": "be98784a1a03581b7051a355ae1084fd352d7cea",  # 2.6.5
}

LANGUAGE = ["--tokenizer_name", "bert-base-cased", "--train_file", "text.txt", "--do_train", "--use_cpu"]
LANGUAGE += ["--per_device_train_batch_size", "2", "--output_dir", "out"]
GPT2 = ["--model_type", "gpt2", "--config_overrides", "n_embd=64,n_layer=2,n_head=2,n_positions=128"]
BERT = ["--model_type", "bert", "--config_overrides", "hidden_size=64,num_hidden_layers=2,num_attention_heads=2"]
TRAINER = ["--trainer.strategy", "megatron_ddp", "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
FABRIC_RUN = {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_STRATEGY": "megatron_ddp", "LT_DEVICES": "2"}
FABRIC_RUN |= {"LT_NUM_NODES": "1"}


@dataclasses.dataclass(frozen=True)
class Example:
    """A script of a repository, and what a user would write after its name; ``environment``: what starts it sets."""

    repository: str
    script: str
    arguments: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The arguments before the script."""
        return [] if self.repository.startswith("Lightning") else ["-m", "megastrategy.launch"]


EXAMPLES = [
    Example("huggingface/accelerate", "nlp_example.py", ["--cpu"]),
    Example(
        "huggingface/accelerate",
        "by_feature/gradient_accumulation.py",
        ["--cpu", "--gradient_accumulation_steps", "2"],
    ),
    Example("huggingface/transformers", "run_clm.py", [*GPT2, "--block_size", "64", *LANGUAGE]),
    Example("huggingface/transformers", "run_mlm.py", [*BERT, "--max_seq_length", "64", *LANGUAGE]),
    Example("Lightning-AI/pytorch-lightning", "fabric/language_model/train.py", environment=FABRIC_RUN),
    Example("Lightning-AI/pytorch-lightning", "pytorch/basics/autoencoder.py", TRAINER),
    Example("Lightning-AI/pytorch-lightning", "pytorch/basics/backbone_image_classifier.py", TRAINER),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    return python_with(folder, "datasets", "evaluate", "scikit-learn", imports="datasets")


@pytest.fixture(scope="module")
def python_of_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = python_with(tmp_path_factory.mktemp("images"), "torchvision", imports="torchvision")
    done = subprocess.run([python, "-c", "import torchvision"], capture_output=True, text=True)
    if done.returncode:  # PyPI's is built for its own torch with CUDA
        pytest.skip(f"torchvision cannot be had for this torch: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The examples of a repository, fetched once."""
    found: dict[str, Path] = {}

    def examples_of(repository: str) -> Path:
        if repository not in found:
            part = "examples/pytorch/language-modeling" if repository.endswith("transformers") else "examples"
            url, folder = f"https://github.com/{repository}", tmp_path_factory.mktemp("sources")
            found[repository] = sources_of(folder, url, COMMITS[repository], part) / part
        return found[repository]

    return examples_of


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.script)
def test_an_example_is_planned_as_it_is(
    example: Example,
    sources: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """The figures of docs/planning.md are those that ``--junitxml FILE -o junit_family=xunit1`` writes."""
    folder = sources(example.repository)
    script, cwd = folder / example.script, tmp_path / "work"
    cwd.mkdir()
    if example.script.startswith("pytorch/basics"):
        python = request.getfixturevalue("python_of_images")
        # One of these is where Lightning's own module tries whether MNIST can be had, the other the example's.
        write_digits(cwd / "data")
        if not (folder / "Datasets").exists():
            write_digits(folder / "Datasets")
    else:
        python = request.getfixturevalue("python")
        write_bert(cwd / "bert-base-cased")
        write_glue(cwd)
        write_text(cwd / "text.txt")
        write_text(cwd / "data" / "wikitext-2.txt")
    before = script.read_bytes()
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), **example.environment}
    environment |= {"MPLCONFIGDIR": str(tmp_path / "cache")}

    def plan(*options: str) -> str:
        program = [python, "-c", "from megastrategy.tools.cli import main; main()", "plan", "--ranks", "2,16"]
        command = [*program, *options, *example.command, str(script), *example.arguments]
        done = subprocess.run(
            command, cwd=cwd, env=outside_of_ranks() | environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(plan("--json"))["ranks"]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Less than the half minute that a plan may take, on a machine that does nothing else.
    processor_s = spent.ru_utime - used.ru_utime + spent.ru_stime - used.ru_stime
    assert processor_s < 30
    record_property("processor_s", round(processor_s, 1))
    assert [row["dp_size"] for row in found] == [2, 16]
    assert not any(row["computes"] for row in found), "its shapes alone are enough"
    states = ("weight_bytes", "frozen_bytes", "grad_bytes", "main_param_bytes", "state_bytes")
    for row in found:
        assert row["activation_bytes"] > 0
        assert row["total_bytes"] == sum(row[name] for name in (*states, "exchange_bytes", "activation_bytes"))
    table = [line.split("│") for line in plan().splitlines() if "│" in line]
    for row, line in zip(found, table, strict=True):
        told = [cell.strip() for cell in line]
        assert told[1] == str(row["dp_size"])
        assert [size(row[name]) for name in states] == told[2:7]
        assert told[9:11] == [size(row["total_bytes"]), f"fits: {size(row['free_bytes'])} left"]

    real = tmp_path / "real"
    real.mkdir()
    done = run_script(
        script,
        *example.arguments,
        cwd=cwd,
        environment=environment,
        before=("tests.tools.held_bytes", str(real), *example.command),
        python=python,
    )
    assert (real / "rank0").exists(), done.stdout + done.stderr
    held_bytes = int((real / "rank0").read_text())
    assert held_bytes == sum(found[0][name] for name in states)
    record_property("held_bytes", held_bytes)
    assert script.read_bytes() == before, "unchanged"
