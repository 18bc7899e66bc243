"""Examples run from a clone that is not installed, without PYTHONPATH."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.patience import HANG_S
from ..support.scripts import ROOT

EXAMPLES = ROOT / "examples"

# In one interpreter, so that Lightning is imported once: what an earlier example has imported would be found again, so
# each begins with a path on which the package is not.
_EACH_HELP = """
import importlib.util, json, runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
clean = [entry for entry in sys.path if entry != sys.argv[1]]
found = {}
for path in sys.argv[2:]:
    sys.path[:] = clean
    for name in [name for name in sys.modules if name.partition(".")[0] == "megastrategy"]:
        del sys.modules[name]
    before = importlib.util.find_spec("megastrategy") is not None
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code
    except ModuleNotFoundError as error:
        status = error.name
    found[path] = [before, status, getattr(sys.modules.get("megastrategy"), "__file__", None)]
print(json.dumps(found))
"""


@pytest.mark.fresh
@pytest.mark.long
def test_each_example_finds_the_clone(tmp_path: Path) -> None:
    left_out = ("transformers_trainer.py", "replicas_picture.py")  # the second needs no package
    paths = [str(path) for path in sorted(EXAMPLES.glob("*.py")) if path.name not in left_out]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # it would import the package before
    done = subprocess.run(
        [sys.executable, "-c", _EACH_HELP, str(ROOT), *paths],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(paths) >= 11
    for path, (before, status, package) in found.items():
        assert not before
        assert (status, package) in ((0, str(ROOT / "megastrategy" / "__init__.py")), ("ray", None)), path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_clone_is_on_the_path_before_the_package_is_imported(path: Path) -> None:
    if imported := re.search(r"^(from|import) megastrategy", path.read_text(), re.MULTILINE):
        appended = "sys.path.append(str(Path(__file__).resolve().parents[1]))"
        assert -1 < path.read_text().find(appended) < imported.start()


def test_the_notebook_finds_it_too() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = "".join(line for cell in cells if cell["cell_type"] == "code" for line in cell["source"])
    assert code.index('sys.path.append("..")') < code.index("import megastrategy")
