"""The CommunicationMonitor's numbers in the log: when they come, and what bytes they count."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger

import megastrategy
from megastrategy import CommunicationMonitor

from ..fits import BATCHES_PER_EPOCH, AwkwardModule, MemoryLogger, fit, loader, make_strategy, make_trainer
from ..monitored_fits import (
    MODES,
    NET_NUMEL,
    SENT_BYTES,
    Lines,
    Net,
    Overflows,
    column,
    half_precision,
    lines_of,
    monitored,
    norms_of_both,
    padded_numel,
    steps_of,
)
from ..rank_processes import SIZE, Ranks

# --- bytes ---------------------------------------------------------------------------------------------------------


class Odd(Net):
    """Sizes that do not fill their buckets: 35, 7, 77 and 11 elements."""

    def __init__(self) -> None:
        super().__init__(hidden=7, bias=True)


LOW = {"grad_reduce_in_fp32": False}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mode", "precision", "options", "bytes_an_element"),
    [
        ("reduce-scatter", "32-true", {}, 4 + 4),
        ("all-reduce", "32-true", {}, 2 * 4),
        ("flattened", "32-true", {}, 2 * 4),
        ("reduce-scatter", "bf16-true", {}, 4 + 2),
        ("reduce-scatter", "bf16-true", LOW, 2 + 2),
        ("all-reduce", "bf16-true", {}, 2 * 4),
        ("reduce-scatter", "32-true", {"grad_wire_dtype": "bf16"}, 2 + 4),
        ("reduce-scatter", "32-true", {"grad_wire_dtype": "fp16"}, 2 + 4),
    ],
)
def test_sent_bytes_are_those_of_the_formula(
    ranks: Ranks, mode: str, precision: str, options: dict[str, Any], bytes_an_element: int
) -> None:
    """(d-1)/d of a bucket for the reduce-scatter, and for the gather; twice that for an all-reduce; with padding."""
    options = {**MODES[mode], **options}
    for lines in ranks.run(monitored, Odd, options, precision=precision, max_epochs=1, limit_train_batches=3):
        elements = padded_numel(5 * 7, 7, 7 * 11, 11)
        assert column(lines, "sent_bytes") == [bytes_an_element * elements * (SIZE - 1) / SIZE] * 3


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_microbatches_send_nothing(ranks: Ranks, mode: str) -> None:
    """Windows of 3, 3 and 1 batches: each is sent once, as a batch without accumulation is."""
    for lines in ranks.run(monitored, Net, MODES[mode], accumulate_grad_batches=3, max_epochs=1):
        assert steps_of(lines) == [0, 1, 2]
        assert column(lines, "sent_bytes") == [SENT_BYTES] * 3


class Unfreezes(Net):
    """Its first layer joins the training with the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.outputs.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.inputs.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.inputs.parameters())})


@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_bytes_grow_when_a_layer_is_unfrozen(ranks: Ranks, mode: str) -> None:
    before, after = (8 * numel * (SIZE - 1) / SIZE for numel in (128 * 11, NET_NUMEL))
    for lines in ranks.run(monitored, Unfreezes, MODES[mode], log_every_n_steps=BATCHES_PER_EPOCH):
        assert column(lines, "sent_bytes") == [before, after]


