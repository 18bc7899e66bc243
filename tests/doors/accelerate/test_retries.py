"""Attempts after an error: the module is prepared again with the optimizer, raw or prepared, of the attempt before."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import pytest
import torch

from megastrategy.core.errors import ReducedGradError
from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, adamw, assert_like_ddp, both_modes, inputs, make_accelerator, net_of, weights_of

Where = Literal["nowhere", "forward", "backward", "step", "third step"]
OUT_OF_MEMORY = "CUDA out of memory."


def run_out(*_: Any) -> NoReturn:
    raise RuntimeError(OUT_OF_MEMORY)


def attempts(
    name: str,
    mode: dict[str, Any],
    where: Where = "forward",
    optimizer_is: str = "prepared",
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


@both_modes
@pytest.mark.parametrize("where", ["forward", "backward", "step", "third step"])
@pytest.mark.parametrize("optimizer_is", ["prepared", "raw"])
def test_attempts_train_as_torch_ddp(worlds: Worlds, mode: dict[str, Any], where: Where, optimizer_is: str) -> None:
    ranks = assert_like_ddp(worlds, attempts, mode, 0.0, where, optimizer_is)
    assert len(ranks[0]["losses"]) == (8 if where == "third step" else 4)


@both_modes
def test_attempts_with_the_inner_optimizer_train_as_torch_ddp(worlds: Worlds, mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, attempts, mode, 0.0, "third step", ".optimizer")


@both_modes
@pytest.mark.parametrize("options", [(False, 1), (True, 2), (True, 1, "bf16")], ids=["kept", "accumulated", "bf16"])
def test_attempts_train_with_options(worlds: Worlds, mode: dict[str, Any], options: tuple[Any, ...]) -> None:
    assert_like_ddp(worlds, attempts, mode, 0.0, "third step", "prepared", *options)


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
def test_optimizers_without_a_model_say_so(worlds: Worlds, kind: str) -> None:
    for text in worlds.run(step_disconnected, kind):
        assert "is not connected to the wrapped model" in text
        assert "prepare" in text
        assert "clip" not in text
