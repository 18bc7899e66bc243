"""Loops, gradients and optimizers under our ``Accelerator``, against those under accelerate's own and torch DDP."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import pytest
import torch
from torch import Tensor, nn

from megastrategy.core.errors import ReducedGradError
from tests.support.comparison import assert_equal

from ..accelerate_loops import (
    Run,
    Worlds,
    adamw,
    assert_like_ddp,
    both_modes,
    grads_of,
    groups,
    inputs,
    make_accelerator,
    net_of,
    set_up,
    sgd,
    state_of,
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


# --- gradients and optimizers: synchronised when asked, accumulated, clipped, of several models -----------------------


# --- synchronisation --------------------------------------------------------------------------------------------------


def trigger(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor | None]]:
    """The example of ``trigger_sync_in_backward``, at which torch DDP raises if it looks for unused parameters."""
    trainee = set_up(name, mode, find_unused=False)
    accelerator, model = trainee.accelerator, trainee.model
    with accelerator.no_sync(model):
        loss_a = model(inputs(accelerator, 1)).square().mean()
        loss_b = model(inputs(accelerator, 2)).square().mean()
    accelerator.backward(loss_a)
    local = trainee.net[0].bias.grad.clone()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss_b)
    assert model.require_backward_grad_sync
    grads = grads_of(model)
    trainee.optimizer.step()
    return [{"local": local}, grads, dict(weights_of(trainee.net))]


@both_modes
def test_backward_synchronises_after_its_forward(worlds: Worlds, mode: dict[str, Any]) -> None:
    first, second = assert_like_ddp(worlds, trigger, mode)
    assert not torch.equal(first[0]["local"], second[0]["local"]), "nothing was sent in the first backward"


def accumulate_by_hand(name: str, mode: dict[str, Any]) -> Run:
    trainee, run = set_up(name, mode, adamw), Run({})
    for step in range(3):
        with trainee.accelerator.no_sync(trainee.model):
            trainee.backward(2 * step)
        run.losses.append(trainee.backward(2 * step + 1))
        trainee.step()
    run.weights, run.state = weights_of(trainee.net), state_of(trainee.accelerator, trainee.optimizer)
    return run


def synchronise_each_batch(name: str, mode: dict[str, Any]) -> Run:
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    return train(name, mode, gradient_accumulation_plugin=plugin, make_optimizer=sgd, epochs=1)


@pytest.mark.parametrize(
    ("mode", "job"),
    [(REDUCE_SCATTER, accumulate_by_hand), (ALL_REDUCE, synchronise_each_batch)],
    ids=["by hand", "sync"],
)
def test_accumulation_equals_ddp(worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, job, mode, rtol=1e-6 if job is synchronise_each_batch else 0.0)


# --- several models ---------------------------------------------------------------------------------------------------


def train_two_models(name: str, mode: dict[str, Any], kind: str) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Two models that accumulate together, each with an optimizer, and clipping over parts of either."""
    accelerator = make_accelerator(name, mode, gradient_accumulation_steps=2)
    nets = net_of(1), net_of(2, width=7)
    inner = [sgd(net.parameters()) for net in nets]
    first, second, *optimizers = accelerator.prepare(*nets, *inner)
    norms: list[float] = []

    def clip(parameters: Any, largest: float) -> None:
        norm = getattr(accelerator, f"clip_grad_{kind}_")(parameters, largest)
        norms.extend([] if norm is None else [norm.item()])

    for step in range(6):
        x = inputs(accelerator, step)
        with accelerator.accumulate(first, second):
            accelerator.backward((first(x) - second(x)).square().mean())
            if accelerator.sync_gradients:
                clip(itertools.chain(first.parameters(), second.parameters()), 0.1)
                clip([first.module[0].weight, second.module[2].bias], 0.01)
                clip([first.module[2].weight], 0.001)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return norms, [weights_of(net) for net in nets]


@both_modes
def test_two_models_accumulate_and_clip(worlds: Worlds, mode: dict[str, Any]) -> None:
    (norms, _), _ = assert_like_ddp(worlds, train_two_models, mode, 1e-6, "norm")
    assert len(norms) == 9
    assert norms[0] > 0.1 > norms[1] > 0.01, "so all of them clip"
    ours = worlds.run(train_two_models, "megatron_ddp", mode, "norm")
    assert ours[0][0] == ours[1][0]
    assert_like_ddp(worlds, train_two_models, mode, 0.0, "value")


