"""Measures a script's first step at several numbers of ranks, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .one_step import RANKS_SHARE_A_MODEL, REFUSALS, MeasuredStep


class PlanError(Exception):
    """Says in one line why nothing can be planned, and what to do."""


def measure_script(
    target: str, arguments: Sequence[str], ranks: Sequence[int], *, is_module: bool, computes: bool = False
) -> list[MeasuredStep]:
    """Returns the first step of the script for each number of ranks.

    Large tensors have no values at first, see :mod:`.live_bytes`. A script that does not get through its step so is run
    once more with values, unless ``computes`` asks for them at once.

    Raises:
        PlanError: if a script fails, or makes no step.
    """
    _check_syntax([argument for argument in arguments if argument.endswith(".py")][:1] if is_module else [target])
    command = [*(["-m"] if is_module else []), target, *arguments]
    # Each takes a core and, without values, hardly any memory; with values it takes what a rank takes.
    workers = 1 if computes else max(1, min(len(ranks), os.cpu_count() or 1))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        measured = [pool.submit(_measure, command, size, computes=computes) for size in ranks]
        # The first failure is the user's answer: no further number of ranks is begun.
        concurrent.futures.wait(measured, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in measured:
            future.cancel()
    failed = [future for future in measured if not future.cancelled() and future.exception() is not None]
    return [future.result() for future in failed or measured]


def _check_syntax(scripts: Sequence[str]) -> None:
    """Raises PlanError for a script that Python cannot read. No rank runs for it."""
    for script in filter(os.path.isfile, scripts):
        try:
            compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes, before Python 3.12
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise PlanError(f"{script}{line}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error


def _measure(command: Sequence[str], dp_size: int, *, computes: bool) -> MeasuredStep:
    result, why = _run(command, dp_size, "values" if computes else "shapes")
    if result is None and not computes and why not in REFUSALS:
        result, why = _run(command, dp_size, "values")
    if result is None:
        raise PlanError(f"{command[1] if command[0] == '-m' else command[0]} on {dp_size} rank(s): {why}")
    return result


def _run(command: Sequence[str], dp_size: int, way: str) -> tuple[MeasuredStep | None, str]:
    """The measured step; or None, and why."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step"
        program = [sys.executable, "-m", "megastrategy.tools.plan.one_step", str(dp_size), str(file), way]
        # A compiled model's operations cannot be seen one by one, so it runs as it is written.
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
        done = subprocess.run(
            [*program, *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if not file.exists():
            return None, _how_it_ended(done)
        result = pickle.loads(file.read_bytes())
    if isinstance(result, MeasuredStep):
        return result, ""
    return None, str(result)


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = f". {_OUT_OF_MEMORY}" if name == "SIGKILL" else ""
        return f"the script was ended by {name}{hint}"
    reason = _reason([line for line in (done.stderr or done.stdout).splitlines() if line.strip()])
    hint = next((f". {hint}" for sign, hint in _HINTS if re.search(sign, done.stderr)), "")
    return f"the script ended with exit code {done.returncode}: {reason.rstrip('.') if hint else reason}{hint}"


def _reason(said: Sequence[str]) -> str:
    """The line that names the last exception, whose message may have more of them; or the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in said]
    traces = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    behind = lines[traces[-1] + 1 :] if traces else []
    return next(
        (line for line in behind if not line.startswith(" ")), lines[-1] if lines else "nothing was said"
    ).strip()


_OUT_OF_MEMORY = "This machine's memory does not hold what it makes itself: a smaller data set"


_HINTS = (
    # The first that is found in what it said. What comes first is the cause of what follows.
    (
        r"parallelize_module\(|/tensor/parallel/|tensor_parallel|pipeline_parallel|megastrategy/pipeline/|/pipelining/",
        RANKS_SHARE_A_MODEL,
    ),
    (r"ModuleNotFoundError: No module named", "Install that into this environment: the script itself is run"),
    (
        r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|MPS is not|No supported gpu backend",
        "It asks for a GPU: let it train on the CPU here (accelerator='cpu', --cpu, a device taken from the model)",
    ),
    (
        r"Hugging Face Hub|ConnectionError|URLError|LocalEntryNotFound|OfflineModeIsEnabled|MaxRetryError|gaierror",
        "It wants to download: run it once where there is a net, or give it local files, and then plan it",
    ),
    (r"FileNotFoundError", "Run it from the folder that its paths begin in, with the files that it reads"),
    (r"the following arguments are required|error: unrecognized arguments", "Its own arguments come after its name"),
    (r"EOFError: EOF when reading a line", "It asks for input, which it does not get here: say it by its arguments"),
    (r"MemoryError|DefaultCPUAllocator", _OUT_OF_MEMORY),
)
"""By a pattern in what a failed script said, what to do about it."""
