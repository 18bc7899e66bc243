"""A loop under ``Fabric(strategy=...)`` against the same loop under ``"ddp"``: to the bit, on two ranks."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    set_up,
    sgd,
    train,
)
from ..fits import weights_of
from ..rank_processes import Failure, Ranks, assert_failed

# --- gradients ------------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("zero", ["model", "module"])
def test_gradients_may_be_zeroed_through_the_model_or_the_raw_module(
    ranks: Ranks, options: dict[str, Any], zero: str
) -> None:
    """Neither goes through the engine; between unsynchronised backwards and after a step it need not."""
    assert_like_ddp(ranks, train, options, accumulate=3, zero=zero)


def drop_gradients(name: str, strategy_options: dict[str, Any], between: bool) -> Loop:
    """Every second gradient is dropped without a step, which only the optimizer's zero_grad can say."""
    trainee = set_up(name, strategy_options)
    for number, batch in enumerate(make_data(trainee.fabric)):
        dropped = number % 2 == 0
        with trainee.fabric.no_backward_sync(trainee.model, enabled=dropped and between):
            trainee.backward(batch)
        if not dropped:
            trainee.optimizer.step()
        trainee.optimizer.zero_grad()
    return trainee.end()


@both_modes
@pytest.mark.parametrize("unsynchronised", [True, False])
def test_gradients_may_be_dropped_without_a_step(ranks: Ranks, options: dict[str, Any], unsynchronised: bool) -> None:
    assert_like_ddp(ranks, drop_gradients, options, between=unsynchronised)


