"""The benchmark as it is run, on the smallest model; what it refuses; and that it notices an engine which trains to
other losses."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import cli
from benchmarks.cases import CASES
from benchmarks.cli import benchmark
from benchmarks.engines import ENGINES
from benchmarks.measure import Alone, Block, Timing, order_of_round
from benchmarks.network import NetworkError, check_possible, shaped_network
from benchmarks.recipes import RECIPES
from benchmarks.results import Report, Spread, summarise
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
@pytest.mark.long
@pytest.mark.skipif(not MISSING, reason="all peers are installed")
def test_peers_that_are_not_installed_are_named(tmp_path: Path) -> None:
    missing = {name: reason for name, reason in MISSING.items() if PEERS[name] == "tiny"}
    skipped = run(tmp_path, "--engines", ",".join(["ddp", *missing]))["skipped"]
    assert {row["engine"]: row["reason"] for row in skipped} == missing
    assert all(reason.endswith("is not installed") for reason in MISSING.values())


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


@pytest.mark.fresh
@pytest.mark.long
def test_with_muon_every_engine_that_can_trains_to_the_losses_of_ddp(tmp_path: Path) -> None:
    results = run(tmp_path, "--cases", "tiny-muon", "--engines", "bound-sharded,ddp,zero,ours,deepspeed-1")
    assert results["failed"] == []
    (skipped,) = results["skipped"]
    assert (skipped["engine"], "takes matrices" in skipped["reason"]) == ("deepspeed-1", True)
    engines = {engine["name"]: engine for engine in results["cases"][0]["engines"]}
    assert list(engines) == ["bound-sharded", "ddp", "zero", "ours"]
    assert [engine["losses_agree"] for engine in engines.values()] == [None, True, True, True]
    for engine in engines.values():
        for in_step, step in zip(engine["in_step_ms"]["samples"], engine["step_ms"]["samples"], strict=True):
            assert 0 < in_step < step
    model = CASES["tiny-muon"].build_model()
    numel = sum(param.numel() for param in model.parameters())
    matrices = sum(param.numel() for param in model.blocks.parameters() if param.ndim == 2)
    # weights and gradients; a momentum for each element of a matrix, two moments for each of the others
    bytes_of_ddp = 16 * numel - 4 * matrices
    assert bytes_of_ddp <= engines["ddp"]["tensor_bytes"] < 1.01 * bytes_of_ddp
    assert engines["bound-sharded"]["tensor_bytes"] < bytes_of_ddp - 2 * matrices + numel / 10, "half of the momenta"


def test_a_recipe_steps_every_parameter_once_and_its_shares_are_a_partition_of_it() -> None:
    model = CASES["tiny-muon"].build_model()
    adamw, muon = RECIPES["muon"](model, {"foreach": True})
    assert {id(param) for param in muon.params} == {id(p) for p in model.blocks.parameters() if p.ndim == 2}
    assert sorted(map(id, muon.params + adamw.params)) == sorted(map(id, model.parameters()))
    assert adamw.make().defaults["foreach"] is True
    shares = [muon.share(rank, 3).params for rank in range(3)]
    assert sorted(id(param) for share in shares for param in share) == sorted(map(id, muon.params))
    numels = [sum(param.numel() for param in share) for share in shares]
    assert max(numels) - min(numels) <= max(param.numel() for param in muon.params)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--engines", "our"), "unknown engine 'our': did you mean 'ours'?"),
        (("--engines", "ddp,zer0"), "unknown engine 'zer0': did you mean 'zero'?"),
        (("--cases", "gpt-14mb"), "unknown case 'gpt-14mb': did you mean 'gpt-14m'?"),
        (("--ranks", "1"), "expected 2 to 64 ranks"),
        (("--network", "fast"), "'fast' is not a rate"),
        (("--variant", "bucket_sise=1"), "DistributedDataParallelConfig has no bucket_sise"),
        (("--variant", "bucket_size=-1"), "bucket_size=-1: expected a positive number"),
    ],
)
def test_what_it_does_not_know_is_refused_before_anything_runs(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(benchmark, ["--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2, done.output
    assert complaint in done.stderr
    assert not (tmp_path / "out").exists()


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


def test_a_difference_on_another_rank_than_the_first_is_noticed() -> None:
    specs = [ENGINES["ddp"], ENGINES["ours"]]
    alone = {spec.name: [Alone(1, 1, 1, 1.0, None, None)] * 2 for spec in specs}
    measured = [timings(ddp=[4.0], ours=[4.0])[0], timings(ddp=[4.0], ours=[4.1])[0]]
    (line,) = Report({}, [summarise(CASES["tiny"], specs, 1, [measured], alone)]).disagreements()
    assert line.startswith("tiny on 2 ranks: ours trained to other losses than ddp")


def test_the_slowest_rank_makes_the_step_and_ratios_are_of_one_round() -> None:
    specs = [ENGINES["bound"], ENGINES["ddp"], ENGINES["ours"]]
    steps_ms = {"bound": ([1, 2], [2, 1]), "ddp": ([10, 20], [8, 40]), "ours": ([5, 9], [4, 10])}
    losses = {name: [1.0] for name in steps_ms}
    ranks = [
        Timing(
            1.0,
            {name: [Block(ms, 2.0 + rank, ms / 2, 0.5 + rank) for ms in both[rank]] for name, both in steps_ms.items()},
            losses,
        )
        for rank in range(2)
    ]
    alone = {spec.name: [Alone(1, None, 1, 1.0, None, None), Alone(3, None, 2, 2.0, None, 7.0)] for spec in specs}
    ours = summarise(CASES["tiny"], specs, 1, [ranks], alone).engines[2]
    assert ours.step_ms.samples == [5, 10]
    assert ours.ratio.samples == [5 / 10, 10 / 40]
    assert ours.over_bound_ms == Spread(5.5, 4.25, 6.75, [3, 8])
    assert ours.cpu_ms.samples == [2.5, 2.5]
    assert (ours.tensor_bytes, ours.heap_bytes, ours.rss_bytes) == (3, None, 2)
    assert (ours.received_bytes, ours.reported_wait_ms) == (1.5, 7.0)


def test_every_engine_takes_every_place_and_follows_several_others() -> None:
    names = ["a", "b", "c", "d"]
    rounds = [order_of_round(names, number) for number in range(8)]
    for place in range(4):
        assert sorted(order[place] for order in rounds) == sorted(names * 2)
    pairs = {pair for order in rounds for pair in itertools.pairwise(order)}
    assert all(len({before for before, after in pairs if after == name}) >= 2 for name in names)


@pytest.mark.fresh
@needs_namespaces
def test_namespaces_end_with_the_block_and_with_the_process() -> None:
    with shaped_network(2, "1gbit") as (namespaces, _):
        assert len({os.stat(path).st_ino for path in [*namespaces, "/proc/self/ns/net"]}) == 3
    assert not any(path.exists() for path in namespaces)

    code = (
        "import benchmarks.network as network, time\n"
        "with network.shaped_network(2, '1gbit') as (namespaces, _):\n"
        "    print(*namespaces, flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = [Path(path) for path in process.stdout.readline().split()]
        assert len(held) == 2
        assert all(path.exists() for path in held)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(path.exists() for path in held):
        assert time.monotonic() < deadline, "the namespaces outlived the process that made them"
        time.sleep(0.02)


def test_a_network_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bin_without_tc = tmp_path / "bin"
    bin_without_tc.mkdir()
    for name in ("ip", "unshare", "nsenter", "sysctl"):
        (bin_without_tc / name).symlink_to(shutil.which("true") or "/bin/true")
    monkeypatch.setenv("PATH", str(bin_without_tc))
    done = CliRunner().invoke(benchmark, ["--network", "1gbit"])
    assert done.exit_code == 2
    assert "--network needs tc (packages iproute2" in done.stderr


@pytest.mark.parametrize(
    ("available_gb", "expected"),
    [
        (80, [["ddp", "bound", "ours", "zero"]]),
        (36, [["ddp", "bound", "ours"], ["ddp", "bound", "zero"]]),
        (20, None),
    ],
)
def test_engines_share_processes_as_far_as_memory_goes(
    available_gb: int, expected: list[list[str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks each engine keeps 4 GB, and needs one more in a step, one engine at a time."""
    monkeypatch.setattr(cli, "_available_bytes", lambda: int(available_gb * 1e9))
    specs = [ENGINES[name] for name in ("ddp", "bound", "ours", "zero")]
    one = Alone(0, int(4e9), int(5e9), 0.0, None, None)
    groups = cli._groups_that_fit(specs, {spec.name: [one, one] for spec in specs}, 2)
    assert (groups and [[spec.name for spec in group] for group in groups]) == expected


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
