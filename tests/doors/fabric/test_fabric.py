"""A loop under ``Fabric(strategy=...)`` against the same loop under ``"ddp"``: to the bit, on two ranks."""

from __future__ import annotations

import importlib
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
    adamw,
    assert_like_ddp,
    both_modes,
    make_data,
    make_fabric,
    make_strategy,
    set_up,
    sgd,
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
