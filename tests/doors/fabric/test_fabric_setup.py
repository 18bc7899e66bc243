"""Models and optimizers are set up together, apart, several, again, or never trained; wherever "ddp" allows it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.comparison import assert_equal

from ..fabric_loops import (
    AwkwardNet,
    Loop,
    Trainee,
    adamw,
    assert_like_ddp,
    both_modes,
    make_data,
    make_fabric,
    set_up,
    sgd,
    state_of,
    step_with,
)
from ..fits import weights_of
from ..matrix import ALL_REDUCE, REDUCE_SCATTER
from ..rank_processes import Ranks


def set_up_apart(name: str, strategy_options: dict[str, Any]) -> Loop:
    """The optimizer is built before the model is set up; the matrix has it built after."""
    fabric, net = make_fabric(name, strategy_options), AwkwardNet()
    own = sgd(net.parameters())
    return Trainee(fabric, net, fabric.setup_module(net), fabric.setup_optimizers(own)).train(3)


@both_modes
def test_model_and_optimizer_set_up_apart(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, set_up_apart, options)


def second_attempt(name: str, strategy_options: dict[str, Any]) -> Loop:
    """As in the next attempt after an error: with the optimizer inside of the one that setup returned."""
    fabric, net = make_fabric(name, strategy_options), AwkwardNet()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    Trainee(fabric, net, model, optimizer).train(2)
    del model
    return Trainee(fabric, net, *fabric.setup(net, optimizer.optimizer)).train(3)


@both_modes
def test_second_attempt_with_the_same_optimizer(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, second_attempt, options)


def set_up_before_its_model(name: str, strategy_options: dict[str, Any], precision: Any = "32-true") -> Loop:
    fabric, net = make_fabric(name, strategy_options, precision=precision), AwkwardNet()
    optimizer = fabric.setup_optimizers(sgd(net.parameters()))
    trainee = Trainee(fabric, net, fabric.setup_module(net), optimizer)
    loop = trainee.train(3, before_step=lambda: trainee.clip(max_norm=0.5))
    assert max(loop.norms) > 0.5
    return loop


def test_optimizer_before_its_model(ranks: Ranks) -> None:
    assert_like_ddp(ranks, set_up_before_its_model, ALL_REDUCE)


def test_optimizer_before_its_model_is_refused(ranks: Ranks) -> None:
    refused = [(REDUCE_SCATTER, "32-true"), (ALL_REDUCE, "bf16-true")]
    for options, precision in refused:
        ranks.run(refuse_to_set_up_before_its_model, options, precision)


def refuse_to_set_up_before_its_model(options: dict[str, Any], precision: str) -> None:
    with pytest.raises(ValueError, match=r"fabric\.setup_module\(model\) before fabric\.setup_optimizers\(optimizer\)"):
        set_up_before_its_model("megatron_ddp", options, precision)
    set_up("megatron_ddp").train(3)  # nothing is left behind


def two_optimizers(name: str, strategy_options: dict[str, Any], shared: bool) -> Any:
    """Over disjoint halves of one model, or both over all of it; with a scheduler that Fabric passes through."""
    fabric = make_fabric(name, strategy_options)
    net = AwkwardNet()
    params = [param for param in net.parameters() if param.requires_grad]
    own = [sgd(params if shared else params[:4]), adamw(params if shared else params[4:])]
    scheduler = torch.optim.lr_scheduler.StepLR(own[0], 1, gamma=0.5)
    model, first, second, same_scheduler = fabric.setup(net, *own, scheduler=scheduler)
    assert same_scheduler is scheduler
    losses = []
    for features, tokens, targets in itertools.islice(make_data(fabric), 3):
        for optimizer in (first, second):
            loss = F.cross_entropy(model(features, tokens), targets)
            fabric.backward(loss)
            optimizer.step()
            first.zero_grad()
            second.zero_grad()
            losses.append(loss.item())
        scheduler.step()  # warns, which is an error here, unless the optimizer's own step was called
    assert first.param_groups[0]["lr"] == own[0].param_groups[0]["lr"] == 0.05 / 8
    return weights_of(net), losses, state_of(fabric, first), state_of(fabric, second)


@pytest.mark.parametrize(
    ("options", "shared"), [(REDUCE_SCATTER, False), (ALL_REDUCE, True)], ids=["disjoint", "shared"]
)
def test_two_optimizers_of_one_model(ranks: Ranks, options: dict[str, Any], shared: bool) -> None:
    assert_like_ddp(ranks, two_optimizers, options, shared=shared)


def one_optimizer_for_two_models(name: str, strategy_options: dict[str, Any]) -> Any:
    fabric = make_fabric(name, strategy_options)
    torch.manual_seed(fabric.global_rank)
    encoder, decoder = nn.Linear(3, 5), nn.Linear(5, 1)
    own = adamw([*encoder.parameters(), *decoder.parameters()])
    e, d = fabric.setup_module(encoder), fabric.setup_module(decoder)
    optimizer = fabric.setup_optimizers(own)
    losses = []
    for number in range(3):
        loss = d(torch.tanh(e(torch.full((2, 3), 1.0 + number + fabric.global_rank)))).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(e, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(encoder), weights_of(decoder), state_of(fabric, optimizer)


def test_one_optimizer_of_two_models_equals_ddp(ranks: Ranks) -> None:
    """It steps the Parameters themselves."""
    assert_like_ddp(ranks, one_optimizer_for_two_models, ALL_REDUCE)


def refused_optimizer_of_two_models() -> None:
    fabric = make_fabric("megatron_ddp")
    nets = nn.Linear(3, 5), nn.Linear(5, 1)
    models = [fabric.setup_module(net) for net in nets]
    with pytest.raises(ValueError, match=r"(?s)belong to 2 models.* pass strategy=.megatron_ddp_all_reduce. or"):
        fabric.setup_optimizers(adamw(itertools.chain(*(net.parameters() for net in nets))))
    assert len(models) == 2


def test_one_optimizer_of_two_models_is_refused(ranks: Ranks) -> None:
    ranks.run(refused_optimizer_of_two_models)


# --- again, and never trained -----------------------------------------------------------------------------------------


def set_up_again(name: str, strategy_options: dict[str, Any]) -> Any:
    """The same module and optimizer as the user knows them, once for each phase, and once more to evaluate."""
    fabric, net = make_fabric(name, strategy_options), AwkwardNet()
    own = sgd(net.parameters())
    trainee = Trainee(fabric, net, *fabric.setup(net, own))
    losses = list(trainee.train(3).losses)
    with torch.no_grad():
        net.scale.add_(fabric.global_rank)
    again, optimizer_again = fabric.setup(net, own)  # rank 0's weights reach all again
    losses += step_with(fabric, again, optimizer_again)
    evaluated = fabric.setup(net)
    with torch.no_grad():
        features, tokens, _ = next(iter(make_data(fabric)))
        seen = evaluated(features, tokens)
    return losses, seen, trainee.train(3)


@both_modes
def test_module_is_set_up_again(ranks: Ranks, options: dict[str, Any]) -> None:
    """Both setups go on working, as both wrappers do under "ddp"."""
    assert_like_ddp(ranks, set_up_again, options)


def evaluate(name: str, strategy_options: dict[str, Any]) -> Any:
    """A model that is set up and only evaluated, with rank 0's weights and buffers."""
    fabric = make_fabric(name, strategy_options)
    net = AwkwardNet()
    model = fabric.setup(net).eval()
    with torch.inference_mode():
        outputs = [model(features, tokens) for features, tokens, _ in make_data(fabric)]
    return outputs, weights_of(net)


@both_modes
def test_model_is_only_evaluated(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, evaluate, options)


def teacher_and_student() -> tuple[Tensor, dict[str, Tensor]]:
    """The teacher has nothing to train; torch DDP refuses to wrap it."""
    fabric = make_fabric("megatron_ddp")
    torch.manual_seed(fabric.global_rank)
    teacher, student = nn.Linear(3, 5).requires_grad_(False), nn.Linear(3, 5)
    t = fabric.setup(teacher)
    s, optimizer = fabric.setup(student, sgd(student.parameters()))
    x = torch.full((2, 3), 1.0 + fabric.global_rank)
    for _ in range(200):
        fabric.backward(F.mse_loss(s(x), t(x)))
        optimizer.step()
        optimizer.zero_grad()
    return F.mse_loss(s(x), t(x)), weights_of(teacher)


def test_frozen_model_is_set_up(ranks: Ranks) -> None:
    (loss, teacher), (other_loss, other_teacher) = ranks.run(teacher_and_student)
    assert_equal(teacher, other_teacher)
    assert max(loss.item(), other_loss.item()) < 1e-3
