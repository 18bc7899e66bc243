"""The check of GPUs, on the host: its own driver with sections that fail in every way, sections on an engine that is
broken, what it reads out of traces, and the names of torch that only a GPU would reach."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer

from benchmarks.gpu_check.budget import Plan, Turn
from benchmarks.gpu_check.command import main
from benchmarks.gpu_check.context import LEFT_OUT, Context
from benchmarks.gpu_check.devices import CudaDevice
from benchmarks.gpu_check.lines import Line, Verdict, judged
from benchmarks.gpu_check.ranks import FAKE_SIZE
from benchmarks.gpu_check.sections import SECTIONS, parity, work
from benchmarks.gpu_check.sections.several import hidden_share
from benchmarks.gpu_check.traces import Span, Trace
from benchmarks.gpu_check.versions import parse_nccl
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "benchmarks" / "gpu_check"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )


# --- the driver ------------------------------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    """Not one that has ended, whose new parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@dataclasses.dataclass(frozen=True)
class Faults:
    """The output of gpu_check_faults."""

    printed: str
    lines: dict[str, dict[str, Any]]
    hang: dict[str, Any]
    pids: list[int]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("faults")
    results, pids = folder / "results.json", folder / "pids"
    done = run("-m", "tests.tools.gpu_check_faults", str(results), str(pids))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(results.read_text())
    lines = {line["name"]: line for line in content["lines"]}
    hang = json.loads((folder / "results.json.hang").read_text())
    return Faults(done.stdout, lines, hang, [int(pid) for pid in pids.read_text().split()])


@pytest.mark.fresh
def test_the_exit_status_says_whether_a_line_failed(faults: Faults) -> None:
    assert "statuses 1 1 0" in faults.printed
    [failed, *_] = [text for text in faults.printed.splitlines() if text.startswith("--- FAIL: ")]
    assert {"B.inside", "C.section", "H.killed"} <= set(failed.removeprefix("--- FAIL: ").split(", "))


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("B.inside", r"^raised ValueError: caught, and said"),
        ("B.section", r"^raised RuntimeError: not caught"),
        ("C.section", r"^was ended by SIGSEGV[\s\S]*in crashes"),
        ("E.section", r"^ended with exit status 3"),
        ("F.section", r"^ended without a line"),
        ("G.large", r"^by one$"),
        ("H.killed", r"rank 1 after .* s: Ended: its process ended with exit status -9"),
        ("H.raised", r"rank 1 after .* s: KeyError: [\s\S]*the last rank's own words[\s\S]*in raise_on_the_last"),
    ],
)
def test_a_section_that_ends_badly_is_a_line(name: str, reason: str, faults: Faults) -> None:
    line = faults.lines[name]
    assert line["verdict"] == "FAIL"
    assert re.search(reason, line["detail"]), line["detail"]


@pytest.mark.fresh
def test_what_comes_after_a_bad_end_is_run(faults: Faults) -> None:
    assert faults.lines["B.before"]["verdict"] == "PASS"
    for letter in "AZ":
        found = {name: faults.lines[f"{letter}.{name}"]["verdict"] for name in ("small", "seen", "other")}
        assert found == {"small": "PASS", "seen": "MEASURED", "other": "SKIPPED"}


@pytest.mark.fresh
def test_a_section_that_hangs_is_ended_with_its_ranks_and_says_where(faults: Faults) -> None:
    line, *others = faults.hang["lines"]
    assert (line["name"], line["verdict"]) == ("D.section", "FAIL")
    assert line["detail"].startswith("did not end within its box of 6 s")
    assert "_sleep_in_a_named_place" in line["detail"]
    assert 6 <= line["seconds"] < 60
    assert [other["verdict"] for other in others] == ["PASS", "MEASURED", "SKIPPED"]
    assert len(faults.pids) == 2
    assert not [pid for pid in faults.pids if is_alive(pid)]


@pytest.mark.fresh
@pytest.mark.parametrize("name", ["G.unknown", "G.slow"])
def test_values_out_of_their_limits_fail(name: str, faults: Faults) -> None:
    assert faults.lines[name]["verdict"] == "FAIL"


@pytest.mark.fresh
@pytest.mark.parametrize(
    "name",
    [
        r"I\.contiguous.*",
        r"J\.read",
        r"K\.more",
        r"L\.default\.raises\.reason",
        r"L\.default\.is-kill.*reason",
        r"M\.contiguous",
    ],
)
def test_an_engine_that_is_broken_fails(name: str, faults: Faults) -> None:
    """Each fault fails its line: a missing wait, a read of the device, work that grows with elements.

    Also an error without a reason, and weights that a rank without peers has not gathered."""
    assert any(line["verdict"] == "FAIL" for found, line in faults.lines.items() if re.fullmatch(name, found))


