"""A type checker sees what a user misspells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from megastrategy import DistributedDataParallelConfig
from megastrategy.core import ConfigOptions

from . import ROOT

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


@pytest.mark.long
def test_a_checker_reports_two_errors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line.partition(": error: ")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert 'Unexpected keyword argument "buckt_size" for "MegatronDDPStrategy"' in errors[0]
    assert 'Module has no attribute "nothing"' in errors[1]
