"""The wheel and the source distribution install into an empty environment, and a Trainer knows the strategy by name."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import megastrategy

from ..support.scripts import ROOT

pytestmark = pytest.mark.nightly

INSTALL_S = 1800
"""For torch, which may have to be downloaded."""

TRAIN = """\
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy="megatron_ddp", max_steps=3, enable_progress_bar=False, **options)
    trainer.fit(BoringModel())
    if trainer.global_rank == 0:
        import megastrategy
        print(type(trainer.strategy).__name__, trainer.global_step, megastrategy.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=outside, capture_output=True, text=True, timeout=INSTALL_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from the files that git knows."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs build: pip install --group nightly")
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    for name in run("git", "ls-files", "megastrategy", "*.toml", "*.py", "README.md", "LICENSE", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the wheel, with extras, and the packages that it asks for."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    interpreter = folder / "bin" / "python"
    [wheel] = distributions.glob("*.whl")
    install = (interpreter, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*install, f"{wheel}[lightning]", cwd=folder)
    return interpreter


def test_distributions_have_only_the_package(distributions: Path) -> None:
    [wheel], [source] = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    expected = {name for name in run("git", "ls-files", "megastrategy", cwd=ROOT).splitlines() if name.endswith(".py")}
    assert names == expected | {"megastrategy/py.typed", "megastrategy_autoload.py"}
    with tarfile.open(source) as archive:
        assert expected <= {name.partition("/")[2] for name in archive.getnames()}
    for line in (f"Version: {megastrategy.__version__}", "License-Expression: Apache-2.0", "# megastrategy"):
        assert f"\n{line}\n" in metadata
    assert "Description-Content-Type: text/markdown" in metadata


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_installed_package_trains_by_name(kind: str, python: Path, distributions: Path, tmp_path: Path) -> None:
    if kind == "source":
        [source] = distributions.glob("*.tar.gz")
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", source, cwd=tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    name, steps, file = run(python, "train.py", cwd=tmp_path).split()[-3:]
    assert (name, steps) == ("MegatronDDPStrategy", "3")
    assert Path(file).is_relative_to(python.parents[1])


def test_command_is_installed(python: Path, tmp_path: Path) -> None:
    printed = run(python.with_name("megastrategy"), "--version", cwd=tmp_path)
    assert printed == f"megastrategy, version {megastrategy.__version__}\n"
