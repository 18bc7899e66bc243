"""Loops under ``Fabric(strategy=...)``, and all ways to set models up, against those under ``"ddp"``, on two ranks."""

from __future__ import annotations

import importlib
import itertools
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from megastrategy.fabric import MegatronDDPStrategy
from tests.support.comparison import assert_equal

from ..fabric_loops import (
    CLIP_NORM,
    CLIP_VALUE,
    AwkwardNet,
    Loop,
    Trainee,
    adamw,
    assert_like_ddp,
    both_modes,
    make_data,
    make_fabric,
    make_strategy,
    set_up,
    sgd,
    state_of,
    step_with,
    train,
)
from ..fits import weights_of
from ..matrix import ALL_REDUCE, REDUCE_SCATTER
from ..rank_processes import Ranks

# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "zero"), [(REDUCE_SCATTER, "model"), (ALL_REDUCE, "module")], ids=["model", "module"]
)
def test_model_or_module_zeroes_gradients(ranks: Ranks, options: dict[str, Any], zero: str) -> None:
    """Neither goes through the engine; between unsynchronised backwards and after a step it need not."""
    assert_like_ddp(ranks, train, options, accumulate=3, zero=zero)


def no_backward_sync_of_another_module() -> None:
    fabric = make_fabric("megatron_ddp")
    with pytest.raises(TypeError, match="got Linear"):
        fabric.strategy._backward_sync_control.no_backward_sync(nn.Linear(2, 2), True)
    with pytest.raises(TypeError, match="set up the model first"):
        fabric.no_backward_sync(nn.Linear(2, 2))


def test_no_backward_sync_needs_our_model(ranks: Ranks) -> None:
    ranks.run(no_backward_sync_of_another_module)


# --- clipping ---------------------------------------------------------------------------------------------------------


def test_other_norms_clip(ranks: Ranks) -> None:
    clip = {"max_norm": CLIP_NORM, "norm_type": float("inf")}
    assert_like_ddp(ranks, train, REDUCE_SCATTER, make_optimizer=sgd, clip=clip)


def clip_nonfinite(name: str, strategy_options: dict[str, Any], raises: bool) -> list[float]:
    """The first gradient is infinite on rank 1 alone."""
    trainee = set_up(name, strategy_options, net=nn.Linear(3, 5))
    x = torch.ones(2, 3)
    x[0, 0] = float("inf") if trainee.fabric.global_rank == 1 else 1.0
    trainee.fabric.backward(trainee.model(x).sum())
    if not raises:
        trainee.clip(max_norm=1.0, error_if_nonfinite=False)
        return trainee.norms
    with pytest.raises(RuntimeError, match=r"cannot be clipped|non-finite"):
        trainee.clip(max_norm=1.0)
    return []


@pytest.mark.parametrize(
    ("options", "raises"),
    [(REDUCE_SCATTER, False), (ALL_REDUCE, True)],
    ids=["ignores", "raises"],
)
def test_infinite_norm_is_an_error_on_all_ranks(ranks: Ranks, options: dict[str, Any], raises: bool) -> None:
    assert_like_ddp(ranks, clip_nonfinite, options, raises=raises)


def clip_with_the_users_optimizer(name: str, strategy_options: dict[str, Any], clip: dict[str, Any]) -> Loop:
    """Fabric allows both; with gradients in shards, the user's own would find nothing to clip."""
    trainee = set_up(name, strategy_options)
    own = trainee.optimizer.optimizer
    own = own.optimizer if name != "ddp" else own
    return trainee.train(before_step=lambda: trainee.fabric.clip_gradients(trainee.model, own, **clip))


@both_modes
def test_clipping_accepts_the_users_optimizer(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, clip_with_the_users_optimizer, options, clip={"clip_val": CLIP_VALUE})


# --- precision --------------------------------------------------------------------------------------------------------


