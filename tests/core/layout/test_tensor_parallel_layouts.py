"""Tensor ranks have one layout, whatever the sizes of their parts: replicas then get the same bits from every ring, and
from every dtype on the wire, or of what is kept."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.support.processes import run_processes
from tests.support.tensor_parallel import Case, Outcome, Trainee, make_module, meshes, train_alone, train_on

# 383 rows on the first of two tensor ranks and 382 on the second. With the second's own sizes, a border between the
# shards of three ranks would be at another place of a replicated matrix.
UNEVEN = 765
STEPS = 10


# --- dtypes on the wire ----------------------------------------------------------------------------------------------

# The largest relative error that rounding to each makes of one number.
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
WIRES: list[dict[str, str]] = [
    {"grad_wire_dtype": "bf16"},
    {"grad_wire_dtype": "fp16"},
]


def wired(
    mode: str,
    wire: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    sequence_parallel: bool = True,
    steps: int = STEPS,
) -> Case:
    return Case(
        mode,  # type: ignore[arg-type] # the name of one
        sequence_parallel,
        accumulate=2,
        dtype=dtype,
        vocab=UNEVEN,
        steps=steps,
        options=tuple(wire.items()),
    )


KEPT = {"offload_optimizer_states": True}
SHORT = [
    wired("reduce-scatter", WIRES[0], steps=2),
    wired("reduce-scatter", KEPT, torch.bfloat16, steps=2),
]
LONG = [
    wired("pooled", WIRES[1]),
    wired("forward", WIRES[0], torch.bfloat16, sequence_parallel=False),
    wired("reduce-scatter", KEPT),
]


def trained_and_resumed(tp: int, cases: list[Case]) -> list[tuple[Outcome, dict[str, bytes]]]:
    mesh = meshes(tp)
    return [(train_on(mesh, case), resumed_half_way(mesh, case)) for case in cases]


def resumed_half_way(mesh: Any, case: Case) -> dict[str, bytes]:
    """This rank's parts after a run that was saved in its middle and went on in other objects."""
    half = case.steps // 2
    before = Trainee.make(mesh, case)
    before.train(range(half))
    saved = [io.BytesIO()]
    contents = before.optimizer.state_dict(), before.optimizer.main_params(), before.weights()
    if dist.get_rank() == 0:
        torch.save(contents, saved[0])
    dist.broadcast_object_list(saved)
    saved[0].seek(0)
    state, main_params, weights = torch.load(saved[0], weights_only=True)
    before.model.close()
    after = Trainee.make(mesh, case)
    set_model_state_dict(after.module, weights, options=StateDictOptions(full_state_dict=True))
    after.optimizer.load_state_dict(state)
    after.optimizer.load_main_params(main_params)
    after.train(range(half, case.steps))
    parts = after.replicas()
    after.model.close()
    return parts


@pytest.mark.parametrize(
    ("dp", "tp", "cases"),
    [
        pytest.param(2, 2, SHORT, id="2x2"),
        pytest.param(3, 2, LONG, id="3x2", marks=pytest.mark.nightly),
    ],
)
def test_tensor_ranks_round_in_the_same_way(dp: int, tp: int, cases: list[Case]) -> None:
    by_rank = run_processes(dp * tp, trained_and_resumed, tp, cases, timeout_s=600.0)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        first = outcomes[0][0]
        for rank, (outcome, resumed) in enumerate(outcomes):
            assert outcome.replicas == first.replicas, f"{case}, rank {rank}"
            assert [norm.tolist() for norm in outcome.norms] == [norm.tolist() for norm in first.norms]
            assert resumed == outcome.replicas, (
                f"{case}, rank {rank}: a run that was saved and loaded goes on otherwise"
            )
        if case.dtype == torch.float32:  # bf16 forwards round more than the wire does
            alone, start = train_alone(case, dp), make_module(case, None).state_dict()
            unit = sum(UNIT[dtype] for name, dtype in case.options if name == "grad_wire_dtype")
            for name, weight in alone.weights.items():
                error = float((first.weights[name] - weight).norm() / (weight - start[name]).norm())
                assert error < (2 * unit or 1e-5), f"{case}, {name}: {error} of how far it was trained"
            if unit:
                assert any((first.weights[name] - weight).abs().max() > 1e-6 for name, weight in alone.weights.items())
