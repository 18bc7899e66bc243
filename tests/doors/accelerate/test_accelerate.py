"""Loops under our ``Accelerator``, compared with those under accelerate's own and torch DDP."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import pytest
import torch

from megastrategy.core.errors import ReducedGradError
from tests.support.comparison import assert_equal

from ..accelerate_loops import (
    Worlds,
    adamw,
    both_modes,
    groups,
    inputs,
    make_accelerator,
    net_of,
    sgd,
    train,
    weights_of,
)
from ..matrix import ALL_REDUCE, REDUCE_SCATTER

SHORT_WINDOW = {"gradient_accumulation_steps": 3}
APART = {"prepare": "apart", "make_optimizer": sgd, "zero": "model", "clip": ("value", 0.01)}
OPTIMIZER_FIRST = {"prepare": "reversed", "make_optimizer": groups, "mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        pytest.param(REDUCE_SCATTER, SHORT_WINDOW, id="short window"),
        pytest.param(ALL_REDUCE, SHORT_WINDOW, id="short window, all-reduce"),
        pytest.param(REDUCE_SCATTER, APART, id="apart, zeroed through the model, clipped by value"),
        pytest.param(REDUCE_SCATTER, OPTIMIZER_FIRST, id="optimizer first, autocast"),
    ],
)
def test_loop_equals_ddp(worlds: Worlds, mode: dict[str, Any], options: dict[str, Any]) -> None:
    expected = worlds.run(train, "ddp", **options)
    assert expected[0].losses != expected[1].losses, "each rank has its own samples"
    assert_equal(worlds.run(train, "megatron_ddp", mode, **options), expected)


@pytest.mark.parametrize(
    ("mode", "norm"),
    [
        pytest.param(REDUCE_SCATTER, 0.05, id="clipped"),
        pytest.param(REDUCE_SCATTER, 1e3, id="not clipped"),
        pytest.param(ALL_REDUCE, 0.05, id="all-reduce"),
    ],
)
def test_norm_clips_as_ddp(worlds: Worlds, mode: dict[str, Any], norm: float) -> None:
    """Summed by shards: within 1e-6, the same bits on both ranks, and to the bit where nothing is clipped."""
    # not Adam: the bias before BatchNorm has a gradient of zero except for rounding, which Adam would make steps of
    options: dict[str, Any] = {"clip": ("norm", norm), "gradient_accumulation_steps": 2, "make_optimizer": sgd}
    expected = worlds.run(train, "ddp", **options)
    assert min(expected[0].norms) > 0.05
    ours = worlds.run(train, "megatron_ddp", mode, **options)
    assert ours[0].norms == ours[1].norms
    assert_equal(ours, expected, rtol=1e-6 if mode["use_distributed_optimizer"] else 0.0)
    if norm == 1e3:
        assert_equal([run.weights for run in ours], [run.weights for run in expected])


@both_modes
def test_infinite_gradient_skips_step_on_both_ranks(worlds: Worlds, mode: dict[str, Any]) -> None:
    """With fp16's scaler the scale falls on both ranks, the scheduler waits, and later steps are torch DDP's."""
    options: dict[str, Any] = {"scale": 1024.0, "inf_on": (1, 3), "clip": ("norm", 0.05), "make_optimizer": sgd}
    expected = worlds.run(train, "ddp", **options)
    assert [run.skipped for run in expected] == [[3], [3]]
    rtol = 1e-6 if mode["use_distributed_optimizer"] else 0.0
    assert_equal(worlds.run(train, "megatron_ddp", mode, **options), expected, rtol=rtol)


def test_one_process_equals_accelerate(worlds: Worlds) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "clip": ("norm", 0.05)}
    expected = worlds.run(train, "ddp", size=1, **options)
    assert_equal(worlds.run(train, "megatron_ddp", size=1, **options), expected)


# --- attempts after an error: the module is prepared again with an optimizer of the attempt before --------------------


Where = Literal["nowhere", "forward", "backward", "step", "third step"]

OUT_OF_MEMORY = "CUDA out of memory."


def run_out(*_: Any) -> NoReturn:
    raise RuntimeError(OUT_OF_MEMORY)


def attempts(
    name: str,
    mode: dict[str, Any],
    where: Where = "forward",
    optimizer_is: str = "prepared",
    *,
    release: bool = True,
    accumulate: int = 1,
    precision: str = "no",
) -> dict[str, Any]:
    """Three attempts; the first two run out of memory. Returns weights, losses and rates.

    Args:
        where: in which part of an attempt memory ends.
        optimizer_is: what is prepared again: the "raw" optimizer, the "prepared" one, or its ".optimizer".
        release: whether the wrapper of the attempt before is collected.
    """
    from accelerate.utils import find_executable_batch_size, release_memory

    accelerator = make_accelerator(name, mode, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    net = net_of()
    raw = optimizer = adamw(net.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(raw, 1, gamma=0.9)
    losses: list[float] = []
    rates: list[float] = []
    sizes: list[int] = []
    wrappers: list[Any] = []

    @find_executable_batch_size(starting_batch_size=4, reduce_batch_size_fn=lambda: sizes[-1] - 1)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> None:
        nonlocal optimizer, scheduler
        sizes.append(batch_size)
        accelerator.free_memory()
        again = {"raw": raw, "prepared": optimizer, ".optimizer": getattr(optimizer, "optimizer", raw)}[optimizer_is]
        model, optimizer, scheduler = accelerator.prepare(net, again, scheduler)
        if not release:
            wrappers.append(model)
        try:
            for step in range(4 * accumulate):
                ends = len(sizes) < 3 and step == (2 if where == "third step" else 0)
                with accelerator.accumulate(model):
                    hidden = net[1].register_forward_hook(lambda *given: given[2].register_hook(run_out) and None)
                    if not (ends and where == "backward"):
                        hidden.remove()
                    loss = model(inputs(accelerator, step)[:batch_size]).float().square().mean()
                    hidden.remove()
                    if ends and where == "forward":
                        run_out()
                    accelerator.backward(loss)
                    if ends and where in ("step", "third step"):
                        run_out()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                    rates.append(raw.param_groups[0]["lr"])
        finally:
            optimizer.zero_grad()
            release_memory(model)

    train()
    assert sizes == [4, 3, 2]
    return {"losses": losses, "rates": rates, "weights": weights_of(net)}


@pytest.mark.parametrize(
    ("mode", "where", "optimizer_is", "options"),
    [
        pytest.param(REDUCE_SCATTER, "forward", "prepared", {}, id="forward"),
        pytest.param(ALL_REDUCE, "backward", "raw", {}, id="backward, all-reduce"),
        pytest.param(REDUCE_SCATTER, "step", ".optimizer", {"release": False}, id="step, wrapper is alive"),
        pytest.param(REDUCE_SCATTER, "third step", "prepared", {"accumulate": 2}, id="accumulated"),
        pytest.param(REDUCE_SCATTER, "third step", "raw", {"precision": "bf16"}, id="bf16"),
    ],
)
def test_attempts_equal_ddp(
    worlds: Worlds, mode: dict[str, Any], where: Where, optimizer_is: str, options: dict[str, Any]
) -> None:
    expected = worlds.run(attempts, "ddp", mode, where, optimizer_is, **options)
    assert len(expected[0]["losses"]) == 4 * options.get("accumulate", 1) + 4 * (where == "third step")
    assert_equal(worlds.run(attempts, "megatron_ddp", mode, where, optimizer_is, **options), expected)


def step_disconnected(kind: str) -> str:
    accelerator = make_accelerator("megatron_ddp", {})
    net = net_of()
    optimizer = adamw(net.parameters())
    model, prepared = accelerator.prepare(net, optimizer)
    if kind == "unprepared":
        stepped: Any = adamw(net.parameters())
    else:
        del model
        accelerator.free_memory()
        model, stepped = accelerator.prepare(net), prepared
    accelerator.backward(model(inputs(accelerator)).square().mean())
    before = weights_of(net)
    with pytest.raises(ReducedGradError) as raised:
        stepped.step()
    if kind == "disconnected":
        assert_equal(weights_of(net), before)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["unprepared", "disconnected"])
def test_optimizer_without_model_raises(worlds: Worlds, kind: str) -> None:
    for text in worlds.run(step_disconnected, kind):
        assert "Step the optimizer that was prepared with this wrapper" in text
        assert "MegatronDDPPlugin(use_distributed_optimizer=False)" in text
        assert "clip" not in text.lower()
