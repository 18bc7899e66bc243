"""The study of partitions: its measurements, its metric, and the pruned search against trying everything."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import megastrategy
from megastrategy.tools.commands import root
from megastrategy.tools.plan.cards import Card, parse_cards
from megastrategy.tools.plan.layers import measure_layers
from megastrategy.tools.plan.partitions import NothingFitsError
from megastrategy.tools.plan.schedule import StageTimes, actions, ends_ms, step_ms
from megastrategy.tools.plan.search import Candidate, Question, evaluate, search
from megastrategy.tools.plan.stage_memory import Layer, stages_from
from tests.tools.planned_script import counted_peak
from tests.tools.test_plan_pipelines import loss

# The study's measurements: cards by stage, split, ms an iteration, peak GB, and an iteration's milliseconds of forward,
# backward and synchronisation; the first eight with 4 microbatches, the last three with 8.
ROWS = [
    ("2080 3090 3090 2080ti", "9-22-6-1", 1542, "2.92 15.03 9.60 1.93",
     "134 447 390 264", "160 517 467 275", "177 207 0 0"),
    ("2080 3090 3090 2080ti", "10-21-6-1", 1531, "3.23 15.28 9.60 1.93",
     "148 440 390 264", "174 510 467 275", "195 193 0 0"),
    ("2080 3090 3090 2080ti", "11-20-6-1", 1549, "3.54 15.53 9.60 1.93",
     "158 432 390 264", "192 504 467 275", "217 181 0 0"),
    ("2080 3090 2080ti 3090", "10-21-2-5", 1621, "3.23 15.28 3.40 6.66",
     "148 445 321 395", "175 516 348 447", "200 192 0 0"),
    ("2080 3090 2080ti 3090", "10-21-1-6", 1652, "3.23 15.28 3.40 6.66",
     "148 445 161 445", "175 510 163 524", "200 192 0 0"),
    ("2080ti 3090 3090 2080", "9-22-6-1", 1591, "2.92 15.03 9.60 1.93",
     "132 449 390 317", "160 518 467 320", "188 205 0 0"),
    ("2080ti 3090 3090 2080", "10-21-6-1", 1598, "3.23 15.28 9.60 1.93",
     "148 442 390 264", "150 510 467 314", "203 191 0 0"),
    ("3090 3090 2080ti 2080", "28-5-3-2", 2120, "13.89 10.03 5.07 3.23",
     "426 515 482 507", "454 472 503 494", "290 0 0 0"),
    ("2080 3090 3090 2080ti", "26-5-5-2", 2401, "1.26 11.44 10.21 5.36",
     "770 535 503 533", "60 757 730 804", "60 484 446 280"),
    ("2080 3090 3090 2080ti", "24-7-5-2", 2582, "4.42 11.76 10.21 5.36",
     "770 542 500 570", "695 775 730 825", "250 510 435 280"),
    ("2080ti 3090 3090 2080", "24-7-6-1", 2597, "5.03 11.44 12.24 3.33",
     "720 546 595 430", "630 775 875 600", "150 510 515 285"),
]  # fmt: skip


def simulated() -> list[float]:
    found = []
    for number, row in enumerate(ROWS):
        m = 4 if number < 8 else 8
        forward, backward, sync = (list(map(float, text.split())) for text in row[4:])
        ends = ends_ms([StageTimes(f / m, b / m) for f, b in zip(forward, backward, strict=True)], m)
        found.append(max(map(sum, zip(ends, sync, strict=True))))  # it follows a card's last backward
    return found


def spearman(xs: list[float], ys: list[float]) -> float:
    """Without ties: one minus six times the squares of what ranks differ by, over n (n^2 - 1)."""
    n = len(xs)
    ranks = [[sorted(values).index(value) for value in values] for values in (xs, ys)]
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1))


def test_study_steps_are_simulated_within_6_percent() -> None:
    """All eleven, after one fitted constant for times that it did not print (sends between cards, the optimizer's
    step); and in their order."""
    times, measured = simulated(), [float(row[2]) for row in ROWS]

    def worst(constant: int) -> float:
        return max(abs((time + constant) / ms - 1) for time, ms in zip(times, measured, strict=True))

    assert min(map(worst, range(300))) < 0.06
    assert spearman(times, measured) > 0.9
    assert spearman(times[:8], measured[:8]) > 0.9


@pytest.mark.parametrize("num_cards", [1, 2, 4])
def test_equal_stages_take_the_papers_time(num_cards: int) -> None:
    """(m + p - 1)(f + b)."""
    f, b, m = 2.0, 3.0, 8
    for schedule in ("1f1b", "gpipe"):
        assert step_ms([StageTimes(f, b)] * num_cards, m, schedule) == pytest.approx((m + num_cards - 1) * (f + b))


def test_stage_holds_no_more_than_it_may() -> None:
    for schedule in ("1f1b", "gpipe"):
        for stage in range(4):
            order = actions(schedule, stage, 4, 8)
            assert len(set(order)) == len(order) == 2 * 8
            assert {action.stage for action in order} == {stage}
            held = itertools.accumulate(1 if action.is_forward else -1 for action in order)
            assert max(held) <= {"1f1b": 4 - stage, "gpipe": 8}[schedule]


def random_question(seed: int, **options: Any) -> Question:
    draw = random.Random(seed)
    layers = [
        Layer(
            name=f"{i}",
            forward_flops=draw.uniform(1, 9) * 1e9,
            backward_flops=draw.choice([0, 1, 2]) * 1e9,
            fixed_bytes=draw.randint(1, 9),
            saved_bytes=draw.randint(0, 4),
            forward_peak_bytes=draw.randint(0, 5),
            backward_peak_bytes=draw.randint(0, 5),
            input_bytes=draw.randint(0, 2),
            output_bytes=draw.randint(0, 2),
            saves_output=draw.choice([True, False]),
            input_needs_grad=draw.choice([True, False]),
        )
        for i in range(9)
    ]
    cards = [Card(name, memory, flops * 1e12) for name, memory, flops in [("a", 40, 3), ("a", 40, 3), ("b", 25, 1)]]
    return Question(layers, cards, draw.randint(1, 6), **options)


def by_brute_force(question: Question, objective: str) -> Candidate | None:
    fitting = []
    for order in set(itertools.permutations(question.cards)):
        for cuts in itertools.combinations(question.cuts, len(order) - 1):
            split = [b - a for a, b in itertools.pairwise([0, *cuts, len(question.layers)])]
            found = evaluate(question, order, split)
            if all(p <= c.memory_bytes * (1 - question.slack) for p, c in zip(found.peak_bytes, order, strict=True)):
                fitting.append(found)
    key = (lambda c: c.step_ms) if objective == "time" else (lambda c: c.waste)
    return min(fitting, key=key, default=None)


@pytest.mark.parametrize(
    ("objective", "options"),
    [("time", {}), ("waste", {"schedule": "gpipe"}), ("time", {"keep_together": [(2, 4)]}), ("waste", {"slack": 0.2})],
    ids=str,
)
def test_pruned_search_equals_brute_force(objective: Any, options: dict[str, Any]) -> None:
    """On random questions."""
    fits = 0
    for seed in range(25):
        question = random_question(seed, **options)
        found, expected = search(question, objective), by_brute_force(question, objective)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            fits += 1
            values = [(c.step_ms if objective == "time" else c.waste) for c in (found, expected)]
            assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert 0 < fits < 25, "some fit, and some do not"


def blocks() -> tuple[list[nn.Module], torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)]
    return layers, torch.randn(8, 64, 128)


@pytest.mark.parametrize("frozen", [[], [0, 1], [1, 2]], ids=["none", "prefix", "middle"])
def test_layers_are_measured_as_a_stage_allocates(frozen: list[int]) -> None:
    """The peak of one microbatch's forward and backward through all layers, as the allocator counts it, within 1 %;
    gradients apart, which are no temporaries."""
    layers, x = blocks()
    measured = measure_layers(layers, x, frozen)
    assert all(p.requires_grad and p.grad is None for layer in layers for p in layer.parameters()), "left as they were"
    for number in frozen:
        layers[number].requires_grad_(False)
    stage = nn.Sequential(*layers)
    # Made before, so that they are not counted; autograd then adds to them.
    for param in stage.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None

    def step() -> None:
        out = stage(x)  # held, as a schedule holds it
        loss(out, x).backward()

    peak = counted_peak(step)
    *_, whole = stages_from(measured, 0)
    # The input was there before.
    assert whole.working == pytest.approx(peak, rel=0.01)
    if frozen == [0, 1]:
        assert [layer.backward_flops for layer in measured[:2]] == [0.0, 0.0]
        assert [layer.saved_bytes for layer in measured[:2]] == [0, 0]
    if frozen == [1, 2]:  # of a linear layer's two products in backward one is left
        assert 0.4 < measured[1].backward_flops / measured[3].backward_flops < 0.7


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([nn.Linear(8, 8), "layer"], "layer 1 is a str: expected an nn.Module"),
        ([nn.Linear(9, 9)], r"layer 0: Linear fails with the sample, float32 of \(2, 8\): RuntimeError: mat1 and mat2"),
        ([nn.Linear(8, 9), nn.Linear(8, 8)], r"fails with what layer 0 returns, float32 of \(2, 9\)"),
        ([nn.LSTM(8, 8), nn.Linear(8, 8)], "layer 0: LSTM returns tuple: stages send one tensor"),
    ],
    ids=["no module", "the batch", "the layer before", "tuple"],
)
def test_unmeasurable_layer_is_named(layers: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        measure_layers(layers, torch.ones(2, 8))
    assert "\n" not in str(error.value)


def test_plan_says_split_order_and_reason() -> None:
    layers, x = blocks()
    devices = parse_cards("big=1GB@20TFLOPS:1,small=1GB@10TFLOPS:1")
    plan = megastrategy.plan(layers, x, devices=devices, microbatches=4, keep_together=[(0, 1)])
    # twice as fast, so it takes two and not one of three equal parts: 2 + 1 + 1 are not cut otherwise
    assert sorted(plan.split_spec) in ([1, 3], [2, 2])
    assert sum(plan.split_spec) == 4
    assert sorted(plan.stage_order) == ["big", "small"]
    assert dict(zip(plan.stage_order, plan.split_spec, strict=True))["big"] >= 2
    assert "best of 4 orders and partitions" in plan.why
    assert all(0 < nbytes < 10**9 for nbytes in plan.memory)
    with pytest.raises(NothingFitsError, match="smaller microbatches"):
        megastrategy.plan(layers, x, devices=parse_cards("tiny=1MB@1TFLOPS:2"), microbatches=4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep_together": [(2, 9)]}, "layers from 0 to 3"),
        ({"microbatches": 0}, "at least one"),
        ({"objective": "beauty"}, "'time' or 'waste'"),
        ({"slack": 1.0}, "from 0 to below 1"),
        ({"schedule": "interleaved"}, "'1f1b' or 'gpipe'"),
        ({"keep_together": [(0, 3)]}, "for each card"),
    ],
)
def test_wrong_option_is_named(wrong: dict[str, Any], says: str) -> None:
    layers, x = blocks()
    options = {"devices": parse_cards("3090:2"), "microbatches": 2, **wrong}
    with pytest.raises(ValueError, match=says):
        megastrategy.plan(layers, x, **options)


def test_given_split_is_compared_with_the_fastest() -> None:
    layers, x = blocks()
    devices = parse_cards("big=1GB@20TFLOPS:1,small=1GB@10TFLOPS:1")
    options = {"devices": devices, "microbatches": 4}
    best = megastrategy.plan(layers, x, **options)
    given = megastrategy.plan(layers, x, split_spec=[1, 3], **options)
    assert (given.split_spec, given.stage_order) == ((1, 3), ("big", "small"))
    assert given.step_time > best.step_time
    assert f"the fastest is {'-'.join(map(str, best.split_spec))}" in given.why
    full = megastrategy.plan(layers, x, split_spec=[2, 2], devices=parse_cards("tiny=1MB@1TFLOPS:2"), microbatches=4)
    assert "does not fit the memory of tiny, tiny" in full.why
    for split, says in [([1, 2], "has 3 layers: expected 4"), ([4, 0], "one a stage"), ([2, 1, 1], "3 stages, for 2")]:
        with pytest.raises(ValueError, match=says):
            megastrategy.plan(layers, x, split_spec=split, **options)


def test_command_cuts_layers_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_project.py").write_text(
        "import torch\nlayers = [torch.nn.Linear(8, 8) for _ in range(4)]\ndef sample():\n    return torch.ones(2, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    options = ["plan", "--cards", "3090:1,2080:1", "--microbatches", "2"]
    done = CliRunner().invoke(root, [*options, "--batch", "planned_project:sample", "--json", "planned_project:layers"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert sum(found["split_spec"]) == 4
    assert sorted(found["stage_order"]) == ["2080", "3090"]
    sample = ["--batch", "planned_project:sample"]
    more = ["--schedule", "gpipe", "--slack", "0.2", "--frozen", "0-1,3"]
    done = CliRunner().invoke(root, [*options, *sample, *more, "--json", "planned_project:layers"])
    assert done.exit_code == 0, done.output
    frozen = json.loads(done.output)
    # A frozen prefix has no backward.
    assert sum(frozen["memory"]) < sum(found["memory"])
    given = CliRunner().invoke(root, [*options, *sample, "--split", "1-3", "--json", "planned_project:layers"])
    assert json.loads(given.output)["split_spec"] == [1, 3]
    for wrong, code, says in [
        (["--json", "--split", "1-2"], 1, "has 3 layers: expected 4"),
        (["--split", "many"], 2, "such as 9-22-6-1"),
        (["--frozen", "7"], 1, "layers from 0 to 3"),
        (["--slack", "1"], 1, "from 0 to below 1"),
        (["--frozen", "3-1"], 2, "'3-1': expected the first and the last layer"),
        (["--ranks", "2"], 2, "--cards takes no --ranks"),
    ]:
        done = CliRunner().invoke(root, [*options, *sample, *wrong, "planned_project:layers"])
        assert done.exit_code == code, done.output
        assert says in done.output
    table = CliRunner().invoke(root, [*options, *sample, "planned_project:layers"])
    assert "ms a step" in table.output
    assert "T = " in table.output
    for wrong, says in [
        (["planned_project:layers"], "needs --batch"),
        (["--batch", "planned_project:nothing", "planned_project:layers"], "has no nothing"),
        (["--batch", "planned_project:sample", "nowhere:layers"], "no module nowhere"),
        (["--batch", "planned_project:sample", "--keep-together", "2", "planned_project:layers"], "such as 24-25"),
        (["--batch", "planned_project:sample", "planned_project:sample"], "expected a list of layers"),
    ]:
        done = CliRunner().invoke(root, [*options, *wrong])
        assert done.exit_code == 2
        assert says in done.output


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("def layers():\n    raise RuntimeError('no data\\ntoday')", "layers", r"RuntimeError: no data \(.*line 2\)"),
        ("def layers(x):\n    return x", "layers", r"layers\(\) fails with TypeError: layers\(\) missing 1"),
        ("import sys\nsys.exit(3)", "layers", r"fails with SystemExit: 3 \(.*line 2\)"),
        ("layers = []", "layers", "0 layers"),
        ("layers = 3", "others", "has no others"),
        ("layers = 3", "", "expected module:name"),
    ],
)
def test_failing_module_is_told_in_one_line(
    text: str, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"failing_project_{abs(hash((text, name)))}"
    (tmp_path / f"{module}.py").write_text(f"{text}\n")
    (tmp_path / f"batch_of_{module}.py").write_text("import torch\nsample = torch.ones(2, 8)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    options = ["plan", "--cards", "3090:1,2080:1", "--batch", f"batch_of_{module}:sample"]
    done = CliRunner().invoke(root, [*options, f"{module}:{name}"])
    assert done.exit_code in (1, 2)
    assert done.stdout == "", "nothing for a program to read"
    [line] = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert re.search(says, line)
    for wrong, hint in [(f"{module}.py:x", f"write {module}:x"), (".:x", "module:name"), (":x", "module:name")]:
        assert hint in CliRunner().invoke(root, [*options, wrong]).stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("9090", "is not known"),
        ("3090:0", "how many"),
        ("a=1GB", "how many"),
        ("a=-1GB@1TFLOPS", "such as 80GiB"),
        ("a=1GB@0TFLOPS", "such as 200TFLOPS"),
    ],
)
def test_wrong_card_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_cards(text)


# --- layers of every kind ---------------------------------------------------------------------------------------------


CARDS = parse_cards("mine=8GB@1TFLOPS:2")


def test_plan_changes_no_layer_sample_or_generator() -> None:
    torch.manual_seed(0)
    layers = [nn.ReLU(inplace=True), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Conv2d(8, 8, 1)]
    sample = torch.randn(4, 3, 8, 8)
    values = [tensor.clone() for layer in layers for tensor in layer.state_dict().values()]
    given, drawn = sample.clone(), torch.get_rng_state()
    megastrategy.plan(layers, sample, devices=CARDS, microbatches=4)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(sample, given)
    after = [tensor for layer in layers for tensor in layer.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(values, after, strict=True))


def mlp(*, parameters: int) -> list[nn.Module]:
    return [module for _ in range(parameters) for module in (nn.Linear(8, 8), nn.ReLU(), nn.ReLU())]


def test_stage_without_parameters_is_refused() -> None:
    plan = megastrategy.plan(mlp(parameters=2), torch.ones(2, 8), devices=CARDS, microbatches=4)
    assert plan.split_spec in ((1, 5), (2, 4), (3, 3))
    with pytest.raises(ValueError, match=r"stage 1 without parameters \(4: ReLU, 5: ReLU\), for which torch has no"):
        megastrategy.plan(mlp(parameters=2), torch.ones(2, 8), devices=CARDS, microbatches=4, split_spec=[4, 2])
    with pytest.raises(ValueError, match="1 of 3 layers have parameters, for 2 cards: expected one in each stage"):
        megastrategy.plan(mlp(parameters=1), torch.ones(2, 8), devices=CARDS, microbatches=4)


def test_too_few_microbatches_are_refused() -> None:
    layers, x, cards = mlp(parameters=3), torch.ones(2, 8), parse_cards("mine=8GB@1TFLOPS:3")
    with pytest.raises(ValueError, match="2 microbatches for 3 cards: expected at least as many with '1f1b'"):
        megastrategy.plan(layers, x, devices=cards, microbatches=2)
    assert sum(megastrategy.plan(layers, x, devices=cards, microbatches=2, schedule="gpipe").split_spec) == len(layers)


class Tied(nn.Module):
    """One weight twice, and a buffer to look up in."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
        self.down.weight = self.up.weight
        self.table = nn.Embedding(4, 512)
        self.register_buffer("places", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x + self.table(self.places))).relu()
        return result


def test_layers_on_meta_are_planned() -> None:
    def made() -> list[nn.Module]:
        return [Tied(), nn.BatchNorm1d(4), Tied().requires_grad_(False), Tied()]

    with torch.device("meta"):
        on_meta = made()
    x = torch.randn(8, 4, 512)
    assert measure_layers(on_meta, x) == measure_layers(made(), x)
    assert all(tensor.is_meta for layer in on_meta for tensor in (*layer.parameters(), *layer.buffers()))


@pytest.mark.parametrize(
    ("sample", "devices", "says"),
    [
        (torch.ones(2, 8, device="meta"), CARDS, "the sample is on meta: expected a tensor with values"),
        (torch.ones(2, 8), ["3090", "2080"], "devices has '3090': expected cards, such as parse_cards"),
    ],
    ids=["on meta", "names"],
)
def test_wrong_sample_or_card_is_named(sample: Any, devices: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        megastrategy.plan(mlp(parameters=2), sample, devices=devices, microbatches=4)
