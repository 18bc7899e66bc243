"""After a fit the module and the plugin are the user's again; 16-bit weights equal a loop written by hand."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional as F

from tests.doors.features.precision import half_precision

from ..fits import (
    BATCHES_PER_EPOCH,
    AwkwardModule,
    Fit,
    assert_same_tensors,
    batches,
    fit,
    loader,
    make_strategy,
    make_trainer,
    weights_of,
)
from ..rank_processes import Ranks


def test_launcher_shows_its_own_error() -> None:
    """The main process of a launcher tears a strategy down whose module no Trainer has there."""

    class NotPicklable(AwkwardModule):
        pass

    trainer = make_trainer(make_strategy("megatron_ddp", start_method="spawn"), devices=2)
    with pytest.raises((AttributeError, pickle.PicklingError), match="NotPicklable"):
        trainer.fit(NotPicklable(), loader())


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        pytest.param({}, "bf16-true", id="reduce-scatter"),
        pytest.param({"use_distributed_optimizer": False}, "32-true", id="all-reduce"),
        pytest.param(
            {"use_distributed_optimizer": False, "overlap_grad_reduce": False, "use_contiguous_buffers": False},
            "32-true",
            id="without buffers",
        ),
    ],
)
def test_a_fit_leaves_a_plain_module(ranks: Ranks, tmp_path: Path, options: dict[str, Any], precision: str) -> None:
    """Users copy, pickle, save and deploy the module that they trained; nothing may still point into a buffer."""
    ranks.run(check_plain_after_fit, str(tmp_path), options, precision)


def check_plain_after_fit(folder: str, options: dict[str, Any], precision: Any) -> None:
    threads = set(threading.enumerate())
    module = AwkwardModule()
    trainer = make_trainer(make_strategy("megatron_ddp", **options), precision=precision, max_epochs=1)
    trainer.fit(module, loader())
    assert set(threading.enumerate()) <= threads
    assert_plain(module)

    trainer.save_checkpoint(f"{folder}/after.ckpt")  # collective, with no fit going on
    if trainer.is_global_zero:
        saved = torch.load(f"{folder}/after.ckpt", weights_only=True)
        assert_same_tensors(saved["state_dict"], module.state_dict())
        assert len(saved["optimizer_states"][0]["state"]) == 9
    assert_plain(module)
    del trainer
    gc.collect()
    assert set(threading.enumerate()) <= threads


def assert_plain(module: pl.LightningModule) -> None:
    fresh = AwkwardModule()
    for name, param in module.named_parameters():
        assert param.grad is None, name
        assert param.grad_dtype == param.dtype, name
        assert not param._backward_hooks, name
        assert not param._post_accumulate_grad_hooks, name
        assert set(vars(param)) == set(vars(dict(fresh.named_parameters())[name])), name
    for name, tensor in module.state_dict().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} is a part of something larger"
    ranges = sorted(
        (p.untyped_storage().data_ptr(), p.untyped_storage().data_ptr() + p.nbytes) for p in module.parameters()
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    for kind, submodule in module.named_modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert not getattr(submodule, hooks), f"{kind}.{hooks}"

    fresh.to(module.inputs.weight.dtype)
    assert saved_size(module) == saved_size(fresh)
    for double in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_tensors(double.state_dict(), dict(module.state_dict()))
        assert double.head.weight is double.embed.weight
        double.inputs.weight.data.zero_()
    assert module.inputs.weight.any()


def saved_size(module: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getbuffer().nbytes


def test_many_fits_make_one_process_group(ranks: Ranks) -> None:
    """Cross-validation and sweeps make a Trainer a fold; a group made for each would never be freed."""
    for first, later in ranks.run(count_groups):
        assert first == later


def count_groups() -> tuple[int, int]:
    counts = []
    for _ in range(3):
        make_trainer(make_strategy("megatron_ddp"), max_epochs=1, limit_train_batches=1).fit(AwkwardModule(), loader())
        counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return counts[0], counts[-1]


def test_a_fit_that_raises_leaves_a_plain_module_too(ranks: Ranks) -> None:
    """A notebook user corrects the error and goes on with the same module and plugin."""
    ranks.run(check_plain_after_error)


class Raises(AwkwardModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def check_plain_after_error() -> None:
    plugin = half_precision()
    scaler = plugin.scaler
    module = Raises()
    threads = set(threading.enumerate())
    trainer = make_trainer(make_strategy("megatron_ddp"), plugins=[plugin], gradient_clip_val=1.0)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer.fit(module, loader())
    assert_plain_plugin(plugin, scaler)
    assert set(threading.enumerate()) <= threads
    for param in module.parameters():
        assert param.grad is None
        assert param.untyped_storage().nbytes() == param.nbytes
        assert not param._post_accumulate_grad_hooks


def assert_plain_plugin(plugin: MixedPrecision, scaler: Any) -> None:
    assert set(vars(plugin)) == set(vars(half_precision()))
    assert plugin.scaler is scaler
    assert type(scaler) is torch.amp.GradScaler


# --- precisions ------------------------------------------------------------------------------------------------------


class SmallNet(pl.LightningModule):
    """Without BatchNorm, so that a loop of a few lines is all that a fit computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 11))
        self.losses: list[float] = []

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(features), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0], batch[2])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_small_net(precision: Any, accumulate: int, **strategy_options: Any) -> Fit:
    return fit(
        "megatron_ddp",
        module=SmallNet(),
        precision=precision,
        strategy_options=strategy_options,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )


