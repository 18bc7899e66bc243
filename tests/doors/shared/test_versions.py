"""A package that is too old is refused by its name and version, whichever way a strategy is asked for."""

from __future__ import annotations

import itertools
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from megastrategy._versions import ACCELERATE, LIGHTNING, RAY
from megastrategy_autoload import DOORS

from ..python_processes import run_python

OLDER = ("1.9.5", "2.1.4", "2.4.0", "2.5.6")
ASK = """
import importlib, sys

def refused(ask, *words):
    try:
        ask()
    except ImportError as error:
        assert type(error) is ImportError, repr(error)
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError(f"nothing refused {words}")
"""


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize(("package", "door"), DOORS.items())
def test_a_name_and_an_import_refuse_an_old_lightning(tmp_path: Path, package: str, door: str) -> None:
    """The installed one with an old version's number: what it lacks must not be what is complained about."""
    code = f"""
        import torch  # the names are there, and nothing was said
        top = importlib.import_module({package!r}.partition(".")[0])
        api = importlib.import_module({package!r})
        user = getattr(api, "Trainer", None) or api.Fabric
        present = top.__version__
        for version in {OLDER!r}:
            top.__version__ = version
            words = ({package!r} + " " + version, "{LIGHTNING} or later", "pip install '", ">={LIGHTNING}'")
            refused(lambda: user(strategy="megatron_ddp", accelerator="cpu", devices=2), *words)
            refused(lambda: user(strategy="megatron_ddp_notebook", accelerator="cpu", devices=2), *words)
            refused(lambda: importlib.import_module({door!r}), *words)
            user(strategy="ddp", accelerator="cpu", devices=2)  # is no business of ours
        for version in ("{LIGHTNING}", "2.10.0.dev20270101", "3.0", present):
            top.__version__ = version
            sys.modules.pop({door!r}, None)
            importlib.import_module({door!r})
    """
    run_python("-c", ASK + textwrap.dedent(code), cwd=tmp_path, autoload=True)


@pytest.mark.fresh
def test_an_old_accelerate_is_refused(tmp_path: Path) -> None:
    code = """
        import accelerate
        accelerate.__version__ = "1.14.0"
        words = ("accelerate 1.14.0", "1.15 or later", "pip install 'accelerate>=1.15'")
        import megastrategy.accelerate  # as tools do, which need the launcher's options and no Accelerator
        refused(lambda: megastrategy.accelerate.Accelerator, *words)
        accelerate.__version__ = "1.15.0"
        megastrategy.accelerate.Accelerator
    """
    run_python("-c", ASK + textwrap.dedent(code), cwd=tmp_path)


def test_the_metadata_has_the_same_minima() -> None:
    """And no extra asks for less."""
    content = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = content["project"]["optional-dependencies"]
    assert f"lightning>={LIGHTNING}" in extras["lightning"]
    assert f"accelerate>={ACCELERATE}" in extras["accelerate"]
    assert f"ray[train]>={RAY}" in extras["ray"]

    def release(version: str) -> list[int]:
        return [int(number) for number in version.split(".")]

    items = [*itertools.chain(*extras.values()), *content["dependency-groups"]["test"]]
    asked = [re.match(r"(lightning|pytorch-lightning|accelerate)>=([\d.]+)$", item) for item in items]
    assert len(list(filter(None, asked))) >= 6
    for found in filter(None, asked):
        assert release(found[2]) >= release(ACCELERATE if found[1] == "accelerate" else LIGHTNING), found[0]
