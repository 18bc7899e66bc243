"""LightningCLI: the name, the class with its options in YAML and on the command line; and the signature it reads."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import megastrategy
from megastrategy import DistributedDataParallelConfig, MegatronDDPStrategy

from ..fits import AwkwardModule, assert_same_tensors, loader, weights_of
from ..rank_processes import Ranks

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


def run_cli(*arguments: str, run: bool = False) -> LightningCLI:
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
        pl.LightningDataModule if not run else Data,
        run=run,
        args=list(arguments),
        trainer_defaults=defaults,
        save_config_callback=None,
        seed_everything_default=False,
    )


class Data(pl.LightningDataModule):
    """The data of the other tests."""

    def train_dataloader(self) -> Any:
        return loader()


def strategy_of(*arguments: str) -> Any:
    return run_cli(*arguments).trainer.strategy


@pytest.mark.parametrize("name", ["megatron_ddp", "megatron_ddp_spawn", "megatron_ddp_all_reduce"])
def test_the_name(name: str) -> None:
    strategy = strategy_of("--trainer.strategy", name)
    assert type(strategy) is MegatronDDPStrategy
    assert strategy.config == DistributedDataParallelConfig(use_distributed_optimizer="all_reduce" not in name)
    assert strategy._start_method == megastrategy.megastrategy_autoload.START_METHODS[name]


def test_the_class_with_options_on_the_command_line() -> None:
    strategy = strategy_of(
        f"--trainer.strategy={CLASS}",
        "--trainer.strategy.bucket_size=100",
        "--trainer.strategy.overlap_grad_reduce=false",
        "--trainer.strategy.process_group_backend=gloo",
        "--trainer.strategy.start_method=fork",
    )
    assert type(strategy) is MegatronDDPStrategy
    assert strategy.config == DistributedDataParallelConfig(bucket_size=100, overlap_grad_reduce=False)
    assert strategy.process_group_backend == "gloo"
    assert strategy._start_method == "fork"


def test_the_class_with_options_in_yaml(tmp_path: Path) -> None:
    """And what the command line says goes before what the file says."""
    options = {"bucket_cap_mb": 2, "use_distributed_optimizer": False, "gradient_as_bucket_view": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": {"class_path": CLASS, "init_args": options}}}))
    expected = DistributedDataParallelConfig(bucket_size=2 * 2**20 // 4, use_distributed_optimizer=False)
    assert strategy_of("--config", str(path)).config == expected
    changed = strategy_of("--config", str(path), "--trainer.strategy.use_distributed_optimizer=true")
    assert changed.config == dataclasses.replace(expected, use_distributed_optimizer=True)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("bucket_sise=100", "Option 'bucket_sise' is not accepted"),
        ("bucket_size=many", "bucket_size"),
        ("overlap_grad_reduce=perhaps", "overlap_grad_reduce"),
    ],
)
def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str], option: str, said: str) -> None:
    with pytest.raises(SystemExit) as refused:
        run_cli(f"--trainer.strategy={CLASS}", f"--trainer.strategy.{option}")
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_torchs_hook_for_sixteen_bits_becomes_an_option_in_a_file_too() -> None:
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    hook = f"--trainer.strategy.ddp_comm_hook={hooks}.default_hooks.fp16_compress_hook"
    cli = run_cli(f"--trainer.strategy={CLASS}", hook)
    assert cli.trainer.strategy.config.grad_wire_dtype == "fp16"
    hook = f"--trainer.strategy.ddp_comm_hook={hooks}.powerSGD_hook.powerSGD_hook"
    with pytest.raises(ValueError, match=r"ddp_comm_hook=.*grad_wire_dtype='bf16'"):
        run_cli(f"--trainer.strategy={CLASS}", hook)


def fit_by_cli(*arguments: str) -> dict[str, Any]:
    return weights_of(run_cli("fit", *arguments, run=True).model)


def test_it_fits_as_ddp_does(ranks: Ranks) -> None:
    """The subcommand and all: one line of a config differs."""
    ddp = "lightning.pytorch.strategies.DDPStrategy"
    theirs = ranks.run(fit_by_cli, f"--trainer.strategy={ddp}", "--trainer.strategy.find_unused_parameters=true")
    ours = ranks.run(fit_by_cli, f"--trainer.strategy={CLASS}", "--trainer.strategy.bucket_size=100")
    by_name = ranks.run(fit_by_cli, "--trainer.strategy=megatron_ddp")
    untrained = weights_of(Module())
    for theirs_of_rank, *ours_of_rank in zip(theirs, ours, by_name, strict=True):
        assert not (theirs_of_rank["out.weight"] == untrained["out.weight"]).all()
        for weights in ours_of_rank:
            assert_same_tensors(weights, theirs_of_rank)


# --- the signature ---------------------------------------------------------------------------------------------------
