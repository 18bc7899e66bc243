"""The notebook in a kernel of its own, as Jupyter runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.patience import HANG_S

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.fresh
@pytest.mark.long
def test_it_trains_on_two_processes_and_has_their_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", f"--output={tmp_path / 'run'}", NOTEBOOK]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("run*")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    printed = "".join(str(output.get("text", "")) for output in cells[-1]["outputs"])
    read = re.search(r"2 processes, ([\d.]+)% of 360 digits read", printed)
    assert read is not None, printed
    assert float(read[1]) > 90, "guessing gives 10"