def one_process_with_fp32_main_params(
    dtype: torch.dtype, accumulate: int
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The same training in one process: the two ranks' gradients, added up and averaged in fp32, step fp32 copies."""
    module = SmallNet().to(dtype)
    main = [nn.Parameter(param.detach().float()) for param in module.parameters()]
    optimizer = torch.optim.AdamW(main, lr=1e-3)
    losses: list[list[float]] = [[], []]
    for epoch in range(2):
        sums = [[torch.zeros_like(param) for param in main] for _ in range(2)]
        for index, pair in enumerate(batches(epoch)):
            for rank, (features, _, targets) in enumerate(pair):
                loss = module.loss(features.to(dtype), targets)
                losses[rank].append(loss.item())
                grads = torch.autograd.grad(loss / accumulate, list(module.parameters()))
                for total, grad in zip(sums[rank], grads, strict=True):
                    total += grad.float()
            if (index + 1) % accumulate == 0 or index + 1 == BATCHES_PER_EPOCH:
                for param, first, second in zip(main, *sums, strict=True):
                    param.grad = (first + second) / 2
                optimizer.step()
                for weight, param in zip(module.parameters(), main, strict=True):
                    weight.data.copy_(param)
                sums = [[torch.zeros_like(param) for param in main] for _ in range(2)]
    return weights_of(module), losses


@pytest.mark.parametrize(
    ("precision", "dtype", "accumulate", "sharded"),
    [
        ("bf16-true", torch.bfloat16, 3, False),
        ("16-true", torch.float16, 3, True),
    ],
)
def test_16_bit_weights_equal_one_process(
    ranks: Ranks, precision: str, dtype: torch.dtype, accumulate: int, sharded: bool
) -> None:
    """To the bit to a loop of one process with fp32 main weights and fp32 sums of microbatches, which "ddp" has not."""
    weights, losses = one_process_with_fp32_main_params(dtype, accumulate)
    results = ranks.run(fit_small_net, precision, accumulate, use_distributed_optimizer=sharded)
    for rank, result in enumerate(results):
        assert result.losses == losses[rank]
        assert_same_tensors(result.weights, weights)


# --- plugins ---------------------------------------------------------------------------------------------------------


class Own:
    class Half(HalfPrecision):
        """A plugin of a user's, derived from one of Lightning's, whose qualified name is not its name."""


@pytest.mark.parametrize("kind", [Precision, Own.Half], ids=lambda kind: kind.__qualname__)
def test_plugin_keeps_its_name_and_its_class(ranks: Ranks, kind: type[Precision]) -> None:
    """Checkpoints store its state under the name, isinstance is what users ask, and another Trainer may have it."""
    ranks.run(check_plugin, kind)


def check_plugin(kind: type[Precision]) -> None:
    plugin = kind()
    during: list[Any] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            here = trainer.precision_plugin
            during.append((here is plugin, isinstance(here, kind), type(here).__qualname__, type(here).__module__))

    for _ in range(2):
        trainer = make_trainer(make_strategy("megatron_ddp"), plugins=[plugin], callbacks=[Look()], max_epochs=1)
        trainer.fit(AwkwardModule(), loader())
        assert during.pop() == (True, True, kind.__qualname__, kind.__module__)
        assert type(plugin) is kind
        assert vars(plugin) == vars(kind())