@pytest.mark.fresh
def test_json_has_what_was_run_on_what(faults: Faults) -> None:
    assert faults.hang["command"].startswith("python -m benchmarks.gpu_check --device cpu")
    assert faults.hang["is_complete"]
    assert [section["letter"] for section in faults.hang["sections"]] == ["D", "Z"]
    assert faults.hang["torch"] == torch.__version__
    assert {"date", "commit", "device", "gpus", "python", "seconds", "started_by"} <= faults.hang.keys()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--device", "cpu", "--only", "A,@"), "unknown section '@'"),
        (("--device", "cpu", "--only", ","), "--only: expected letters out of A, B"),
        (("--gpus", "0"), "--gpus 0: expected 1 or more"),
        (("--device", "cpu", "--budget", "5"), "--budget 5: expected 60 seconds or more"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    done = run("-m", "benchmarks.gpu_check")
    assert done.returncode == 2, done.stdout
    assert "torch.cuda.is_available() is False" in done.stderr


@pytest.mark.long
@pytest.mark.fresh
def test_what_was_said_before_the_command_is_killed_is_in_the_json(tmp_path: Path) -> None:
    """As a session on a GPU ends: in the middle of a section."""
    path = tmp_path / "json"
    command = [sys.executable, "-m", "tests.tools.gpu_check_faults", str(path), str(tmp_path / "pids"), "cut"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "said before" in text:
                process.kill()
    content = json.loads(path.read_text())
    assert [line["name"] for line in content["lines"]] == ["Y.said before"]
    assert not content["is_complete"]


@pytest.mark.long
@pytest.mark.fresh
def test_lanes_run_side_by_side_and_the_jobs_of_one_in_order(tmp_path: Path) -> None:
    """Each of two waits for a file that the other makes; the third is in the first one's lane."""
    done = run("-m", "tests.tools.gpu_check_faults", str(tmp_path / "json"), str(tmp_path), "lanes")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.split()
    assert sorted(said[:2]) == ["one", "two"]
    assert said[2:] == ["three"]


# --- a budget --------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


LETTERS = "ABCDEFGHIJKLMNOPQRS"
EXPECTED_S = {letter: section.expected_s for letter, section in SECTIONS.items()}


def planned(clock: Clock, budget_s: float, seconds: Callable[[Turn], float], gpus: int = 1) -> tuple[list[str], Plan]:
    """The sections of each stage by lane, where each takes so many seconds."""
    plan, stages, end = Plan(LETTERS, EXPECTED_S, budget_s, gpus), list[str](), clock.now + budget_s
    for lanes in plan.stages():
        began, ends, names = clock.now, [clock.now], []
        for lane in lanes:
            clock.now, letters = began, ""
            for turn in lane:
                assert turn.ends_at < clock.now + turn.box_s < end
                clock.now += seconds(turn)
                letters += turn.letter
            ends.append(clock.now)
            names.append(letters)
        clock.now = max(ends)
        stages.append(" ".join(names))
    return stages, plan


def test_a_budget_has_correctness_side_by_side_then_times_in_turns_and_figures_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    stages, plan = planned(clock, 540, lambda turn: 20.0)
    assert stages == ["A", "C BENL FHK O", "IMJGPQRD", "S"]
    assert plan.left_out == []
    # Groups of NCCL's kernels of several programs may wait for each other on the same GPUs.
    assert planned(clock, 10_000, lambda turn: 20.0, gpus=8)[0][1] == "CBENLFHKO"


def test_a_short_budget_leaves_out_the_least_important_and_keeps_time_for_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    # Each section uses all that it may, as one does whose cases have no end.
    stages, plan = planned(clock, 300, lambda turn: turn.ends_at - clock.now + 1)
    assert stages[1] == "C B F O", "a lane's later sections come after its first ones"
    assert stages[3] == "S"
    assert plan.left_out[:3] == ["E", "N", "L"]
    assert set(plan.left_out) | set("".join(stages).replace(" ", "")) == set(LETTERS)
    assert clock.now <= 1300


def test_no_section_takes_what_the_next_ones_need(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    taken = {}

    def seconds(turn: Turn) -> float:
        taken[turn.letter] = turn.ends_at - clock.now
        return 10.0

    planned(clock, 2000, seconds)
    assert all(taken[letter] == 1.5 * EXPECTED_S[letter] for letter in "IMJGPQRD")


def test_a_section_begins_no_case_that_is_too_long_for_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(monkeypatch), list[Line]()
    context = Context("C", lines.append, "cpu", 1, "fork", ends_at=1010.0)
    begun = []
    for name in context.cases(["one", "two", "three", "four"]):
        begun.append(name)
        clock.now += 4.0 if name == "one" else 3.0
    assert begun == ["one", "two"], "seven seconds are over, and one took four"
    assert [(line.verdict, line.name) for line in lines] == [
        (Verdict.SKIPPED, "C.three"),
        (Verdict.SKIPPED, "C.four"),
    ]
    assert lines[0].detail == f"{LEFT_OUT}: 3 s were left"


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the time of a process's start is asked of /proc")
def test_imports_are_in_the_budget() -> None:
    code = "import time; time.sleep(1); from benchmarks.gpu_check import command as c; a = c._started_at()"
    done = run("-c", f"{code}; print(time.monotonic() - a)")
    assert 1 <= float(done.stdout) < HANG_S, done.stderr


def test_without_a_budget_all_cases_are_begun() -> None:
    assert list(Context("C", print, "cpu", 1, "fork").cases("abc")) == ["a", "b", "c"]


# --- the check itself ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("letters", ["A,B,E,G,I,J,L", "H,M,Q", "C", "D,F,T", "K,P", "N,R,S", "O"])
def test_it_passes_on_the_host(letters: str, tmp_path: Path) -> None:
    """``.ci/run`` has all of it in one run."""
    done = run("-m", "benchmarks.gpu_check", "--device", "cpu", "--only", letters, "--json", str(tmp_path / "json"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "json").read_text())["lines"]
    assert {line["name"][0] for line in lines} == set(letters.split(","))
    # One rank is not sharded, so that these also have the first of several.
    sharded = {line["name"][0] for line in lines if f"one-of-{FAKE_SIZE}" in line["name"]}
    assert sharded == set("BGJKMS") & set(letters.split(","))
    assert all(line["detail"] for line in lines if line["verdict"] == "SKIPPED")


@pytest.mark.fresh
@pytest.mark.long
def test_sections_for_several_gpus_pass_on_the_host() -> None:
    done = run("-m", "benchmarks.gpu_check", "--device", "cpu", "--gpus", "3", "--only", "C,F,I,M,N,P,Q,R")
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_sections_are_in_some_case() -> None:
    [mark] = [mark for mark in test_it_passes_on_the_host.pytestmark if mark.name == "parametrize"]
    assert sorted(letter for letters in mark.args[1] for letter in letters.split(",")) == sorted(SECTIONS)


# --- lines and traces ------------------------------------------------------------------------------------------------


def test_lines_can_be_read_and_parsed() -> None:
    line = judged("C.pooled", 0, 0, unit="elements")
    assert re.fullmatch(r"PASS     C\.pooled +0 elements +<= 0 +0\.0 s", str(line))
    assert judged("J.ratio", math.nan, 1.0).verdict is Verdict.FAIL
    assert judged("M.speed", math.nan, 1.0, at_least=True).verdict is Verdict.FAIL
    assert json.loads(json.dumps(judged("J.ratio", math.inf, 1.0).as_json(), allow_nan=False))["value"] == "inf"
    failed = Line(verdict=Verdict.FAIL, name="P.section", detail="one\ntwo")
    assert str(failed).splitlines()[1:] == ["         | one", "         | two"]


def _event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_work_on_a_device_belongs_to_the_range_that_started_it() -> None:
    """Launched in backward, it runs while the host is in the step already: as a GPU that is behind does."""
    events = [
        _event("user_annotation", "check: backward", 0, 10),
        _event("user_annotation", "check: step", 10, 10),
        _event("gpu_user_annotation", "check: step", 60, 10),
        _event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
        _event("cuda_driver", "cuLaunchKernel", 12, 1, correlation=2),
        _event("cuda_runtime", "cudaMemcpyAsync", 13, 1, correlation=3),
        _event("kernel", "backward", 15, 25, correlation=1),
        _event("kernel", "adamw", 43, 7, correlation=2),
        _event("gpu_memcpy", "copy", 50, 1, correlation=3),
        _event("kernel", "of an earlier step", 0, 1, correlation=99),
        {"ph": "i", "name": "a mark", "ts": 1},
    ]
    trace = Trace(events, CudaDevice())
    [backward], [step] = trace.ranges("check: backward"), trace.ranges("check: step")
    assert trace.work_of(backward) == [Span("backward", 15, 40)]
    assert trace.work_of(step) == [Span("adamw", 43, 50)]
    assert [span.name for span in trace.work] == ["backward", "adamw"]


def test_what_is_hidden_is_counted_once() -> None:
    work = [
        Span("ncclDevKernel_AllReduce", 0, 10),
        Span("gemm", 2, 6),
        Span("gelu", 4, 8),  # overlaps the other
        Span("ncclDevKernel_AllReduce", 20, 30),
        Span("gemm", 25, 40),
    ]
    assert hidden_share(work) == (6 + 5) / 20
    assert hidden_share([Span("gemm", 0, 1)]) is None


@pytest.mark.parametrize(
    ("code", "version"), [(23004, (2, 30, 4)), (22907, (2, 29, 7)), (21805, (2, 18, 5)), (2708, (2, 7, 8))]
)
def test_nccls_number_is_read_as_it_writes_it(code: int, version: tuple[int, int, int]) -> None:
    assert parse_nccl(code) == version


# --- what only a GPU would reach -------------------------------------------------------------------------------------

ONLY_WITH_NCCL = {"torch.distributed.ProcessGroupNCCL", "torch.distributed._make_nccl_premul_sum"}


def _names_of_torch(path: Path) -> set[str]:
    """Dotted names below torch that the file uses, with its aliases resolved."""
    tree = ast.parse(path.read_text())
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for name in aliases.values() if name.startswith("torch.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if aliases.get(first, "").split(".")[0] == "torch" and re.fullmatch(r"[\w.]+", rest):
                found.add(f"{aliases[first]}.{rest}")
    return found


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_name_of_torch_exists(path: Path) -> None:
    """Also in lines that no host runs: a name that is wrong would be found in the minutes that there is a GPU."""
    names = {name for name in _names_of_torch(path) if not any(name.startswith(one) for one in ONLY_WITH_NCCL)}
    assert not {name for name in names if not _resolves(name)}


@pytest.mark.long
@pytest.mark.fresh
def test_what_is_imported_before_forks_asks_no_driver() -> None:
    """Or no fork could use the GPU, and each of a hundred ranks would import for seconds."""
    code = (
        "import torch\n"
        "asked = []\n"
        "for name in ('is_available', 'device_count', '_lazy_init', 'current_device'):\n"
        "    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))\n"
        "from benchmarks.gpu_check import command\n"
        "command._import_slow()\n"
        "print(asked)\n"
    )
    done = run("-c", code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_it_needs_only_torch(path: Path) -> None:
    """Doors are imported by their section alone, inside functions."""
    known = {"torch", "megastrategy", *sys.stdlib_module_names}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= known
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").split(".")[0] in known
    assert len(path.read_text().splitlines()) <= 500


def test_the_page_has_every_section_by_its_own_words() -> None:
    page = (ROOT / "docs" / "project" / "gpu_check.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([A-Z]) \| ([^|]+) \|", page, re.MULTILINE)
    assert listed == [(letter, section.about) for letter, section in SECTIONS.items()]
    a, b, c = re.findall(r"more than (\d+) \+ (\d+) a parameter \+ (\d+) a bucket", page)[0]
    assert (int(a), int(b), int(c)) == (work.A, work.B, work.C)


# --- torch's sanitizer and two threads -------------------------------------------------------------------------------


class MeanwhileElsewhere(set[int]):
    """Addresses that a launch writes; while it looks at them, another thread makes a launch of its own."""

    def __init__(self, pointer: int, events: Any, patience: float) -> None:
        super().__init__({pointer})
        self.patience = patience
        self.other = threading.Thread(target=events._handle_kernel_launch, args=(3, set(), {24}, set(), "", {24: []}))

    def __iter__(self) -> Iterator[int]:
        self.other.start()
        self.other.join(self.patience)
        return super().__iter__()


def num_reports(events: Any, patience: float) -> int:
    """The sanitizer's reports of a write on one stream and a read on a second, which waits for the first."""
    writes = MeanwhileElsewhere(8, events, patience)
    reports = list(events._handle_kernel_launch(1, set(), writes, set(), "", {8: []}))
    writes.other.join()
    events._handle_event_record(100, 1)
    events._handle_event_wait(100, 2)
    return len(reports + events._handle_kernel_launch(2, {8}, set(), set(), "", {8: []}))


def test_the_sanitizer_reports_nothing_that_two_threads_order() -> None:
    """Without the lock it takes one launch for the other's, and reports a wait that is there."""
    assert num_reports(_sanitizer.EventHandler(), patience=60.0) == 1
    events = _sanitizer.EventHandler()
    parity.look_at_one_launch_at_a_time(events)
    assert num_reports(events, patience=0.2) == 0