def train_with_extra_params(name: str, mode: dict[str, Any], prepare: str) -> list[dict[str, Tensor]]:
    """As sentence-transformers does: the optimizer has the loss's parameters too, a head and a guide."""
    accelerator = make_accelerator(name, mode)
    net, head, guide = net_of(1), nn.Linear(3, 2), nn.Linear(2, 2)
    with torch.no_grad():
        for param in itertools.chain(head.parameters(), guide.parameters()):
            param.fill_(0.3)
    if prepare == "one optimizer":
        made = [adamw(itertools.chain(net.parameters(), head.parameters(), guide.parameters()))]
    else:
        made = [adamw(net.parameters()), adamw([*head.parameters(), *guide.parameters()])]
    model, *optimizers = accelerator.prepare(net, *made)
    told = name != "ddp" and accelerator.is_main_process
    warning = pytest.warns(UserWarning, match=r"2 param.* of this AdamW belong to no wrapped model")
    with warning if told else contextlib.nullcontext():
        for step in range(3):
            accelerator.backward(head(model(inputs(accelerator, step))).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    states = [state_of(accelerator, item) or {} for item in optimizers]
    return [weights_of(part) for part in (net, head, guide)] + states


@pytest.mark.parametrize(
    ("mode", "prepare"), [(REDUCE_SCATTER, "one optimizer"), (ALL_REDUCE, "two optimizers")], ids=["one", "two"]
)
def test_extra_params_equal_ddp(worlds: Worlds, mode: dict[str, Any], prepare: str) -> None:
    results = assert_like_ddp(worlds, train_with_extra_params, mode, 1e-6, prepare)
    (_, head, guide, *_), (_, other_head, other_guide, *_) = results
    assert not torch.equal(head["weight"], other_head["weight"]), "its gradient is not reduced"
    assert torch.equal(guide["weight"], other_guide["weight"]), "it has none"


def schedule_two(name: str, mode: dict[str, Any]) -> tuple[list[float], bool]:
    """fp16: the first model's step is skipped, and with it its scheduler, not the other's."""
    accelerator = make_accelerator(name, mode)
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=8.0), True
    nets = net_of(1), net_of(2)
    inner = [sgd(net.parameters()) for net in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(item, 1, gamma=0.5) for item in inner]
    first, second, *others = accelerator.prepare(*nets, *inner, *schedulers)
    optimizers, schedulers = others[:2], others[2:]
    for model, factor in ((first, float("inf") if accelerator.is_main_process else 1.0), (second, 1.0)):
        accelerator.backward(model(inputs(accelerator)).square().mean() * factor)
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    return [scheduler.get_last_lr()[0] for scheduler in schedulers], accelerator.optimizer_step_was_skipped


@both_modes
def test_scheduler_waits_for_its_optimizer(worlds: Worlds, mode: dict[str, Any]) -> None:
    expected = assert_like_ddp(worlds, schedule_two, mode)
    assert expected == [([0.05, 0.0125], True)] * 2


# --- clipping ---------------------------------------------------------------------------------------------------------


def clip_local_gradients() -> tuple[float, float, float, float]:
    """The norms of the model's gradients, of a layer's that no model has, of both, and the layer's factor."""
    trainee = set_up("megatron_ddp")
    accelerator, model, layer = trainee.accelerator, trainee.model, nn.Linear(3, 3)
    extra = list(layer.parameters())
    factor = 1 + accelerator.process_index
    accelerator.backward(model(inputs(accelerator)).square().sum() + factor * layer(torch.ones(3)).square().sum())
    of_model = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    before = torch.nn.utils.get_total_norm([param.grad for param in extra])
    norm = accelerator.clip_grad_norm_([*model.parameters(), *extra], 0.5)
    after = torch.nn.utils.get_total_norm([param.grad for param in extra])
    accelerator.clip_grad_value_([*model.parameters(), *extra], 1e-4)
    assert all(param.grad.abs().max() <= 1e-4 for param in extra)
    return of_model.item(), before.item(), norm.item(), (after / before).item()


def test_local_gradients_enter_the_norm(worlds: Worlds) -> None:
    """With the mean of their squares over the ranks."""
    results = worlds.run(clip_local_gradients)
    mean = sum(local**2 for _, local, _, _ in results) / len(results)
    assert results[0][1] != results[1][1]
    for of_model, _, norm, factor in results:
        assert norm == results[0][2] == pytest.approx((of_model**2 + mean) ** 0.5, rel=1e-5)
        assert factor == pytest.approx(0.5 / norm, rel=1e-4)


def clip_each_microbatch(name: str, mode: dict[str, Any]) -> dict[str, Tensor]:
    """Without asking ``sync_gradients``: within a window each rank clips its own."""
    trainee = set_up(name, mode, gradient_accumulation_steps=3)
    for step in range(6):
        with trainee.accelerator.accumulate(trainee.model):
            trainee.backward(factor=step + 1)
            if step % 3 < 2:
                trainee.accelerator.clip_grad_norm_(trainee.model.parameters(), 0.01)
                trainee.accelerator.clip_grad_value_(trainee.model.parameters(), 0.004)
            trainee.step()
    return weights_of(trainee.net)


@both_modes
def test_clipping_within_a_window_is_local(worlds: Worlds, mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, clip_each_microbatch, mode)
