"""``megastrategy plan``: the bytes that it says, against real runs and the allocator's own count."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import HashStore, ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import make_collectives
from megastrategy.core.collectives.fake import FakeCollectives
from megastrategy.tools.commands import root
from megastrategy.tools.plan.live_bytes import LiveBytes
from megastrategy.tools.plan.memory import rank_memory
from megastrategy.tools.plan.one_step import MeasuredStep, OneStep
from megastrategy.tools.plan.report import memory_tables
from megastrategy.tools.plan.scripts import PlanError, measure_script
from tests.core.properties.test_memory import bytes_of, wide
from tests.support.data_path import memory_of
from tests.support.ranks import run_ranks, with_instances
from tests.support.scripts import run_script

SCRIPT = Path(__file__).parent / "planned_script.py"


def measured(
    script: Path, *arguments: str, cwd: Path, size: int, way: str = "shapes", before: tuple[str, ...] = ()
) -> MeasuredStep:
    """The step of a script on rank 0 of ``size``, measured with values or from shapes only."""
    file = cwd / f"measured {way}"
    program = ("megastrategy.tools.plan.one_step", str(size), str(file), way, *before)
    done = run_script(script, *arguments, cwd=cwd, ranks=1, before=program)
    assert file.exists(), done.stderr
    step = pickle.loads(file.read_bytes())
    assert isinstance(step, MeasuredStep), step
    return step


def fake_group(size: int) -> ProcessGroup:
    """Rank 0 of ``size``, in a group that no registry of torch.distributed knows."""
    group = ProcessGroup(HashStore(), 0, size)
    backend = FakeProcessGroup._create_internal(0, size, FakeProcessGroup.Options())
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return group


def train(model: DistributedDataParallel, num_steps: int, dtype: torch.dtype) -> DistributedOptimizer:
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 100, dtype=dtype)).sum().backward()
        optimizer.step()
    return optimizer


def planned(size: int, config: DistributedDataParallelConfig, dtype: torch.dtype) -> MeasuredStep:
    """One step as rank 0 of ranks that do not exist."""

    class Watched(DistributedDataParallel):
        """Patched in place of everybody's."""

    step = OneStep(LiveBytes(computes=True), size)
    hook = step.install(lambda: None, Watched)
    try:
        collectives = make_collectives(fake_group(size), torch.device("cpu"))
        if (instances := config.num_distributed_optimizer_instances) > 1:
            collectives.instances[size // instances] = FakeCollectives(fake_group(size // instances))
        with step.live:
            train(Watched(wide(dtype), config, collectives=collectives), 1, dtype)
        return step.measured()
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("size", "dtype", "options"),
    [
        (1, torch.float32, {}),
        (3, torch.bfloat16, {"use_distributed_optimizer": False}),
        (2, torch.bfloat16, {"grad_buffer": "pooled"}),
        (3, torch.bfloat16, {"offload_optimizer_states": True}),
        (2, torch.bfloat16, {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}),
        (2, torch.float32, {"grad_wire_dtype": "bf16"}),
        (4, torch.float32, {"num_distributed_optimizer_instances": 2}),
    ],
    ids=str,
)
def test_states_equal_a_real_run_to_the_byte(size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Walked on rank 0 after two steps on gloo, against what one rank without peers was found to hold."""
    instances = options.get("num_distributed_optimizer_instances", 1)
    config = DistributedDataParallelConfig(bucket_size=5000, **options)

    def run(rank: int, group: ProcessGroup) -> tuple[int, int]:
        collectives = with_instances(group, instances) if instances > 1 else None
        model = DistributedDataParallel(wide(dtype), config, group, collectives=collectives)
        optimizer = train(model, 2, dtype)
        flats, grads = memory_of(model)
        on_host = model.layout.offloads_state  # of an accelerator: gradients in the dtype of main params, too
        grads += [] if on_host else [run.main.grad for run in optimizer._impl.runs if run.main.grad is not None]
        held = [*grads, *model.module.parameters(), *flats]
        state = optimizer.optimizer.state
        values = [value for values in state.values() for value in values.values()]
        held += [value for value in [*state, *values] if not on_host or value.dim() == 0]
        return bytes_of(held), bytes_of(grads)

    total, grads = run_ranks(size, run)[0]
    step = planned(size, config, dtype)
    memory = rank_memory(step)
    assert memory.fixed_bytes == total
    assert memory.grad_bytes == grads


def test_table_is_whole_in_80_columns() -> None:
    """A kind without a byte on any number of ranks has no row."""
    step = planned(2, DistributedDataParallelConfig(), torch.float32)
    numbers = [2**power for power in range(7)]
    steps = [dataclasses.replace(step, dp_size=number) for number in numbers]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*memory_tables(steps, 2**20))
    lines = console.export_text().splitlines()
    assert [line.split()[1:] for line in lines if line.startswith("ranks")] == [
        ["1", "2", "4", "8", "16"],
        ["32", "64"],
    ]
    rows = [line.partition("  ")[0] for line in lines if re.match(r"[a-z][a-z ]+   ", line)]
    assert rows == ["ranks", "weights", "gradients", "optimizer", "activations", "total", "left"] * 2


@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("conv", marks=pytest.mark.nightly), pytest.param("frozen", marks=pytest.mark.nightly)]
)
def test_temporaries_equal_the_allocators_count(model: str, tmp_path: Path) -> None:
    """The peak of forward and backward on two real ranks, within 1 % and the same with and without values. Kernels' own
    scratch is in the allocator's count, and is less than that."""
    real = run_script(SCRIPT, model, "--count", cwd=tmp_path)
    peaks = [int(found) for found in re.findall(r"peak (\d+)", real.stdout)]
    assert len(peaks) == 4, real.stderr
    found = {way: measured(SCRIPT, model, cwd=tmp_path, size=2, way=way) for way in ("values", "shapes")}
    assert found["values"].backward_peak_bytes == pytest.approx(max(peaks), rel=0.01)
    assert dataclasses.replace(found["shapes"], computes=True) == found["values"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("pass", "wrapped no model, so it does not train with megastrategy"),
        ("NO_STEP", "before its first optimizer step: .* one in 512"),
        ("LAUNCHED", "under megastrategy.launch those are wrapped that an Accelerator"),
    ],
)
def test_script_without_a_step_is_told_what_to_do(script: str, says: str, tmp_path: Path) -> None:
    text = (
        "import torch, torch.distributed as dist, megastrategy as m\n"
        "dist.init_process_group('gloo')\n"
        "m.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    )
    path, file = tmp_path / "script.py", tmp_path / "step"
    path.write_text(text if script == "NO_STEP" else "pass")
    program = ("megastrategy.tools.plan.one_step", "512", str(file), "shapes")
    launched = ("-m", "megastrategy.launch") if script == "LAUNCHED" else ()
    done = run_script(path, cwd=tmp_path, ranks=1, before=(*program, *launched))
    assert done.returncode == 0, done.stderr
    assert re.search(says, pickle.loads(file.read_bytes()))


def test_accelerator_is_planned_on_the_cpu(tmp_path: Path) -> None:
    """Without GPUs Accelerate makes no process group, except with ``cpu=True``: the planner sets it."""
    path = tmp_path / "script.py"
    path.write_text(
        "import torch, accelerate\n"
        "accelerator = accelerate.Accelerator()\n"
        "net = torch.nn.Linear(8, 8)\n"
        "net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters()))\n"
        "for _ in range(2):\n"
        "    accelerator.backward(net(torch.ones(4, 8)).sum())\n"
        "    optimizer.step()\n"
    )
    step = measured(path, cwd=tmp_path, size=8, before=("-m", "megastrategy.launch"))
    assert step.models[0].layout.dp_size == 8


UNREACHED = """
import torch, torch.distributed as dist, megastrategy as m

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.often, self.seldom = torch.nn.Linear(64, 64), torch.nn.Linear(64, 128)

    def forward(self, x):
        return self.seldom(x) if x.sum() > 1e30 else self.often(x)

def wrapped(kind):
    model = m.DistributedDataParallel(Experts().to(DTYPE), m.DistributedDataParallelConfig())
    return model, m.DistributedOptimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.1), model)

dist.init_process_group("gloo")
trained = [(every, *wrapped(kind)) for kind, every in OPTIMIZERS]
for step in range(1, 4):
    for every, model, optimizer in sorted(trained, key=lambda each: each[0]):
        if step % every == 0:
            optimizer.zero_grad()
            model(torch.ones(2, 64, dtype=DTYPE)).sum().backward()
            optimizer.step()
"""

UNREACHED_NAMES = {"often.weight", "often.bias", "seldom.weight", "seldom.bias"}
UNREACHED_NUMEL = 64 * 64 + 64 + 64 * 128 + 128


FIRST_OF_THREE_IS_SELDOM = [("Adam", 2), ("RMSprop", 1), ("Adam", 1)]
OTHER_CLASS = [("Adam", 1), ("RMSprop", 2)]


@pytest.mark.parametrize(
    ("size", "dtype", "optimizers", "num_kept", "unknown"),
    [
        pytest.param(2, torch.bfloat16, [("Adam", 1)], 2, set(), id="experts"),
        pytest.param(2, torch.float32, FIRST_OF_THREE_IS_SELDOM, 5, set(), id="first of three is seldom"),
        pytest.param(1, torch.float32, OTHER_CLASS, 3, UNREACHED_NAMES, id="other class"),
    ],
)
def test_unreached_state_is_counted_or_named(
    size: int,
    dtype: torch.dtype,
    optimizers: list[tuple[str, int]],
    num_kept: int,
    unknown: set[str],
    tmp_path: Path,
) -> None:
    """Experts that no token chose, optimizers that step every second time. Rank 0 of two has the experts that
    are not reached, so that the measured step leaves it no state at all."""
    path = tmp_path / "script.py"
    settings = f"import torch\nDTYPE, OPTIMIZERS = {dtype}, {optimizers}\n"
    path.write_text(settings + UNREACHED)
    step = measured(path, cwd=tmp_path, size=size)
    memory, num_shards = rank_memory(step), step.models[0].layout.num_shards
    if num_shards > 1:
        unknown = set()  # a test has shown what is kept
    assert set(step.unknown) == unknown
    expected = 4 * UNREACHED_NUMEL * (num_kept - bool(unknown)) // num_shards
    # The counters of the parameters that were reached, and elements that align the next parameter.
    assert 0 <= memory.state_bytes - expected <= len(optimizers) * (4 * 8 + 2 * 4 * 64)
    mains = 4 * UNREACHED_NUMEL * len(optimizers) // num_shards * (dtype == torch.bfloat16)
    assert 0 <= memory.main_param_bytes - mains <= len(optimizers) * 4 * 64


SHARED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
parallelize_module(torch.nn.Linear(8, 6), mesh["tp", "dp"], ColwiseParallel())
"""


@pytest.mark.nightly
def test_ranks_that_share_a_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SHARED)
    with pytest.raises(PlanError, match=r"Its ranks share a model \(tensor ranks or stages\)") as error:
        measure_script(str(path), [], [8], is_module=False, computes=True)
    assert "\n" not in str(error.value)


FAILURES = {
    "open('no such file')": r"FileNotFoundError: .*no such file'\. Run it from the folder",
    "import urllib.request as r; r.urlopen('http://localhost:9')": r"It wants to download",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": r"was ended by SIGKILL\. This machine's memory",
    "INIT; torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))": r"trains with torch DDP",
    "INIT; torch.multiprocessing.spawn(print, nprocs=2)": r"starts its ranks itself",
}


@pytest.mark.parametrize(
    ("text", "says"),
    [pytest.param(*row, marks=[pytest.mark.nightly] if row[0][0] != "o" else []) for row in FAILURES.items()],
)
def test_failing_script_is_told_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text.replace("INIT", "import torch; torch.distributed.init_process_group('gloo')"))
    with pytest.raises(PlanError, match=rf"script.py on 8 rank\(s\): .*{says}") as error:
        measure_script(str(path), [], [8], is_module=False, computes=True)
    assert "\n" not in str(error.value)


def test_syntax_error_is_reported_before_a_run(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("open('ran', 'w')\n1 +\n")
    for target, arguments, is_module in ((str(path), [], False), ("megastrategy.launch", [str(path)], True)):
        with pytest.raises(PlanError, match=r"script.py, line 2: SyntaxError: invalid syntax"):
            measure_script(target, arguments, [1, 2, 4, 8], is_module=is_module)


LARGE = """
import sys, torch, torch.distributed as dist, megastrategy as m
dist.init_process_group("gloo")
with torch.device("meta"):
    module = torch.nn.Linear(1024, int(sys.argv[1]), bias=False).bfloat16()
model = m.DistributedDataParallel(module.to_empty(device="cpu"))
optimizer = m.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
"""


def test_gradients_may_be_larger_than_memory(tmp_path: Path) -> None:
    """One buffer has all of them in fp32, three times what this machine has."""
    path = tmp_path / "script.py"
    path.write_text(LARGE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_rows = 3 * memory_bytes // 4096
    [step] = measure_script(str(path), [str(num_rows)], [64], is_module=False)
    assert not step.computes
    assert step.num_computed == 0, "no page is read"
    memory = rank_memory(step)
    assert (memory.weight_bytes, memory.grad_bytes) == pytest.approx((2048 * num_rows, 4096 * num_rows), rel=1e-6)
    assert memory.state_bytes == pytest.approx(2 * memory.grad_bytes / 64, rel=1e-4)


ONE_ROW = """
import resource, torch, torch.distributed as dist, megastrategy as m
dist.init_process_group("gloo")
with torch.device("meta"):
    module = torch.nn.Sequential(torch.nn.Embedding(2**17, 512), torch.nn.Linear(512, 2**17, bias=False))
model = m.DistributedDataParallel(module.to_empty(device="cpu"))
optimizer = m.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
tokens = torch.zeros(1, dtype=torch.long)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(tokens).mean().backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open("kib", "w").write(str(after - before))
    optimizer.step()
"""


def test_gradients_of_a_small_batch_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are outer products and rows of zeros: 512 MiB, made of two tensors of at most half a mebibyte."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(ONE_ROW)
    [step] = measure_script(str(path), [], [64], is_module=False)
    assert not step.computes
    assert rank_memory(step).grad_bytes == 2 * 2**17 * 512 * 4
    assert int((tmp_path / "kib").read_text()) < 128 * 1024


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "many", "x.py"], "such as 1,8,64"),
        (["--ranks", "1,99999999999", "x.py"], "up to 1,048,576"),
        (["--device-memory", "-80GiB", "x.py"], "such as 80GiB"),
        (["nowhere.py"], "does not exist"),
        (["--split", "1-2", "x.py"], "--split needs --cards"),
    ],
)
def test_wrong_command_line_runs_nothing(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(root, ["plan", *arguments])
    assert result.exit_code == 2
    assert says in result.output


# --- an option after the script, and its own --------------------------------------------------------------------------


def test_option_after_the_script_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line to type is said; after two dashes options are the script's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(root, ["plan", "train.py", "--json"])
    assert result.exit_code == 2
    assert "plan --json ... train.py for the plan, or " in result.stderr
    assert "plan train.py -- --json for the script" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- a model that is closed, and factors ------------------------------------------------------------------------------


CLOSED = """
import torch, torch.distributed as dist, megastrategy as m
dist.init_process_group("gloo")
m.DistributedDataParallel(torch.nn.Linear(4, 4), m.DistributedDataParallelConfig()).close()
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 1))
model = m.DistributedDataParallel(net, m.DistributedDataParallelConfig())
optimizer = m.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
for _ in range(STEPS):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.close()
"""


FIT = """
import torch, lightning.pytorch as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 1))
    def training_step(self, batch):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=RANKS, strategy="megatron_ddp", max_steps=STEPS, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=2))