def local_gradients(name: str, strategy_options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The contents of ``.grad`` after one and after two backwards that are not synchronised."""
    trainee = set_up(name, strategy_options)
    seen = []
    for batch in itertools.islice(make_data(trainee.fabric), 2):
        with trainee.fabric.no_backward_sync(trainee.model):
            trainee.backward(batch)
        seen.append({key: p.grad.clone() for key, p in trainee.net.named_parameters() if p.grad is not None})
    return seen


@both_modes
def test_under_no_backward_sync_gradients_stay_local(ranks: Ranks, options: dict[str, Any]) -> None:
    ours = ranks.run(local_gradients, "megatron_ddp", options)
    theirs = ranks.run(local_gradients, "ddp", {})
    assert_equal(ours, theirs)
    assert len(ours[0][0]) == len(dict(AwkwardNet().named_parameters())) - 2, "all but the frozen layer's"
    assert not torch.equal(ours[0][1]["scale"], ours[1][1]["scale"]), "nothing was sent"


def no_backward_sync_of_a_stranger() -> None:
    fabric = make_fabric("megatron_ddp")
    with pytest.raises(TypeError, match="got Linear"):
        fabric.strategy._backward_sync_control.no_backward_sync(nn.Linear(2, 2), True)
    with pytest.raises(TypeError, match="set up the model first"):
        fabric.no_backward_sync(nn.Linear(2, 2))


def test_no_backward_sync_needs_a_model_of_this_strategy(ranks: Ranks) -> None:
    ranks.run(no_backward_sync_of_a_stranger)


def several_backwards(name: str, strategy_options: dict[str, Any]) -> Loop:
    """Two synchronised backwards before each of three steps, by ``loss.backward()``, which fp32 allows in Fabric."""
    trainee = set_up(name, strategy_options)
    for features, tokens, targets in itertools.islice(make_data(trainee.fabric), 3):
        for use_side in (False, True):
            loss = F.cross_entropy(trainee.model(features, tokens, use_side), targets)
            loss.backward()
            trainee.losses.append(loss.item())
        trainee.step()
    return trainee.end()


@both_modes
def test_several_synchronised_backwards_before_a_step(ranks: Ranks, options: dict[str, Any]) -> None:
    """With reduce-scatter the parts are added in another order than by averaging an average."""
    assert_like_ddp(ranks, several_backwards, options, rtol=1e-6 if options["use_distributed_optimizer"] else 0.0)


def failing_backwards(name: str, strategy_options: dict[str, Any], fails: bool) -> Any:
    """In the second of three steps backward fails half-way, on both ranks, and the batch is tried again."""
    trainee = set_up(name, strategy_options)
    net: Any = trainee.net
    for number, (features, tokens, targets) in enumerate(itertools.islice(make_data(trainee.fabric), 3)):
        loss = F.cross_entropy(trainee.model(features, tokens), targets)
        if fails and number == 1:
            hook = net.inputs.weight.register_hook(raise_on_purpose)  # the gradients of all others are there by then
            with pytest.raises(ZeroDivisionError):
                trainee.fabric.backward(loss)
            hook.remove()
            trainee.optimizer.zero_grad()
            net.norm.reset_running_stats()
            loss = F.cross_entropy(trainee.model(features, tokens), targets)
        trainee.fabric.backward(loss)
        trainee.step()
        trainee.losses.append(loss.item())
    return trainee.losses, {key: value for key, value in weights_of(net).items() if not key.startswith("norm.")}


def raise_on_purpose(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in the middle of backward")


@both_modes
def test_a_batch_is_tried_again_after_an_error(ranks: Ranks, options: dict[str, Any]) -> None:
    """Nothing of the first try is left; "ddp" has to be wrapped anew, so its run without an error is the reference."""
    ours = ranks.run(failing_backwards, "megatron_ddp", options, fails=True)
    assert_equal(ours, ranks.run(failing_backwards, "ddp", {}, fails=False))


def reduced_gradients(name: str, strategy_options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    trainee = set_up(name, strategy_options)
    fabric, net = trainee.fabric, trainee.net
    trainee.backward(next(iter(make_data(fabric))), use_side=False)
    trained = [(key, param) for key, param in net.named_parameters() if param.requires_grad]
    if name == "ddp":
        grads = {key: param.grad for key, param in trained if param.grad is not None}
        return grads, torch.nn.utils.get_total_norm(grads.values()).item()
    full = {key: fabric.strategy.full_grad(param) for key, param in trained}
    with pytest.raises(ValueError, match=r"shape \(13, 13\) is not a trainable parameter"):
        fabric.strategy.full_grad(net.frozen.weight)
    return {key: grad for key, grad in full.items() if grad is not None}, trainee.optimizer.grad_norm().item()


@both_modes
def test_full_grad_and_grad_norm_show_what_ddp_has_in_grad(ranks: Ranks, options: dict[str, Any]) -> None:
    ours, theirs = ranks.run(reduced_gradients, "megatron_ddp", options), ranks.run(reduced_gradients, "ddp", {})
    for (grads, norm), (expected, expected_norm) in zip(ours, theirs, strict=True):
        assert_equal(grads, expected)
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert "side.weight" not in grads, "not used in this backward"


# --- clipping -------------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_clipping_by_other_norms(ranks: Ranks, options: dict[str, Any], norm_type: float) -> None:
    clip = {"max_norm": CLIP_NORM, "norm_type": norm_type}
    exact = norm_type == float("inf") or not options["use_distributed_optimizer"]
    assert_like_ddp(ranks, train, options, make_optimizer=sgd, clip=clip, rtol=0.0 if exact else 1e-6)


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


@both_modes
@pytest.mark.parametrize("raises", [True, False])
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks_or_on_none(
    ranks: Ranks, options: dict[str, Any], raises: bool
) -> None:
    assert_like_ddp(ranks, clip_nonfinite, options, raises=raises)


def clip_with_the_users_own_optimizer(name: str, strategy_options: dict[str, Any], clip: dict[str, Any]) -> Loop:
    """Fabric allows both; with gradients in shards, the user's own would find nothing to clip."""
    trainee = set_up(name, strategy_options)
    own = trainee.optimizer.optimizer
    own = own.optimizer if name != "ddp" else own
    return trainee.train(before_step=lambda: trainee.fabric.clip_gradients(trainee.model, own, **clip))


@both_modes
def test_clipping_understands_the_users_own_optimizer(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, clip_with_the_users_own_optimizer, options, clip={"clip_val": CLIP_VALUE})


# --- modules --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@both_modes
def test_a_model_compiled_by_autograd_too_trains_alike(ranks: Ranks, options: dict[str, Any]) -> None:
    """The matrix has dynamo alone; here backward is traced as well. Forward and backward still meet the engine."""
    assert_like_ddp(ranks, train, options, accumulate=2, before_setup=compiled)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


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
def test_methods_marked_as_forward_are_synchronised(ranks: Ranks, options: dict[str, Any]) -> None:
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
def test_a_lightning_module_runs_in_fabric(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, train_lightning_module, options)


def collectives_beside(name: str, strategy_options: dict[str, Any]) -> Any:
    """Fabric's own collectives between forward, backward and step: on another group than the engine's."""
    trainee = set_up(name, strategy_options)
    fabric, net, seen = trainee.fabric, trainee.net, list[Any]()
    for features, tokens, targets in make_data(fabric):
        loss = F.cross_entropy(trainee.model(features, tokens), targets)
        seen.append(fabric.all_reduce(loss.detach().clone(), reduce_op="mean"))
        fabric.backward(loss)
        fabric.barrier()
        trainee.optimizer.step()
        seen.append(fabric.all_gather(net.scale.detach()))
        seen.append(fabric.broadcast(float(loss), src=1))
        trainee.optimizer.zero_grad()
    return seen, weights_of(net)


@both_modes
def test_collectives_of_fabric_run_beside_the_engines(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, collectives_beside, options)


def fail_on_rank_1() -> None:
    trainee = set_up("megatron_ddp")
    trainee.train(3)
    if trainee.fabric.global_rank == 1:
        raise ZeroDivisionError("on purpose, on rank 1")
    trainee.train(1)


def test_an_error_on_one_rank_ends_the_other_with_a_reason(ranks: Ranks) -> None:
    waiting, raising = ranks.outcomes(fail_on_rank_1)
    assert isinstance(raising, Failure)
    assert (raising.kind, raising.message) == ("ZeroDivisionError", "on purpose, on rank 1")
    assert_failed(waiting, "another rank ended", kind="CollectiveError", within_s=30)
