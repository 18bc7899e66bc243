"""A profile taken apart, and ``megastrategy plan`` with times: made-up records, a real one, and wrong command lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import Event, EventKind, ParamSpec, build_layout
from megastrategy.tools.commands import root
from megastrategy.tools.plan.links import describe_link, parse_flops, parse_link
from megastrategy.tools.plan.one_step import MeasuredStep, ModelPlan
from megastrategy.tools.plan.recorded_work import ProfileError, measure, read_profile
from megastrategy.tools.plan.simulator import Link, Processor
from megastrategy.tools.plan.steps import Network, simulate_step
from megastrategy.tools.plan.timing import of_operations, of_profile, predict
from megastrategy.tools.profiling import Recorder
from megastrategy.tools.recorded_model import RecordedModel
from megastrategy.tools.timeline import ModelEvents, RankEvents
from tests.support.ranks import run_ranks

MS = 1_000_000
CONFIG = DistributedDataParallelConfig(bucket_size=1024, find_unused_parameters=False)
SPECS = [ParamSpec(str(n), (numel,), (1,), torch.float32, torch.float32) for n, numel in enumerate([4096, 1024])]
# Kind, index, time, processor time of the training thread and of all others: ms. Gradients come in the reverse of
# registration, so bucket 0 is the small one. A reduction ran when its end says.
STEP = [
    ("forward_start", 1, 0, 0, 0),
    ("forward_end", 1, 22, 20, 0),
    ("backward_start", 0, 24, 21, 0),
    ("reduce_start", 0, 40, 31, 0),
    ("backward_end", 1, 80, 61, 1),
    ("step_start", 0, 83, 63, 1),
    ("gather_start", 1, 92, 72, 1),
    ("gather_start", 0, 96, 75, 1),
    ("step_end", 0, 96, 75, 1),
    ("gather_end", 0, 104, 75, 2),
]
PERIOD_MS, OWN_MS, OTHERS_MS = 110, 79, 2
READY = [(1, 38, 31), (0, 76, 61)]
# 0.5 ms a hop and 1 kB a millisecond: this rank sends a half of 2 kB and 8 kB.
RAN_MS = [0.5 + 2.048, 0.5 + 8.192]


def profile(rank: int, num_steps: int = 4, *, late_ms: float = 0.0, device: str = "cpu") -> RankEvents:
    """Rank ``rank`` begins its collectives ``late_ms`` before the other, and waits inside them."""
    events, cpu_ns, ready = [], [], []
    for number in range(num_steps + 1):
        wall, own, others = (number * each for each in (PERIOD_MS, OWN_MS, OTHERS_MS))
        for kind, index, at, own_at, others_at in STEP[: len(STEP) if number < num_steps else 1]:
            events.append(Event(EventKind(kind), index, round((wall + at) * MS)))
            cpu_ns.append((round((own + own_at) * MS), round((own + own_at + others + others_at) * MS)))
            # Before the backward ends both buckets have been waited for; bucket 1 is launched there.
            if kind == "backward_end":
                begun = wall + at - 20
                ran = [(round((begun - late_ms) * MS), round((begun + length) * MS)) for length in RAN_MS]
                told = [("reduce_start", 1, None), ("reduce_end", 0, ran[0]), ("reduce_end", 1, ran[1])]
                events[-1:-1] = [Event(EventKind(name), b, round((wall + at) * MS), span) for name, b, span in told]
                cpu_ns[-1:-1] = [cpu_ns[-1]] * 3
        if number < num_steps:
            ready += [(i, round((wall + at) * MS), round((own + own_at) * MS)) for i, at, own_at in READY]
    recorded = RecordedModel(SPECS, CONFIG, 2, device, "host", [rank], 1, cpu_ns, ready)
    return RankEvents(rank, [ModelEvents(events, recorded=recorded)])


def test_a_profile_is_taken_apart_into_a_ranks_own_time() -> None:
    measured = measure([profile(0), profile(1, late_ms=5.0)])
    work = measured.work
    assert (work.num_microbatches, work.forward_ms, work.loss_ms, work.backward_ms) == (1, 20, 1, 40)
    assert (work.before_step_ms, work.other_ms) == (2, 4)
    # 10 of 40 ms into backward the small one is there; the other at its end
    assert work.ready == {1: 0.25, 0: 1.0}
    # 9 ms for half of 4096 elements, 3 for half of 1024: 4 us an element and 1 ms a bucket
    assert work.step_ms_per_numel == pytest.approx(6 / 1536)
    assert work.step_ms_per_bucket == pytest.approx(1.0)
    assert measured.step_ms == PERIOD_MS
    # On the rank that began last a collective takes what the link needs.
    assert measured.link is not None
    assert (measured.link.bytes_per_ms, measured.link.hop_ms) == pytest.approx((1000, 0.5))
    # 2 ms a step of others' threads, for two reductions and two gathers of 5120 elements, half of them sent.
    assert measured.processor.cores == 1.0, "of two, each rank has one"
    assert measured.processor.ms_per_byte == pytest.approx(2 / 20480)


def test_other_ranks_and_links_are_simulated_from_it() -> None:
    measured = measure([profile(0), profile(1)])
    link = Link(2000.0, 0.25)
    training = of_profile(measured, link, None)
    [two, five] = predict(training, [2, 5])
    expected = simulate_step(measured.work, CONFIG, 5, Network(link), measured.processor)
    assert five.step == expected
    assert two.step is not None
    assert "profiled on 2 rank(s): 110.0 ms" in training.how
    instances = dataclasses.replace(training, config=dataclasses.replace(CONFIG, num_distributed_optimizer_instances=2))
    [three] = predict(instances, [3])
    assert three.step is None
    assert "does not divide the 3" in three.advice


def test_what_a_profile_lacks_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="make them with megastrategy profile --out"):
        read_profile(tmp_path)
    (tmp_path / "events.rank0.json").write_text("{}")
    with pytest.raises(ProfileError, match="run megastrategy profile again"):
        read_profile(tmp_path)
    without = RankEvents(0, [dataclasses.replace(profile(0).models[0], recorded=None)])
    with pytest.raises(ProfileError, match="no whole step was recorded on every rank"):
        measure([without])
    for unread in ("no json", "[1, 2]", '{"rank": 0, "models": [{}]}'):
        (tmp_path / "events.rank0.json").write_text(unread)
        with pytest.raises(ProfileError, match="run megastrategy profile again"):
            read_profile(tmp_path)
    (tmp_path / "events.rank1.json").mkdir()
    (tmp_path / "events.rank0.json").write_text(json.dumps(profile(0).to_json()))
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        read_profile(tmp_path)
    (tmp_path / "events.rank1.json").rmdir()
    assert read_profile(tmp_path) == [RankEvents.from_json(json.loads(json.dumps(profile(0).to_json())))]


@pytest.mark.parametrize("options", [{}, {"overlap_param_gather": "forward"}, {"grad_buffer": "pooled"}], ids=str)
def test_a_real_training_is_recorded_with_all_that_it_takes(options: dict[str, Any]) -> None:
    """Every gradient's arrival in order, every byte, and a rank's work: on two real ranks, as threads."""

    def run(rank: int, group: ProcessGroup) -> RankEvents:
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        done: list[bool] = []
        recorder = Recorder(1, 4, lambda: done.append(True))
        config = DistributedDataParallelConfig(bucket_size=4096, **options)
        model = DistributedDataParallel(net, config, group, listener=recorder)
        recorder.follow(model)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().sum().backward()
            optimizer.step()
        model.finish_param_gather()
        assert done == [True]
        model.close()
        return RankEvents(rank, [recorder.take()])

    ranks = run_ranks(2, run)
    measured = measure(ranks)
    work = measured.work
    assert sorted(work.ready, key=lambda index: work.ready[index]) == [5, 4, 3, 2, 1, 0]
    assert all(0 <= share <= 1 for share in work.ready.values())
    assert work.num_microbatches == 1
    assert min(work.forward_ms, work.backward_ms, work.step_ms_per_numel + work.step_ms_per_bucket) > 0
    assert measured.link is not None
    assert measured.processor.ms_per_byte >= 0
    [model] = ranks[0].models
    assert model.recorded is not None
    assert model.recorded.config == DistributedDataParallelConfig(bucket_size=4096, **options)
    assert model.recorded.dp_size == 2
    sent = simulate_step(work, model.recorded.config, 2, Network(measured.link), Processor()).sent_bytes
    assert sent == 2 * 6 * 4096 * 4 / 2 + 6, "and a byte a parameter, of what was used"
    assert measured.simulated_ms is not None


# --- operations ------------------------------------------------------------------------------------------------------


def counted(*, microbatches: int) -> MeasuredStep:
    """Forwards of 2e9 operations, backwards of 4e9 whose small parameter is ready after a quarter."""
    flops, now = [], 0.0
    for _ in range(microbatches):
        flops += [(EventKind.FORWARD_START, 1, now), (EventKind.BACKWARD_START, 0, now + 2e9)]
        flops += [(EventKind.GRAD_READY, 1, now + 3e9), (EventKind.GRAD_READY, 0, now + 6e9)]
        now += 6e9
        flops.append((EventKind.BACKWARD_END, 1, now))
    model = ModelPlan(build_layout(SPECS, CONFIG, 2), CONFIG, {0: 2, 1: 2}, {}, 0, 0, 0)
    return MeasuredStep(2, (model,), 0, 0, 0, 0, computes=False, num_computed=0, flops=tuple(flops))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_operations_are_an_estimate_of_a_ranks_time(microbatches: int) -> None:
    training = of_operations(counted(microbatches=microbatches), 1e12, Link(1e6), None)
    work = training.work
    assert (work.num_microbatches, work.forward_ms, work.backward_ms) == pytest.approx((microbatches, 2.0, 4.0))
    assert work.ready == pytest.approx({1: 0.25, 0: 1.0})
    assert "an estimate from 6e+09 operations a microbatch" in training.how
    nothing = dataclasses.replace(counted(microbatches=1), flops=())
    with pytest.raises(ValueError, match="no products or convolutions"):
        of_operations(nothing, 1e12, Link(1e6), None)


# --- the command -----------------------------------------------------------------------------------------------------


def test_rates_are_read_with_their_units() -> None:
    assert parse_link("25GB/s,5us") == Link(25e6, 0.005)
    assert parse_link("1Gbit/s") == Link(125e3)
    assert parse_link("400 Gbit/s, 2 ms") == Link(50e6, 2.0)
    assert parse_flops("200TFLOPS") == 2e14
    assert describe_link(Link(25e6, 0.005)) == "25 GB/s a rank and 5 us a hop"
    for wrong in ("25", "25GB", "0GB/s", "25GB/s,5", "25GB/s;5us"):
        with pytest.raises(ValueError, match="such as 25GB/s,5us"):
            parse_link(wrong)
    for wrong in ("200", "0TFLOPS", "200TB/s"):
        with pytest.raises(ValueError, match="such as 200TFLOPS"):
            parse_flops(wrong)


def test_the_command_tells_times_from_a_profile_alone(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"events.rank{rank}.json").write_text(json.dumps(profile(rank).to_json()))
    options = ["plan", "--profile", str(tmp_path), "--ranks", "1,2,4096", "--link", "25GB/s,5us"]
    done = CliRunner().invoke(root, [*options, "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)["time"]
    assert [row["dp_size"] for row in content["ranks"]] == [1, 2, 4096]
    assert content["ranks"][0]["exposed_gradients_ms"] == 0.0
    assert content["ranks"][0]["share_of_one_rank"] == 1.0
    table = CliRunner().invoke(root, options)
    assert "Milliseconds of a step, simulated" in table.output
    assert "25 GB/s a rank and 5 us a hop" in table.output
    assert "activations" not in table.output, "there is no script"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--link", "fast", "x.py"], "such as 25GB/s,5us"),
        (["--flops", "1", "--link", "1GB/s", "x.py"], "such as 200TFLOPS"),
        (["--flops", "1TFLOPS", "x.py"], "--flops needs --link"),
        (["--link", "1GB/s", "x.py"], "--link needs what a rank computes"),
        (["--node-link", "1GB/s", "--profile", ".", "x.py"], "--node-link needs --link"),
        (["--flops", "1TFLOPS", "--link", "1GB/s", "--profile", "."], "choose one"),
        ([], "Missing argument 'SCRIPT'"),
        (["--profile", "nowhere"], "does not exist"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_runs(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(root, ["plan", *arguments])
    assert result.exit_code == 2
    assert says in result.output
