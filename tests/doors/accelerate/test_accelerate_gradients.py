"""Gradients and optimizers of an Accelerate user: synchronised when asked, accumulated, clipped, of several models."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..accelerate_loops import (
    Run,
    Worlds,
    adamw,
    assert_like_ddp,
    both_modes,
    grads_of,
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
