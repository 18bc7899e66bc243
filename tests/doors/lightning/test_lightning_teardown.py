"""After a fit the module is a plain one again, and nothing of the engine stays behind in the process."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from ..fits import AwkwardModule, assert_same_tensors, loader, make_strategy, make_trainer
from ..rank_processes import Failure, Ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_distributed_optimizer": False},
        {"use_distributed_optimizer": False, "overlap_grad_reduce": False, "use_contiguous_buffers": False},
    ],
    ids=["reduce_scatter", "all_reduce", "fallback"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
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


def half_precision() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def assert_plain_plugin(plugin: MixedPrecision, scaler: Any) -> None:
    assert set(vars(plugin)) == set(vars(half_precision()))
    assert plugin.scaler is scaler
    assert type(scaler) is torch.amp.GradScaler


# --- nothing global --------------------------------------------------------------------------------------------------


def test_a_failed_job_is_reported_with_its_traceback(ranks: Ranks) -> None:
    """The harness itself: a rank's assertion reaches the test, or every test above proves nothing."""
    outcomes = ranks.outcomes(fail_on_rank_1)
    assert outcomes[0] == 0
    assert isinstance(outcomes[1], Failure)
    assert "rank 1 fails" in outcomes[1].traceback


def fail_on_rank_1() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    assert rank == 0, "rank 1 fails"
    return rank
