"""The benchmark as it is run, on the smallest model; what it refuses; and that it notices an engine which trains to
other losses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import CASES
from benchmarks.engines import ENGINES
from benchmarks.measure import Alone, Block, Timing
from benchmarks.network import NetworkError, check_possible
from benchmarks.results import Report, summarise
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[2]
ROUNDS, STEPS = 2, 1
WARM_UP_STEPS = 2
UNTIMED_STEPS_A_BLOCK = 1


def why_no_namespaces() -> str:
    """Empty where network namespaces can be made."""
    try:
        check_possible()
        made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    except NetworkError as error:
        return str(error)
    return made.stderr


needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())


def run(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "--cases", "tiny", "--ranks", "2", "--out", str(out)]
    command += ["--rounds", str(ROUNDS), "--steps", str(STEPS), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return json.loads((out / "results.json").read_text())


PEERS = {"deepspeed-1": "tiny", "deepspeed-2": "tiny", "megatron-core": "tiny", "megatron-core-layer-wise": "tiny-muon"}
"""By name, the case that a peer is tried with."""
MISSING = {name: reason for name, case in PEERS.items() if (reason := ENGINES[name].why_skipped(CASES[case]))}


@pytest.mark.fresh
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.skipif(name in MISSING, reason=MISSING.get(name, ""))]) for name in PEERS],
)
def test_peers_are_measured_where_they_are_installed(name: str, tmp_path: Path) -> None:
    """DeepSpeed 0.19 trains to other losses than torch DDP with one microbatch a step, which the program says."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "--cases", PEERS[name], "--engines", f"ddp,{name}"]
    command += ["--ranks", "2", "--rounds", "1", "--steps", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0 or (name.startswith("deepspeed") and "trained to other losses" in done.stderr), (
        done.stderr
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failed"] == results["skipped"] == []


@pytest.mark.fresh
@pytest.mark.sample(1)
@pytest.mark.parametrize("network", ["loopback", pytest.param("1gbit", marks=needs_namespaces)])
def test_it_measures_and_writes_what_it_measured(network: str, tmp_path: Path) -> None:
    network_arguments = [] if network == "loopback" else ["--network", network]
    results = run(tmp_path, "--engines", "ddp,ours", *network_arguments)
    assert results["failed"] == results["skipped"] == []
    assert results["environment"]["torch"]
    assert results["environment"]["network"].startswith(network)
    (case,) = results["cases"]
    numel = sum(param.numel() for param in CASES["tiny"].build_model().parameters())
    assert (case["case"], case["num_ranks"], case["num_elements"]) == ("tiny", 2, numel)
    ddp, ours = case["engines"]
    assert (ddp["name"], ours["name"]) == ("ddp", "ours")

    for engine in (ddp, ours):
        for name in ("step_ms", "ratio", "cpu_ms"):
            samples = engine[name]["samples"]
            assert len(samples) == ROUNDS
            assert min(samples) <= engine[name]["q1"] <= engine[name]["median"] <= engine[name]["q3"] <= max(samples)
            assert min(samples) > 0
        pairs = zip(engine["step_ms"]["samples"], ddp["step_ms"]["samples"], strict=True)
        assert engine["ratio"]["samples"] == [mine / theirs for mine, theirs in pairs]
        # 8(d-1)/d bytes a parameter on two ranks; small, so that what is sent beside the parameters shows
        assert 4.0 <= engine["received_bytes"] / numel < 4.2
        if network == "loopback":
            assert engine["interface_bytes"] is None
        else:
            assert 1.0 < engine["interface_bytes"] / engine["received_bytes"] < 1.2
        assert engine["heap_bytes"] > engine["tensor_bytes"]
        assert engine["rss_bytes"] > 0
    assert 16 * numel <= ddp["tensor_bytes"] < 16.1 * numel  # weights, gradients, two moments
    assert 12 * numel <= ours["tensor_bytes"] < 14.2 * numel  # half of the moments; a ring's scratch of half a bucket
    assert ddp["reported_wait_ms"] is None
    assert ours["reported_wait_ms"] > 0
    if network != "loopback":
        assert 100 < case["link_mbit"] < 1000

    assert len(ddp["losses"]) == WARM_UP_STEPS + ROUNDS * (UNTIMED_STEPS_A_BLOCK + STEPS)
    assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert ddp["losses"][0] == pytest.approx(math.log(CASES["tiny"].vocabulary), rel=0.05)  # knows nothing yet
    assert ours["losses_agree"]

    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "results.md").read_text()
    assert "nothing is claimed about NCCL" in table
    assert "CUDA is unmeasured" in table
    assert f"| ours | {ours['ratio']['median']:.2f} (" in table
    assert {path.name for path in tmp_path.iterdir()} == {f"results.{kind}" for kind in ("json", "md", "png")}


def timings(**losses: list[float]) -> list[Timing]:
    """The timings of two equal ranks."""
    return [Timing(1.0, {name: [Block(2.0, 1.0, 0.5, 0.25)] for name in losses}, losses)] * 2


@pytest.mark.parametrize(
    ("losses", "agrees"),
    [
        ([4.0, 3.0], True),
        ([4.0 * (1 + 9e-6), 3.0], True),
        ([4.0, 3.0 * (1 - 2e-5)], False),
        ([4.0, math.nan], False),
    ],
)
def test_an_engine_that_trains_to_other_losses_than_ddp_is_noticed(losses: list[float], agrees: bool) -> None:
    specs = [ENGINES["bound"], ENGINES["ddp"], ENGINES["ours"]]
    alone = {spec.name: [Alone(1, 1, 1, 1.0, None, None)] * 2 for spec in specs}
    measured = timings(bound=[5.0, 5.0], ddp=[4.0, 3.0], ours=losses)
    result = summarise(CASES["tiny"], specs, 1, [measured], alone)
    assert [engine.losses_agree for engine in result.engines] == [None, True, agrees]
    assert len(Report({}, [result]).disagreements()) == (0 if agrees else 1)


@pytest.mark.long
@pytest.mark.fresh
def test_the_engine_of_another_commit_trains_beside_this_one_to_the_same_bits() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.before_after",
        "HEAD",
        "--case",
        "tiny",
        "--rounds",
        "4",
        "--steps",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "ratio of each round" in done.stdout
    assert "equal to the bit" in done.stdout
