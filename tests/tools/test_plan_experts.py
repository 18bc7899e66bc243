"""Plans of training whose experts are divided over data-parallel ranks: bytes and communication of real runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megastrategy import DistributedDataParallelConfig
from megastrategy._lightning.communication_monitor import _sent_bytes
from megastrategy.core import EventKind, ParamSpec
from megastrategy.tools.plan.live_bytes import local_tensor
from megastrategy.tools.plan.memory import rank_memory
from megastrategy.tools.plan.one_step import MeasuredStep
from megastrategy.tools.planned_layout import expert_domain, planned_layout
from tests.core.properties.test_memory import bytes_of
from tests.support.data_path import memory_of
from tests.support.processes import run_processes
from tests.support.scripts import run_script
from tests.tools.planned_script import train_experts

SCRIPT = Path(__file__).with_name("planned_script.py")
RUNS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "float32", {}),
    (4, "bfloat16", {"grad_buffer": "pooled"}),
    (2, "float32", {"num_distributed_optimizer_instances": 2}),
]


def real_bytes() -> list[tuple[int, int]]:
    """This rank's bytes between steps, and those of gradients, of each run."""
    found = []
    for ep, dtype, options in RUNS:
        model, optimizer = train_experts(ep, getattr(torch, dtype), options, num_steps=1)
        state = optimizer.optimizer.state
        values = [value for values in state.values() for value in values.values()]
        flats, grads = memory_of(model)
        weights = [*map(local_tensor, model.module.parameters()), *flats]
        on_host = model.layout.offloads_state  # of an accelerator: gradients in the dtype of main params, too
        grads += [] if on_host else [run.main.grad for run in optimizer._impl.runs if run.main.grad is not None]
        kept = [value for value in map(local_tensor, (*state, *values)) if not on_host or value.dim() == 0]
        found.append((bytes_of([*grads, *weights, *kept]), bytes_of(grads)))
        model.close()
    return found


@pytest.fixture(scope="module")
def real() -> list[tuple[int, int]]:
    """The bytes of rank 0 of four."""
    found: list[tuple[int, int]] = run_processes(4, real_bytes)[0]
    return found


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda number: str(RUNS[number]))
def test_bytes_equal_a_real_run(number: int, real: list[tuple[int, int]], tmp_path: Path) -> None:
    ep, dtype, options = RUNS[number]
    file = tmp_path / "step"
    program = ("megastrategy.tools.plan.one_step", "4", str(file), "shapes")
    done = run_script(SCRIPT, "experts", str(ep), dtype, json.dumps(options), cwd=tmp_path, ranks=1, before=program)
    assert file.exists(), done.stderr
    step = pickle.loads(file.read_bytes())
    assert isinstance(step, MeasuredStep), step
    memory = rank_memory(step)
    assert (memory.fixed_bytes - memory.frozen_bytes, memory.grad_bytes) == real[number]


# --- communication ---------------------------------------------------------------------------------------------------


def specs_on(config: DistributedDataParallelConfig, dp_size: int, ep: int) -> list[ParamSpec]:
    """A dense parameter, and a stack of experts that ``ep`` ranks divide."""
    dtypes = {"dtype": torch.float32, "grad_dtype": torch.float32}
    domain = expert_domain(config, dp_size, ep)
    return [
        ParamSpec("dense", (4096,), (1,), **dtypes),
        ParamSpec("experts", (32 * 1024 // ep,), (1,), domain=domain, **dtypes),
    ]


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        (2, {"use_distributed_optimizer": False}),
        (4, {"num_distributed_optimizer_instances": 2}),
        (8, {"grad_wire_dtype": "bf16"}),
    ],
    ids=str,
)
def test_monitor_counts_bytes_by_domain(ep: int, options: dict[str, Any]) -> None:
    """The bytes of each bucket: ``8 (d - 1) / d`` for an fp32 element on ``d`` ranks, however it is sharded."""
    config = DistributedDataParallelConfig(bucket_size=1, **options)
    layout = planned_layout(specs_on(config, 8, ep), config, 8)
    for bucket in layout.buckets:
        reduced, gathered = (
            _sent_bytes(layout, kind, bucket.index) for kind in (EventKind.REDUCE_START, EventKind.GATHER_START)
        )
        numel, num_ranks = (32 * 1024 // ep, 8 // ep) if bucket.params == (1,) else (4096, 8)
        element = 6 if options.get("grad_wire_dtype") else 8
        assert reduced + gathered == element * numel * (num_ranks - 1) // num_ranks


def test_experts_stay_divided_on_more_ranks() -> None:
    config = DistributedDataParallelConfig(bucket_size=1)
    specs = specs_on(config, 8, 4)
    layout = planned_layout(specs, config, 16)
    assert [(b.domain.size, b.domain.num_shards) for b in layout.buckets] == [(4, 4), (16, 16)]
    with pytest.raises(ValueError, match=r"6 rank\(s\), and experts are divided over 4 .* a multiple of 4 is expected"):
        planned_layout(specs, config, 6)
