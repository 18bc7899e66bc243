"""The timeline as a Chrome trace and as a picture."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from megastrategy.tools.pictures import chrome_trace
from megastrategy.tools.profile_report import write_files
from megastrategy.tools.timeline import ModelEvents, RankEvents

from .test_command import Hides
from .timeline_events import MS, assert_nested, names_of, one_step, slices


def test_ranks_are_processes_of_one_trace_on_one_clock() -> None:
    """Rank 1's clock began 7 ms later: it has smaller numbers for the same moments."""
    model = ModelEvents([*one_step(), *one_step(after=200)], (4096, 8192), (1024, 2048), num_skipped_steps=5)
    ranks = [RankEvents(0, [model], 0), RankEvents(1, [ModelEvents(one_step(after=-7 + 3))], 7 * MS)]
    trace = json.loads(json.dumps(chrome_trace(ranks)))
    assert names_of(trace, "process_name") == {(0, 0): "rank 0", (1, 0): "rank 1"}
    threads, lanes = slices(trace), names_of(trace, "thread_name")
    assert [lanes[0, tid] for tid in range(5)] == ["steps", "compute", "communication", "waiting", "gaps"]
    assert [(e["name"], e["ts"], e["dur"]) for e in threads[0, 0]] == [
        ("training step 5", 0.0, 100e3),
        ("training step 6", 200e3, 100e3),
    ]
    assert [e["args"] for e in threads[0, 0]] == [{"exposed_ms": 23.0, "exposed_share": 0.23}] * 2
    assert [e["ts"] for e in threads[1, 1]] == [3e3, 25e3, 66e3], "what the others call 3 ms later"
    reduced = next(e for e in threads[0, 2] if e["name"] == "reduce bucket 1")
    assert (reduced["ts"], reduced["dur"], reduced["args"]) == (
        45e3,
        15e3,
        {"launch_to_done_ms": 20.0, "bytes": 8192},
    )
    for events in threads.values():
        assert_nested(events)


def test_a_record_reads_as_it_was_written() -> None:
    record = RankEvents(3, [ModelEvents(one_step(), [4096, 8192], [1024, 2048], 5)], 17, ((3, 9), (20, 21)))
    assert RankEvents.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_without_matplotlib_all_but_the_picture_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hides("matplotlib"), *sys.meta_path])
    (tmp_path / "timeline.png").write_text("of an older run")
    _, trace, picture = write_files([RankEvents(0, [ModelEvents(one_step())])], tmp_path, "train.py")
    assert "pip install 'megastrategy[plot]'" in picture
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name.split(">")[0] for name in project["optional-dependencies"]["plot"]] == ["matplotlib"]
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "trace.json"}
    assert "perfetto" in trace