"""


@pytest.mark.parametrize(("script", "size"), [(CLOSED, 1), (FIT, 2)], ids=["loop", "fit"])
def test_closed_model_is_planned_as_one_that_goes_on(script: str, size: int, tmp_path: Path) -> None:
    """A model that was closed before it trained is no part of the plan."""
    path, memories = tmp_path / "script.py", []
    for steps in (1, 2):
        path.write_text(f"STEPS, RANKS = {steps}, {size}\n{script}")
        memories.append(rank_memory(measured(path, cwd=tmp_path, size=size)))
    assert memories[0] == memories[1]
    assert memories[0].state_bytes >= 2 * 4 * (64 * 128 + 128 + 128 + 1) // size


def test_factors_are_not_counted_for_each_element(tmp_path: Path) -> None:
    """Adafactor keeps rows and columns of a matrix, and a number for each element of a vector."""
    path = tmp_path / "script.py"
    path.write_text(f"STEPS = 1\n{CLOSED.replace('torch.optim.Adam(', 'torch.optim.Adafactor(')}")
    [model] = measured(path, cwd=tmp_path, size=3).models
    dims = [len(spec.shape) for spec in model.layout.params]
    assert set(dims) == {1, 2}
    assert model.num_kept == {index: int(dim == 1) for index, dim in enumerate(dims)}
    matrices = sum(spec.numel for spec in model.layout.params if len(spec.shape) == 2)
    assert 0 <= model.other_state_bytes < 4 * matrices // 10