# --- when it logs ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 1), (4, 1), (50, 1), (1, 3), (4, 3), (0, 1)])
def test_it_logs_when_the_loss_is_logged_and_at_the_end(ranks: Ranks, every: int, accumulate: int) -> None:
    """Under the same steps, so that the two can be plotted over each other; nothing is logged twice."""
    for logged in ranks.run(everything_logged, log_every_n_steps=every, accumulate_grad_batches=accumulate):
        num_steps = 2 * -(-BATCHES_PER_EPOCH // accumulate)
        expected = list(range(every - 1, num_steps, every)) if every else []
        assert expected == [step for step, values in logged if "train_loss" in values]
        if every and num_steps % every:
            expected.append(num_steps - 1)
        lines = lines_of(logged)
        assert steps_of(lines) == expected
        assert column(lines, "sent_bytes") == [SENT_BYTES] * len(expected), "averaged over the steps of its window"


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 3)])
def test_the_norm_is_that_of_ddp_before_clipping(ranks: Ranks, every: int, accumulate: int) -> None:
    ours, whole = ranks.run(norms_of_both, log_every_n_steps=every, accumulate_grad_batches=accumulate)[0]
    assert len(whole) > 1
    assert steps_of(ours) == steps_of(whole)
    for (_, norms), (_, expected) in zip(ours, whole, strict=True):
        assert norms["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert norms["grad_norm"] > 0.05, "before clipping"


def everything_logged(**options: Any) -> Lines:
    return fit(
        "megatron_ddp",
        strategy_options={"bucket_size": 1},
        module=Net(),
        callbacks=[CommunicationMonitor()],
        **options,
    ).logged


def test_every_logger_gets_every_number(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(log_to_two_loggers, str(tmp_path))
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["communication/sent_bytes"]]
    assert [int(row["step"]) for row in rows] == [2, 5, 6]
    assert [float(row["communication/sent_bytes"]) for row in rows] == [SENT_BYTES] * 3
    names = {name.removeprefix("communication/") for name in rows[0] if name.startswith("communication/")}
    assert names == {"exposed_ms", "sent_bytes", "grad_norm"}


def log_to_two_loggers(folder: str) -> None:
    memory = MemoryLogger()
    loggers = [CSVLogger(folder, name="csv", version=""), memory]
    trainer = make_trainer(
        make_strategy("megatron_ddp", bucket_size=1),
        logger=loggers,
        callbacks=[CommunicationMonitor()],
        log_every_n_steps=3,
        max_epochs=1,
    )
    trainer.fit(Net(), loader())
    assert steps_of(lines_of(memory.history)) == [2, 5, 6]


def test_a_resumed_fit_goes_on_at_its_step(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in ranks.run(fit_and_resume, str(tmp_path / "last.ckpt")):
        assert steps_of(first) == [3, 6]
        assert steps_of(second) == [7, 11, 13], "every fourth of all steps, then what is left"
        assert column(second, "sent_bytes") == [SENT_BYTES] * 3


def fit_and_resume(path: str) -> tuple[Lines, Lines]:
    logs = []
    for epochs, checkpoint in ((1, None), (2, path)):
        logger = MemoryLogger()
        trainer = make_trainer(
            make_strategy("megatron_ddp", bucket_size=1),
            logger=logger,
            callbacks=[CommunicationMonitor()],
            log_every_n_steps=4,
            max_epochs=epochs,
        )
        trainer.fit(Net(), loader(), ckpt_path=checkpoint)
        if checkpoint is None:
            trainer.save_checkpoint(path)
        logs.append(lines_of(logger.history))
    return logs[0], logs[1]


def test_one_callback_serves_two_fits(ranks: Ranks) -> None:
    """The second starts from zero."""
    for first, second in ranks.run(fit_twice_with_one_callback):
        assert steps_of(first) == steps_of(second) == list(range(7))
        assert column(second, "sent_bytes") == [SENT_BYTES] * 7


def fit_twice_with_one_callback() -> tuple[Lines, Lines]:
    monitor, logs = CommunicationMonitor(), []
    for module, plugins in ((Overflows(), [half_precision()]), (Net(), [])):
        options = {"module": module, "callbacks": [monitor], "max_epochs": 1, "plugins": plugins}
        logs.append(lines_of(fit("megatron_ddp", strategy_options={"bucket_size": 1}, **options).logged))
    return logs[0], logs[1]


class WithRate(Net):
    """Has what the learning rate finder sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_the_trial_run_of_the_learning_rate_finder_is_not_counted(ranks: Ranks, tmp_path: Path) -> None:
    for lines in ranks.run(monitored_after_a_trial, str(tmp_path)):
        assert steps_of(lines) == [3, 6]
        assert column(lines, "sent_bytes") == [SENT_BYTES] * 2


def monitored_after_a_trial(folder: str) -> Lines:
    """The finder comes first, so that its trial runs inside of the monitored fit's start."""
    finder = LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    options = {"callbacks": [finder], "log_every_n_steps": 4, "max_epochs": 1, "default_root_dir": folder}
    return monitored(WithRate, None, **options)


# --- manual optimization ---------------------------------------------------------------------------------------------


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class StepsEveryThirdBatch(Manual):
    """Accumulates by hand: steps after the third, sixth and last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        last = batch_idx % 3 == 2 or batch_idx == BATCHES_PER_EPOCH - 1
        if last:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            self.optimizers().zero_grad()
        else:
            with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch))


class SendsTwiceAStep(Manual):
    """Two synchronised backwards, each reduced, before a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class TwoOptimizers(Manual):
    """One a layer, stepped one after the other: 14 optimizer steps an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.inputs, self.outputs)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("module", "steps", "sent_bytes"),
    [
        (StepsEveryThirdBatch, [5, 6], SENT_BYTES),
        (SendsTwiceAStep, [1, 3, 5, 6], SENT_BYTES * 3 / 2),
        (TwoOptimizers, [0, 1, 2, 3, 4, 5, 6], SENT_BYTES / 2),
    ],
)
def test_manual_optimization_is_counted_by_optimizer_steps(
    ranks: Ranks, module: Callable[[], pl.LightningModule], steps: list[int], sent_bytes: float
) -> None:
    """Logged every second optimizer step, under the number of the batch."""
    for lines in ranks.run(monitored, module, log_every_n_steps=2, max_epochs=1):
        assert steps_of(lines) == steps
        assert column(lines, "sent_bytes") == [sent_bytes] * len(steps)


# --- skipped steps ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_a_grad_scaler_skips_sends_no_weights(ranks: Ranks, mode: str) -> None:
    for lines in ranks.run(monitored_with_overflow, MODES[mode]):
        expected = [SENT_BYTES] * 14
        if mode == "reduce-scatter":
            expected[3] = SENT_BYTES / 2
        assert column(lines, "sent_bytes") == expected


def monitored_with_overflow(strategy_options: dict[str, Any]) -> Lines:
    return monitored(Overflows, strategy_options, plugins=[half_precision()])


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_without_a_logger_or_the_strategy_it_says_so(ranks: Ranks) -> None:
    ranks.run(fit_without_what_it_needs)


def fit_without_what_it_needs() -> None:
    trainer = make_trainer(make_strategy("megatron_ddp"), callbacks=[CommunicationMonitor()], logger=False)
    with pytest.raises(
        MisconfigurationException, match=r"`CommunicationMonitor` callback with `Trainer\(logger=False\)`"
    ):
        trainer.fit(Net(), loader())
    trainer = make_trainer(make_strategy("ddp"), callbacks=[CommunicationMonitor()], logger=MemoryLogger())
    with pytest.raises(MisconfigurationException, match=r"is lightning\.pytorch\.strategies\.ddp\.DDPStrategy: choose"):
        trainer.fit(Net(), loader())


def test_evaluation_alone_needs_neither(ranks: Ranks) -> None:
    """The same list of callbacks serves ``trainer.validate``."""
    ranks.run(validate_only)


def validate_only() -> None:
    trainer = make_trainer(make_strategy("ddp"), callbacks=[CommunicationMonitor()], logger=False)
    trainer.validate(AwkwardModule(), loader(), verbose=False)


def test_each_package_has_its_own(ranks: Ranks) -> None:
    assert megastrategy.CommunicationMonitor is importlib.import_module("megastrategy.lightning").CommunicationMonitor
    for lines in ranks.run(fit_in_pytorch_lightning):
        assert steps_of(lines) == [2, 5, 6]
        assert column(lines, "sent_bytes") == [SENT_BYTES] * 3


def fit_in_pytorch_lightning() -> Lines:
    other = importlib.import_module("pytorch_lightning")
    door = importlib.import_module("megastrategy.pytorch_lightning")
    module = type(
        "Module", (other.LightningModule,), {"loss": Net.loss, "configure_optimizers": Net.configure_optimizers}
    )
    net, layers = module(), Net()
    net.inputs, net.outputs = layers.inputs, layers.outputs
    net.training_step = lambda batch, batch_idx: net.loss(batch)
    logger = MemoryLogger()
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "log_every_n_steps": 3, "logger": logger}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = door.MegatronDDPStrategy(bucket_size=1)
    trainer = other.Trainer(strategy=strategy, callbacks=[door.CommunicationMonitor()], **options, **quiet)
    trainer.fit(net, loader())
    unlogged = other.Trainer(
        strategy=door.MegatronDDPStrategy(),
        callbacks=[door.CommunicationMonitor()],
        **{**options, "logger": False},
        **quiet,
    )
    exceptions = importlib.import_module("pytorch_lightning.utilities.exceptions")
    with pytest.raises(exceptions.MisconfigurationException, match="logger=False"):
        unlogged.fit(net, loader())
    return lines_of(logger.history)
