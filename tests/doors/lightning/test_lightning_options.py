"""Strategy arguments, in Python and through LightningCLI: those of the config, of torch DDP, and refused ones."""

from __future__ import annotations

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy

from megastrategy import DistributedDataParallelConfig, MegatronDDPStrategy

from ..fits import AwkwardModule

FIELDS = [field.name for field in dataclasses.fields(DistributedDataParallelConfig)]


@pytest.mark.parametrize("name", FIELDS)
def test_config_field_is_a_strategy_argument(name: str) -> None:
    """A field is written once, in the config; the strategy must pass on each of them, also those that come later."""
    default = getattr(DistributedDataParallelConfig(), name)
    others = {
        "bucket_size": 12_345,
        "overlap_param_gather": True,
        "grad_buffer": "pooled",
        "num_distributed_optimizer_instances": 3,
        "grad_wire_dtype": "fp16",
    }
    value = others.get(name, not default)
    needed = {
        "use_contiguous_buffers": {"use_distributed_optimizer": False, "overlap_grad_reduce": False},
        "reduce_scatter_with_fp32_accumulation": {"grad_reduce_in_fp32": False},
    }
    config = MegatronDDPStrategy(**{name: value}, **needed.get(name, {})).config
    assert getattr(config, name) == value != default
    untouched = [other for other in FIELDS if other != name and other not in needed.get(name, {})]
    assert all(getattr(config, other) == getattr(DistributedDataParallelConfig(), other) for other in untouched)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"find_unused_parameters": True}, {"find_unused_parameters": True}),
        ({"static_graph": True}, {"static_graph": True}),
        ({"broadcast_buffers": False}, {"broadcast_buffers": False}),
        ({"gradient_as_bucket_view": True}, {}),
        ({"bucket_cap_mb": 0.5}, {"bucket_size": 2**17}),
    ],
)
def test_torch_ddps_arguments_are_accepted(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    """``MegatronDDPStrategy`` in place of ``DDPStrategy`` keeps the arguments; megabytes are those of fp32."""
    DDPStrategy(**arguments)
    assert MegatronDDPStrategy(**arguments).config == DistributedDataParallelConfig(**expected)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ddp_comm_hook", print, "need strategy='ddp'"),
        ("ddp_comm_state", object(), "need strategy='ddp'"),
        ("ddp_comm_wrapper", print, "need strategy='ddp'"),
        ("model_averaging_period", 4, "need strategy='ddp'"),
        ("mixed_precision", object(), "bf16-true"),
        ("delay_all_reduce_named_params", [], "freeze"),
        ("device_ids", [0], "device"),
        ("bucket_sise", 100, "did you mean 'bucket_size'?"),
        ("zero_stage", 2, "known are bucket_size, "),
    ],
)
def test_other_arguments_are_refused_by_name(name: str, value: Any, reason: str) -> None:
    """An option that is silently ignored is worse than an error."""
    with pytest.raises(ValueError, match=name) as caught:
        MegatronDDPStrategy(**{name: value})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"bucket_size": 10, "bucket_cap_mb": 25}, ["bucket_size", "bucket_cap_mb"]),
        ({"bucket_cap_mb": -1}, ["bucket_cap_mb=-1"]),
        ({"use_contiguous_buffers": False}, ["use_contiguous_buffers=False", "use_distributed_optimizer=False"]),
        ({"gradient_as_bucket_view": 1}, ["gradient_as_bucket_view=1"]),
    ],
)
def test_wrong_values_fail_at_construction(arguments: dict[str, Any], named: list[str]) -> None:
    """Before any process is started, with the field, the value and the remedy."""
    with pytest.raises(ValueError, match=named[0]) as caught:
        MegatronDDPStrategy(**arguments)
    assert all(part in str(caught.value) for part in named)


# --- LightningCLI ----------------------------------------------------------------------------------------------------


# Lightning 2.6 calls jsonargparse 4.53 by a name that is going to change
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CLASS = "megastrategy.MegatronDDPStrategy"


@pytest.fixture(autouse=True)
def no_arguments_of_pytests(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns when a command line has two sources, and takes pytest's for one of them."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


class Module(AwkwardModule):
    """One without arguments that a command line would have to know."""

    def __init__(self) -> None:
        super().__init__()


def run_cli(*arguments: str) -> LightningCLI:
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return LightningCLI(
        Module,
        pl.LightningDataModule,
        run=False,
        args=list(arguments),
        trainer_defaults=defaults,
        save_config_callback=None,
        seed_everything_default=False,
    )


def strategy_of(*arguments: str) -> Any:
    return run_cli(*arguments).trainer.strategy


def test_command_line_takes_the_class_with_options() -> None:
    strategy = strategy_of(
        f"--trainer.strategy={CLASS}",
        "--trainer.strategy.bucket_size=100",
        "--trainer.strategy.overlap_grad_reduce=false",
        "--trainer.strategy.process_group_backend=gloo",
        "--trainer.strategy.start_method=fork",
        "--trainer.strategy.timeout=0:00:07",
    )
    assert type(strategy) is MegatronDDPStrategy
    assert strategy.config == DistributedDataParallelConfig(bucket_size=100, overlap_grad_reduce=False)
    assert strategy.process_group_backend == "gloo"
    assert strategy._start_method == "fork"
    assert strategy._timeout == timedelta(seconds=7)


def test_yaml_takes_the_class_with_options(tmp_path: Path) -> None:
    """And what the command line says goes before what the file says."""
    options = {"bucket_cap_mb": 2, "use_distributed_optimizer": False, "gradient_as_bucket_view": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": {"class_path": CLASS, "init_args": options}}}))
    expected = DistributedDataParallelConfig(bucket_size=2 * 2**20 // 4, use_distributed_optimizer=False)
    assert strategy_of("--config", str(path)).config == expected
    changed = strategy_of("--config", str(path), "--trainer.strategy.use_distributed_optimizer=true")
    assert changed.config == dataclasses.replace(expected, use_distributed_optimizer=True)


def test_command_line_names_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run_cli(f"--trainer.strategy={CLASS}", "--trainer.strategy.bucket_sise=100")
    assert refused.value.code == 2
    assert "Option 'bucket_sise' is not accepted" in capsys.readouterr().err


def test_torchs_16_bit_hook_becomes_an_option() -> None:
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    hook = f"--trainer.strategy.ddp_comm_hook={hooks}.default_hooks.fp16_compress_hook"
    cli = run_cli(f"--trainer.strategy={CLASS}", hook)
    assert cli.trainer.strategy.config.grad_wire_dtype == "fp16"
    hook = f"--trainer.strategy.ddp_comm_hook={hooks}.powerSGD_hook.powerSGD_hook"
    with pytest.raises(ValueError, match=r"ddp_comm_hook=.*grad_wire_dtype='bf16'"):
        run_cli(f"--trainer.strategy={CLASS}", hook)
