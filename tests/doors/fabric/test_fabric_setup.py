"""Models and optimizers are set up together, apart, several, again, or never trained; wherever "ddp" allows it."""

from __future__ import annotations

import itertools
import warnings
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
from ..matrix import MODES
from ..rank_processes import Ranks

# --- together and apart ---------------------------------------------------------------------------------------------


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
def test_second_attempt_uses_the_first_ones_optimizer(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, second_attempt, options)


def set_up_before_its_model(name: str, strategy_options: dict[str, Any], precision: Any = "32-true") -> Loop:
    fabric, net = make_fabric(name, strategy_options, precision=precision), AwkwardNet()
    optimizer = fabric.setup_optimizers(sgd(net.parameters()))
    trainee = Trainee(fabric, net, fabric.setup_module(net), optimizer)
    loop = trainee.train(3, before_step=lambda: trainee.clip(max_norm=0.5))
    assert max(loop.norms) > 0.5
    return loop


def test_an_optimizer_set_up_before_its_model_steps_whole_parameters(ranks: Ranks) -> None:
    assert_like_ddp(ranks, set_up_before_its_model, MODES["all-reduce"])


def test_an_optimizer_set_up_before_its_model_can_step_neither_shards_nor_main_params(ranks: Ranks) -> None:
    refused = [(MODES["reduce-scatter"], "32-true"), (MODES["all-reduce"], "bf16-true")]
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


@both_modes
@pytest.mark.parametrize("shared", [False, True], ids=["disjoint", "shared"])
def test_two_optimizers_of_one_model(ranks: Ranks, options: dict[str, Any], shared: bool) -> None:
    assert_like_ddp(ranks, two_optimizers, options, shared=shared)


def gan(name: str, strategy_options: dict[str, Any]) -> Any:
    """Two models with an optimizer each: the generator is trained through the discriminator."""
    fabric = make_fabric(name, strategy_options)
    torch.manual_seed(fabric.global_rank)
    generator, discriminator = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    g, g_opt = fabric.setup(generator, adamw(generator.parameters()))
    d, d_opt = fabric.setup(discriminator, adamw(discriminator.parameters()))
    noise = torch.Generator().manual_seed(7 + fabric.global_rank)
    losses = []
    for _ in range(4):
        real, z = torch.randn(6, 5, generator=noise), torch.randn(6, 3, generator=noise)
        d_opt.zero_grad()
        d_loss = F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()
        fabric.backward(d_loss, model=d)
        d_opt.step()
        g_opt.zero_grad()
        g_loss = F.softplus(-d(g(z))).mean()
        fabric.backward(g_loss, model=g)
        g_opt.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses, weights_of(generator), weights_of(discriminator), state_of(fabric, g_opt), state_of(fabric, d_opt)


@both_modes
def test_two_models_with_an_optimizer_each(ranks: Ranks, options: dict[str, Any]) -> None:
    """Only the discriminator's own backwards count for it: zero_grad drops the generator's."""
    assert_like_ddp(ranks, gan, options)


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


def test_one_optimizer_for_two_models_steps_whole_parameters(ranks: Ranks) -> None:
    assert_like_ddp(ranks, one_optimizer_for_two_models, MODES["all-reduce"])


def one_sharded_optimizer_for_two_models() -> None:
    fabric = make_fabric("megatron_ddp")
    encoder, decoder = nn.Linear(3, 5), nn.Linear(5, 1)
    fabric_models = fabric.setup_module(encoder), fabric.setup_module(decoder)
    with pytest.raises(ValueError, match=r"belong to 2 models; .* pass strategy=.megatron_ddp_all_reduce. or"):
        fabric.setup_optimizers(adamw([*encoder.parameters(), *decoder.parameters()]))
    del fabric_models


def test_one_sharded_optimizer_for_two_models_is_refused_with_the_way_out(ranks: Ranks) -> None:
    ranks.run(one_sharded_optimizer_for_two_models)


def strangers(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A head and a bias that no model has, in the model's optimizer and in one of their own."""
    fabric = make_fabric(name, mode if name != "ddp" else None)
    net, head, bias = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(1, 1)
    with torch.no_grad():
        for part in (net, head, bias):
            for param in part.parameters():
                param.fill_(0.3)
    model = fabric.setup_module(net)
    optimizers = fabric.setup_optimizers(sgd([*net.parameters(), *head.parameters()]), sgd(bias.parameters()))
    texts = []
    for number in range(3):
        outputs = head(model(torch.full((2, 3), 1.0 + number + fabric.global_rank))) + bias(torch.ones(1))
        fabric.backward(outputs.square().mean())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        texts += [str(item.message) for item in caught if "belong to no wrapped model" in str(item.message)]
    assert len(texts) == (2 if name != "ddp" and fabric.global_rank == 0 else 0), "each optimizer once, on rank 0"
    return [weights_of(part) for part in (net, head, bias)]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_parameters_of_no_model_are_stepped_as_under_ddp(ranks: Ranks, mode: dict[str, Any]) -> None:
    ours, theirs = (ranks.run(strangers, name, mode) for name in ("megatron_ddp", "ddp"))
    assert_equal(ours, theirs)
    (_, head, _), (_, other, _) = ours
    assert not torch.equal(head["weight"], other["weight"]), "their gradients are not reduced"


# --- again, and never trained ---------------------------------------------------------------------------------------


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
def test_a_module_may_be_set_up_again(ranks: Ranks, options: dict[str, Any]) -> None:
    """Both setups go on working, as both wrappers do under "ddp"."""
    assert_like_ddp(ranks, set_up_again, options)


def unfreeze_and_set_up_again(name: str, strategy_options: dict[str, Any]) -> Any:
    """With a second optimizer, for what was frozen."""
    fabric, net = make_fabric(name, strategy_options), AwkwardNet()
    own = sgd([param for param in net.parameters() if param.requires_grad])
    losses = step_with(fabric, *fabric.setup(net, own))
    net.frozen.requires_grad_(True)
    model, optimizer, second = fabric.setup(net, own, adamw(net.frozen.parameters()))
    losses += step_with(fabric, model, optimizer, second)
    return losses, weights_of(net), state_of(fabric, optimizer), state_of(fabric, second)


@both_modes
def test_a_module_set_up_again_after_unfreezing_trains_what_was_frozen(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, unfreeze_and_set_up_again, options)


def evaluate(name: str, strategy_options: dict[str, Any]) -> Any:
    """A model that is set up and only evaluated, with rank 0's weights and buffers."""
    fabric = make_fabric(name, strategy_options)
    net = AwkwardNet()
    model = fabric.setup(net).eval()
    with torch.inference_mode():
        outputs = [model(features, tokens) for features, tokens, _ in make_data(fabric)]
    return outputs, weights_of(net)


@both_modes
def test_a_model_that_is_only_evaluated(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, evaluate, options)


def teacher_and_student(strategy_options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The teacher has nothing to train; torch DDP refuses to wrap it."""
    fabric = make_fabric("megatron_ddp", strategy_options)
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


@pytest.mark.sample(1)
@both_modes
def test_a_model_without_trainable_parameters_may_be_set_up(ranks: Ranks, options: dict[str, Any]) -> None:
    (loss, teacher), (other_loss, other_teacher) = ranks.run(teacher_and_student, options)
    assert_equal(teacher, other_teacher)
    assert max(loss.item(), other_loss.item()) < 1e-3
