"""Every address has the names that it promises, no other; the reference shows them, and a type checker knows them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from megastrategy import DistributedDataParallelConfig
from megastrategy.core import ConfigOptions

from . import ROOT

TRAINER = ["MAIN_PARAMS_KEY", "CommunicationMonitor", "MegatronDDPStrategy", "SaveOnStop"]
FABRIC = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]
PUBLIC = {
    "megastrategy": [
        "CommunicationMonitor",
        "DistributedDataParallel",
        "DistributedDataParallelConfig",
        "DistributedOptimizer",
        "GradScaler",
        "MegatronDDPStrategy",
        "Pipeline",
        "Replicas",
        "SaveOnStop",
        "__version__",
        "no_decay_groups",
        "plan",
    ],
    "megastrategy.lightning": TRAINER,
    "megastrategy.pytorch_lightning": TRAINER,
    "megastrategy.fabric": FABRIC,
    "megastrategy.lightning_fabric": FABRIC,
    "megastrategy.ray": ["RayMegatronDDPStrategy"],
    "megastrategy.accelerate": ["Accelerator", "MegatronDDPPlugin", "replace_accelerators"],
    "megastrategy.data": ["ResumableSampler"],
    "megastrategy.pipeline": ["Pipeline", "load_whole_state_dict", "whole_state_dict"],
    "megastrategy.errors": [
        "BackwardFailedError",
        "BatchMismatchError",
        "BucketInFlightError",
        "CheckpointError",
        "ClosedError",
        "CollectiveError",
        "DirectUseError",
        "LayoutMismatchError",
        "LossTokensError",
        "MainGradError",
        "MegastrategyError",
        "MicrobatchMismatchError",
        "NonFiniteGradError",
        "NotOnAllRanksError",
        "OptimizerNotShardableError",
        "ParameterChangedError",
        "ReducedGradError",
        "ReplicaMismatchError",
        "StageError",
        "UnusedParameterError",
    ],
    "megastrategy.events": ["Event", "EventKind", "Listener"],
}
"""What scripts import. A name that is taken away breaks them; one that is added belongs here, and on the page."""

COMMANDS = ["megastrategy.launch", "megastrategy.tools.commands"]
"""Public by their command lines alone."""


@pytest.mark.parametrize("module", PUBLIC)
def test_address_has_its_names(module: str) -> None:
    if module == "megastrategy.ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'megastrategy[ray]'")
    found = importlib.import_module(module)
    assert list(found.__all__) == PUBLIC[module]
    for name in PUBLIC[module]:
        assert getattr(found, name) is not None, name


def test_public_module_is_an_address_or_a_command() -> None:
    """All except ``core``, which the addresses are made of, and the tools behind the command line."""
    package = ROOT / "megastrategy"
    names = {
        f"megastrategy.{path.stem}"
        for path in package.iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert names | {"megastrategy"} == {*PUBLIC, "megastrategy.launch", "megastrategy.core", "megastrategy.tools"}


def test_reference_shows_every_public_name() -> None:
    pages = sorted((ROOT / "docs" / "reference" / "api").glob("*.rst"))
    api = "".join(page.read_text(encoding="utf-8") for page in pages)
    directive = r"^(?:\.\. (?:autoclass|autofunction|py:class|py:data)::|  +)\s*(megastrategy\.[\w.]+)(?:\(.*\))?$"
    shown = set(re.findall(directive, api, re.MULTILINE))
    # An automodule with members shows what the module's __all__ has.
    whole = set(re.findall(r"^\.\. automodule:: ([\w.]+)\n   :members:\n   :imported-members:$", api, re.MULTILINE))
    assert whole == {"megastrategy.errors", "megastrategy.events"}
    promised = {f"{module}.{name}" for module, names in PUBLIC.items() if module not in whole for name in names}
    assert shown == promised
    for module in COMMANDS:
        assert f"\n.. automodule:: {module}\n" in api


# --- types -----------------------------------------------------------------------------------------------------------


SCRIPT = """\
import megastrategy
from megastrategy import DistributedDataParallelConfig, MegatronDDPStrategy

config = DistributedDataParallelConfig(bucket_size=1)
strategy = MegatronDDPStrategy(bucket_size=1, find_unused_parameters=False, tensor_parallel_size=2)
misspelt = MegatronDDPStrategy(buckt_size=1)
absent = megastrategy.nothing
"""


def test_options_have_the_fields_types() -> None:
    """The fields of the config are written a second time for checkers."""
    assert get_type_hints(ConfigOptions) == get_type_hints(DistributedDataParallelConfig)


@pytest.mark.nightly
def test_type_checker_reports_two_errors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line.partition(": error: ")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert 'Unexpected keyword argument "buckt_size" for "MegatronDDPStrategy"' in errors[0]
    assert 'Module has no attribute "nothing"' in errors[1]
