"""Every address has the names that it promises, no other, and the reference shows them all."""

from __future__ import annotations

import importlib
import re

import pytest

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
def test_an_address_has_the_names_that_it_promises(module: str) -> None:
    if module == "megastrategy.ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'megastrategy[ray]'")
    found = importlib.import_module(module)
    assert list(found.__all__) == PUBLIC[module]
    for name in PUBLIC[module]:
        assert getattr(found, name) is not None, name


def test_every_module_that_is_not_private_is_an_address_or_a_command() -> None:
    """All except ``core``, which the addresses are made of, and the tools behind the command line."""
    package = ROOT / "megastrategy"
    names = {
        f"megastrategy.{path.stem}"
        for path in package.iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert names | {"megastrategy"} == {*PUBLIC, "megastrategy.launch", "megastrategy.core", "megastrategy.tools"}


def test_the_reference_shows_every_public_name() -> None:
    api = (ROOT / "docs" / "reference" / "api.rst").read_text(encoding="utf-8")
    directive = r"^(?:\.\. (?:autoclass|autofunction|py:class|py:data)::|  +)\s*(megastrategy\.[\w.]+)$"
    shown = set(re.findall(directive, api, re.MULTILINE))
    # An automodule with members shows what the module's __all__ has.
    whole = set(re.findall(r"^\.\. automodule:: ([\w.]+)\n   :members:\n   :imported-members:$", api, re.MULTILINE))
    assert whole == {"megastrategy.errors", "megastrategy.events"}
    promised = {f"{module}.{name}" for module, names in PUBLIC.items() if module not in whole for name in names}
    assert shown == promised
    for module in COMMANDS:
        assert f"\n.. automodule:: {module}\n" in api
