"""Gradients of an Accelerate user: synchronised when asked, accumulated and clipped, of one model and of several."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

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

# --- synchronisation -------------------------------------------------------------------------------------------------


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
def test_a_backward_can_be_synchronised_after_its_forward(worlds: Worlds, mode: dict[str, Any]) -> None:
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


@both_modes
@pytest.mark.parametrize("job", [accumulate_by_hand, synchronise_each_batch])
def test_accumulation(worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, job, mode, rtol=1e-6 if job is synchronise_each_batch else 0.0)


# --- several models --------------------------------------------------------------------------------------------------


def train_two_models(name: str, mode: dict[str, Any], kind: str) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Two models, each with an optimizer, and clipping over parts of either."""
    accelerator = make_accelerator(name, mode)
    nets = net_of(1), net_of(2, width=7)
    inner = [sgd(net.parameters()) for net in nets]
    first, second, *optimizers = accelerator.prepare(*nets, *inner)
    norms: list[float] = []

    def clip(parameters: Any, largest: float) -> None:
        norm = getattr(accelerator, f"clip_grad_{kind}_")(parameters, largest)
        norms.extend([] if norm is None else [norm.item()])

    for step in range(3):
        x = inputs(accelerator, step)
        accelerator.backward((first(x) - second(x)).square().mean())
        clip(itertools.chain(first.parameters(), second.parameters()), 0.1)
        clip([first.module[0].weight, second.module[2].bias], 0.01)
        clip([first.module[2].weight], 0.001)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, [weights_of(net) for net in nets]


def train_two_by_norm(name: str, mode: dict[str, Any]) -> Any:
    return train_two_models(name, mode, "norm")


def train_two_by_value(name: str, mode: dict[str, Any]) -> Any:
    return train_two_models(name, mode, "value")


@both_modes
def test_clipping_any_parameters_of_several_models(worlds: Worlds, mode: dict[str, Any]) -> None:
    (norms, _), _ = assert_like_ddp(worlds, train_two_by_norm, mode, rtol=1e-6)
    assert len(norms) == 9
    assert norms[0] > 0.1 > norms[1] > 0.01, "so all of them clip"
    ours = worlds.run(train_two_by_norm, "megatron_ddp", mode)
    assert ours[0][0] == ours[1][0]
    assert_like_ddp(worlds, train_two_by_value, mode)


def accumulate_two(name: str, mode: dict[str, Any]) -> tuple[list[bool], list[dict[str, Tensor]]]:
    """Seven batches of both models in windows of three; the last is short."""
    accelerator = make_accelerator(name, mode, gradient_accumulation_steps=3)
    nets = net_of(1), net_of(2)
    samples = torch.randn(26, 5, generator=torch.Generator().manual_seed(4))
    inner = [adamw(net.parameters()) for net in nets]
    first, second, data, *optimizers = accelerator.prepare(*nets, DataLoader(samples, batch_size=2), *inner)  # type: ignore[arg-type]
    synchronised = []
    for x in data:
        with accelerator.accumulate(first, second):
            accelerator.backward((first(x) - second(x)).square().mean())
            synchronised.append(accelerator.sync_gradients)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return synchronised, [weights_of(net) for net in nets]


@both_modes
def test_two_models_accumulate_together(worlds: Worlds, mode: dict[str, Any]) -> None:
    (synchronised, _), _ = assert_like_ddp(worlds, accumulate_two, mode)
    assert synchronised == [False, False, True, False, False, True, True]


def clip_what_was_not_sent() -> tuple[float, float]:
    """All backwards under ``no_sync``: clipping reduces before it looks, as a step would."""
    trainee = set_up("megatron_ddp")
    accelerator, model = trainee.accelerator, trainee.model
    trainee.backward()
    expected = accelerator.clip_grad_norm_(model.parameters(), 1e6).item()
    trainee.optimizer.zero_grad()
    with accelerator.no_sync(model):
        trainee.backward()
    return accelerator.clip_grad_norm_(model.parameters(), 1e6).item(), expected


def test_clipping_what_was_not_sent(worlds: Worlds) -> None:
    first, second = worlds.run(clip_what_was_not_sent)
    assert first == second
    assert first[0] == first[1]


class HasItsOwn(nn.Module):
    """A table that each rank has by itself, under torch DDP too."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net, self.table = net_of(), nn.Parameter(torch.full((3 + rank,), 1.0 + rank))
        self._ddp_params_and_buffers_to_ignore = ["table", ".table"]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) + self.table.square().sum()
        return out


def clip_what_is_each_ranks_own(is_ignored: bool) -> tuple[float, float, float, float]:
    """The norms of the model's gradients, of this rank's own and of both, and the factor of its own."""
    accelerator = make_accelerator("megatron_ddp")
    module: nn.Module = HasItsOwn(accelerator.process_index) if is_ignored else net_of()
    model, optimizer = accelerator.prepare(module, sgd(module.parameters()))
    stranger = nn.Linear(3, 3)
    loss = model(inputs(accelerator)).square().sum()
    if not is_ignored:
        loss = loss + (1 + accelerator.process_index) * stranger(torch.ones(3)).square().sum()
    accelerator.backward(loss)
    extra = [module.table] if isinstance(module, HasItsOwn) else list(stranger.parameters())
    rest = [param for param in model.parameters() if param is not extra[0]]
    of_model = accelerator.clip_grad_norm_(rest, 1e9)
    own = torch.nn.utils.get_total_norm([param.grad for param in extra if param.grad is not None])
    norm = accelerator.clip_grad_norm_([*rest, *extra], 0.5)
    left = torch.nn.utils.get_total_norm([param.grad for param in extra if param.grad is not None])
    assert of_model is not None
    assert norm is not None
    accelerator.clip_grad_value_([*rest, *extra], 1e-4)
    assert all(param.grad is not None and param.grad.abs().max() <= 1e-4 for param in extra)
    if is_ignored:
        optimizer.step()
    return of_model.item(), own.item(), norm.item(), (left / own).item()


@pytest.mark.parametrize("is_ignored", [True, False])
def test_gradients_that_each_rank_has_by_itself_are_clipped_by_one_norm(worlds: Worlds, is_ignored: bool) -> None:
    """That of a loop: they enter it with the mean of their squares."""
    found = worlds.run(clip_what_is_each_ranks_own, is_ignored)
    mean = sum(own**2 for _, own, _, _ in found) / len(found)
    assert found[0][1] != found[1][1]
    for of_model, _, norm, factor in found:
        assert norm == found[0][2] == pytest.approx((of_model**2 + mean) ** 0.5, rel=1e-5)
        assert factor == pytest.approx(0.5 / norm, rel=1e-4)


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
def test_a_scheduler_waits_for_its_own_optimizer(worlds: Worlds, mode: dict[str, Any]) -> None:
    expected = assert_like_ddp(worlds, schedule_two, mode)
    assert expected == [([0.05, 0.0125], True)] * 2


# --- clipping within a window ----------------------------------------------------------------------------------------


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
def test_clipping_within_a_window_of_accumulation_is_of_what_each_rank_has(
    worlds: Worlds, mode: dict[str, Any]
) -> None:
    assert_like_ddp(worlds, clip_each_microbatch, mode)