def train_fp16(name: str, strategy_options: dict[str, Any], clip: dict[str, Any]) -> Any:
    """Step 2 overflows on rank 1 alone: no rank may step, and every scale halves once."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainee = set_up(name, strategy_options, plugins=precision)
    fabric, scales, weights = trainee.fabric, trainee.losses, []
    for number, (features, tokens, targets) in enumerate(make_data(fabric)):
        overflows = number == 2 and fabric.global_rank == 1
        loss = F.cross_entropy(trainee.model(features, tokens), targets)
        fabric.backward(loss * float("inf") if overflows else loss)
        trainee.clip(error_if_nonfinite=False, **clip)
        trainee.step()
        scales.append(scaler.get_scale())
        weights.append(weights_of(trainee.net)["inputs.weight"])
    assert precision.scaler is scaler, "the user may hold it, and save it"
    assert scaler.state_dict() == fabric.strategy.precision.state_dict()
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert scales[2] == scales[1] / 2
    return trainee.end(), weights


@pytest.mark.parametrize(
    ("options", "clip"),
    [(REDUCE_SCATTER, {"max_norm": CLIP_NORM}), (ALL_REDUCE, {"clip_val": CLIP_VALUE})],
    ids=["norm", "value"],
)
def test_fp16_skips_a_step_on_all_ranks(ranks: Ranks, options: dict[str, Any], clip: dict[str, Any]) -> None:
    assert_like_ddp(ranks, train_fp16, options, clip=clip, rtol=1e-6 if "max_norm" in clip else 0.0)


def check_and_scale() -> None:
    net, precision = AwkwardNet(), MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"check_for_nan_in_grad=True contradicts .* MixedPrecision.*bf16-mixed"):
        set_up("megatron_ddp", {"check_for_nan_in_grad": True}, net=net, plugins=precision)
    assert all(param._post_accumulate_grad_hooks is None for param in net.parameters()), "it was not wrapped"


def test_scaler_contradicts_the_check_for_nan(ranks: Ranks) -> None:
    """It meets infinite gradients on purpose."""
    ranks.run(check_and_scale)


# --- modules ----------------------------------------------------------------------------------------------------------


def train_by_methods(name: str, strategy_options: dict[str, Any]) -> Loop:
    """The loss is a method of the model; attributes are reached through the wrapper."""
    trainee = set_up(name, strategy_options)
    model, net = trainee.model, trainee.net
    with pytest.raises(RuntimeError, match="mark_forward_method"):
        model.loss(*next(iter(make_data(trainee.fabric))))
    model.mark_forward_method("loss")
    for batch in make_data(trainee.fabric):
        loss = model.loss(*batch)
        trainee.fabric.backward(loss)
        trainee.step()
        trainee.losses.append(loss.item())
    assert model.num_parameters() == net.num_parameters()
    assert model.scale is net.scale
    assert model.module is net
    model.note = "kept on the module"
    assert net.note == "kept on the module"
    return trainee.end()


@both_modes
def test_marked_methods_are_synchronised(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, train_by_methods, options)


class LitNet(pl.LightningModule):
    """Its steps are forward methods to Fabric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = AwkwardNet()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, tokens, targets = batch
        return F.cross_entropy(self.net(features, tokens, batch_idx % 2 == 1), targets)


class StepCounter:
    """A callback: Fabric calls it with what the strategy stepped."""

    def __init__(self) -> None:
        self.stepped: list[Any] = []

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.stepped.append(optimizer)


def train_lightning_module(name: str, strategy_options: dict[str, Any]) -> Loop:
    counter = StepCounter()
    trainee = set_up(name, strategy_options, adamw, net=LitNet(), callbacks=[counter])
    for number, batch in enumerate(make_data(trainee.fabric)):
        loss = trainee.model.training_step(batch, number)
        trainee.fabric.backward(loss)
        trainee.step()
        trainee.losses.append(loss.item())
    assert counter.stepped == [trainee.optimizer.optimizer] * 7
    assert isinstance(counter.stepped[0], torch.optim.AdamW)
    return trainee.end()


@both_modes
def test_lightning_module_equals_ddp(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, train_lightning_module, options)


# --- options, packages and processes ----------------------------------------------------------------------------------


def test_options_are_those_of_the_trainer() -> None:
    strategy = MegatronDDPStrategy(bucket_cap_mb=1, find_unused_parameters=False)
    assert strategy.config.bucket_size == 2**18
    assert not strategy.config.find_unused_parameters
    with pytest.raises(ValueError, match="did you mean 'bucket_size'"):
        MegatronDDPStrategy(bucket_siz=3)
    with pytest.raises(ValueError, match="ddp_comm_hook"):
        MegatronDDPStrategy(ddp_comm_hook=print)


def test_new_strategy_is_pickled() -> None:
    """The launchers that spawn processes send it there."""
    assert pickle.loads(pickle.dumps(make_strategy("megatron_ddp"))).config == make_strategy("megatron_ddp").config


def train_by_name(package: str) -> Any:
    """The strategy's name is enough; in either of the packages, which refuse each other's strategies."""
    fabrics = importlib.import_module(package)
    fabric = fabrics.Fabric(accelerator="cpu", devices=2, strategy="megatron_ddp")
    fabric.launch()
    assert isinstance(fabric.strategy, fabrics.strategies.DDPStrategy)
    net = AwkwardNet()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    return step_with(fabric, model, optimizer), weights_of(net), type(fabric.strategy).__module__


def test_both_packages_train_alike(ranks: Ranks) -> None:
    *ours, module = ranks.run(train_by_name, "lightning.fabric")[0]
    *mirrored, other_module = ranks.run(train_by_name, "lightning_fabric")[0]
    assert_equal(mirrored, ours)
    assert (module, other_module) == ("megastrategy.fabric", "megastrategy.lightning_fabric")


# --- set up together, apart, several, again, or never trained; wherever "ddp" allows it -------------------------------


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
