"""What a user sees of communication: the CommunicationMonitor's numbers in the log, and the end of a fit with NaN."""

from __future__ import annotations

import csv
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

import megastrategy
from megastrategy import CommunicationMonitor, MegatronDDPStrategy
from megastrategy._lightning.communication_monitor import _KEPT_INTERVALS, _Record
from megastrategy.core import Event, EventKind, private_group
from megastrategy.core.errors import NonFiniteGradError

from ..support.doubles import DelayingCollectives
from .fits import (
    BATCHES_PER_EPOCH,
    AwkwardModule,
    Fit,
    MemoryLogger,
    adamw,
    assert_same_fit,
    fit,
    loader,
    make_strategy,
    make_trainer,
)
from .rank_processes import SIZE, Ranks

MODES: dict[str, dict[str, Any]] = {
    "reduce-scatter": {},
    "all-reduce": {"use_distributed_optimizer": False},
    "flattened": {
        "use_distributed_optimizer": False,
        "use_contiguous_buffers": False,
        "overlap_grad_reduce": False,
    },
}
ALIGNMENT = 128
"""A bucket's elements are rounded up to a multiple of it, with two ranks."""

Lines = list[tuple[int | None, dict[str, float]]]


class Net(pl.LightningModule):
    """With ``bucket_size=1`` each of its tensors is a bucket, of sizes known without asking the engine."""

    def __init__(self, hidden: int = 128, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(5, hidden, bias=bias)
        self.outputs = nn.Linear(hidden, 11, bias=bias)

    def loss(self, batch: Any) -> Tensor:
        features, _, targets = batch
        return F.cross_entropy(self.outputs(torch.tanh(self.inputs(features.to(self.dtype)))).float(), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded_numel(*numels: int) -> int:
    return sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels)


NET_NUMEL = padded_numel(5 * 128, 128 * 11)
assert NET_NUMEL == 5 * 128 + 128 * 11, "no padding"
SENT_BYTES = 8 * NET_NUMEL * (SIZE - 1) / SIZE
"""A step of Net in fp32, reduce-scattered and gathered, or all-reduced."""


def monitored(
    module: Callable[[], pl.LightningModule] = Net, strategy_options: dict[str, Any] | None = None, **options: Any
) -> Lines:
    """What the monitor logged on this rank, without its prefix."""
    result = fit(
        "megatron_ddp",
        strategy_options={"bucket_size": 1, **(strategy_options or {})},
        module=module(),
        callbacks=[CommunicationMonitor(), *options.pop("callbacks", [])],
        **options,
    )
    return lines_of(result.logged)


def lines_of(logged: Lines) -> Lines:
    prefix = "communication/"
    return [
        (step, {key.removeprefix(prefix): value for key, value in values.items()})
        for step, values in logged
        if any(key.startswith(prefix) for key in values)
    ]


def column(lines: Lines, name: str) -> list[float]:
    return [values[name] for _, values in lines]


def steps_of(lines: Lines) -> list[int | None]:
    return [step for step, _ in lines]


# --- bytes and buckets -----------------------------------------------------------------------------------------------


class Odd(Net):
    """Sizes that do not fill their buckets: 35, 7, 77 and 11 elements."""

    def __init__(self) -> None:
        super().__init__(hidden=7, bias=True)


LOW = {"grad_reduce_in_fp32": False}


@pytest.mark.parametrize(
    ("mode", "precision", "options", "bytes_an_element"),
    [
        ("reduce-scatter", "32-true", {}, 4 + 4),
        ("all-reduce", "32-true", {}, 2 * 4),
        ("flattened", "32-true", {}, 2 * 4),
        ("reduce-scatter", "bf16-true", {}, 4 + 2),
        ("reduce-scatter", "bf16-true", LOW, 2 + 2),
        ("all-reduce", "bf16-true", {}, 2 * 4),
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
        assert column(lines, "buckets") == [4] * 3
        assert column(lines, "skipped_steps") == [0] * 3


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
def test_buckets_and_bytes_grow_when_a_layer_is_unfrozen(ranks: Ranks, mode: str) -> None:
    before, after = (8 * numel * (SIZE - 1) / SIZE for numel in (128 * 11, NET_NUMEL))
    for lines in ranks.run(monitored, Unfreezes, MODES[mode], log_every_n_steps=BATCHES_PER_EPOCH):
        assert column(lines, "buckets") == [1, 2]
        assert column(lines, "sent_bytes") == [before, after]


# --- when it logs ----------------------------------------------------------------------------------------------------


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
        rows = [row for row in csv.DictReader(file) if row["communication/buckets"]]
    assert [int(row["step"]) for row in rows] == [2, 5, 6]
    assert [float(row["communication/sent_bytes"]) for row in rows] == [SENT_BYTES] * 3
    names = {name for name in rows[0] if name.startswith("communication/")}
    assert names == {
        f"communication/{name}"
        for name in (
            "exposed_ms",
            "exposed_gradients_ms",
            "exposed_parameters_ms",
            "exposed_share",
            "sent_bytes",
            "buckets",
            "skipped_steps",
        )
    }


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
    """The second starts from zero; what the first skipped is no longer told."""
    for first, second in ranks.run(fit_twice_with_one_callback):
        assert column(first, "skipped_steps") == [0.0] * 3 + [1.0] * 4
        assert column(second, "skipped_steps") == [0.0] * 7
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
        assert column(lines, "skipped_steps") == [0, 0]


def monitored_after_a_trial(folder: str) -> Lines:
    """The finder stands first, so that its trial runs inside of the monitored fit's start."""
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
    """Two synchronised backwards, each of which is reduced, before a step."""

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


class BareOptimizer(Manual):
    """Without Lightning's wrapper, so that the Trainer counts no step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers(use_pl_optimizer=False).step()
        self.optimizers(use_pl_optimizer=False).zero_grad()


@pytest.mark.parametrize(
    ("module", "steps", "sent_bytes"),
    [
        (StepsEveryThirdBatch, [5, 6], SENT_BYTES),
        (SendsTwiceAStep, [1, 3, 5, 6], SENT_BYTES * 3 / 2),
        (TwoOptimizers, [0, 1, 2, 3, 4, 5, 6], SENT_BYTES / 2),
        (BareOptimizer, [1, 3, 5, 6], SENT_BYTES),
    ],
)
def test_manual_optimization_is_counted_by_optimizer_steps(
    ranks: Ranks, module: Callable[[], pl.LightningModule], steps: list[int], sent_bytes: float
) -> None:
    """Logged every second optimizer step, under the number of the batch."""
    for lines in ranks.run(monitored, module, log_every_n_steps=2, max_epochs=1):
        assert steps_of(lines) == steps
        assert column(lines, "sent_bytes") == [sent_bytes] * len(steps)
        assert column(lines, "skipped_steps") == [0] * len(steps)


# --- skipped steps ---------------------------------------------------------------------------------------------------


class Overflows(Net):
    """The gradient of one element is infinite on rank 1 in the fourth batch of the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 3 and self.current_epoch == 0:
            loss = loss + torch.tensor(float("inf")) * self.outputs.weight[0, 0]
        return loss


def half_precision(**options: Any) -> MixedPrecision:
    """On CPU Lightning makes bf16 of "16-mixed" unless it is given a plugin with a scaler."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options}))


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_a_grad_scaler_skips_are_counted(ranks: Ranks, mode: str) -> None:
    """Gradients were sent for nothing, and no weights."""
    for lines in ranks.run(monitored_with_overflow, MODES[mode]):
        assert column(lines, "skipped_steps") == [0] * 3 + [1] * 11
        expected = [SENT_BYTES] * 14
        if mode == "reduce-scatter":
            expected[3] = SENT_BYTES / 2
        assert column(lines, "sent_bytes") == expected


def monitored_with_overflow(strategy_options: dict[str, Any]) -> Lines:
    return monitored(Overflows, strategy_options, plugins=[half_precision()])


# --- exposed communication -------------------------------------------------------------------------------------------

DELAY_S = 0.02


class DelayingGathers(DelayingCollectives):
    """The gather of parameters is late too."""

    def all_gather(self, tensor: Tensor) -> Any:
        start = getattr(self._real, "_start")  # noqa: B009 - the worker of the real one, on purpose
        start("delay", lambda: time.sleep(self._delay_s))
        return super().all_gather(tensor)


@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_exposed_communication_is_what_training_waits_for(ranks: Ranks, mode: str) -> None:
    """The first of two buckets may hide behind the launch of the second; the delay of the second cannot hide."""
    for lines, seconds in ranks.run(monitored_with_delays, MODES[mode], log_every_n_steps=2):
        assert len(lines) == 2
        for _, values in lines:
            assert values["exposed_gradients_ms"] >= DELAY_S * 1e3
            if mode == "reduce-scatter":
                assert values["exposed_parameters_ms"] >= DELAY_S * 1e3
            else:
                assert values["exposed_parameters_ms"] == 0
            assert values["exposed_ms"] == values["exposed_gradients_ms"] + values["exposed_parameters_ms"]
            assert 0 < values["exposed_share"] <= 1
        assert 2 * lines[0][1]["exposed_ms"] + lines[1][1]["exposed_ms"] < seconds * 1e3, "steps of 2 and of 1"


def test_the_share_is_of_the_time_in_batches(ranks: Ranks) -> None:
    """What a batch computes belongs to it, what happens between two batches does not."""
    for lines, seconds in ranks.run(monitored_with_delays, {}, module=Sleeps):
        batches_ms = [values["exposed_ms"] / values["exposed_share"] for _, values in lines]
        for (_, values), batch_ms in zip(lines, batches_ms, strict=True):
            assert batch_ms >= values["exposed_ms"] + SLEEP_S * 1e3
        assert sum(batches_ms) <= (seconds - len(lines) * SLEEP_S) * 1e3


def test_the_share_of_several_steps_is_of_all_their_batches(ranks: Ranks) -> None:
    for lines, seconds in ranks.run(monitored_with_delays, {}, module=Sleeps, log_every_n_steps=2):
        steps = [2, 1]
        shares = [values["exposed_ms"] / values["exposed_share"] for _, values in lines]
        batches_ms = [count * share for count, share in zip(steps, shares, strict=True)]
        for (_, values), batch_ms, count in zip(lines, batches_ms, steps, strict=True):
            assert batch_ms >= count * (values["exposed_ms"] + SLEEP_S * 1e3)
        assert sum(batches_ms) <= (seconds - sum(steps) * SLEEP_S) * 1e3


SLEEP_S = 0.1


class Sleeps(Net):
    """In its batches, and between them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        time.sleep(SLEEP_S)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(SLEEP_S)


def monitored_with_delays(
    strategy_options: dict[str, Any], module: Callable[[], pl.LightningModule] = Net, **options: Any
) -> tuple[Lines, float]:
    """What was logged, and the seconds that the fit took."""

    def collectives(device: torch.device, agreed: bool) -> DelayingCollectives:
        return DelayingGathers(private_group(None, device), DELAY_S)

    start = time.perf_counter()
    with mock.patch("megastrategy._lightning.trainer_strategy.engine_collectives", collectives):
        lines = monitored(module, strategy_options, max_epochs=1, limit_train_batches=3, **options)
    return lines, time.perf_counter() - start


class CountingClock:
    """A millisecond passes with every look."""

    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        self.time += 1
        return self.time

    def elapsed_ms(self, start: int, end: int) -> float:
        return end - start


def test_a_collective_is_charged_by_the_buckets_of_its_time() -> None:
    """Of three buckets there are two when the step is logged."""
    numels = [128, 256, 640]
    record = _Record(CountingClock(), lambda kind, bucket: numels[bucket])  # type: ignore[arg-type]
    for bucket in range(3):
        record(Event(EventKind.REDUCE_START, bucket))
    numels[:] = [896, 128]
    record(Event(EventKind.LAYOUT_CHANGED, 2))
    for bucket in range(2):
        record(Event(EventKind.GATHER_START, bucket))
    assert record.take()[1] == 2 * 1024


def test_a_rare_log_keeps_no_more_intervals_and_adds_up_all() -> None:
    """On CUDA each holds two events."""
    record = _Record(CountingClock(), lambda kind, bucket: 0)  # type: ignore[arg-type]
    for _ in range(5 * _KEPT_INTERVALS):
        record(Event(EventKind.WAIT_START, 1))
        record(Event(EventKind.WAIT_END, 1))
        assert len(record._intervals) < 2 * _KEPT_INTERVALS
    assert record.take()[0] == {"gradients": 0, "parameters": 5 * _KEPT_INTERVALS, "batch": 0}
    assert record.take()[0] == {"gradients": 0, "parameters": 0, "batch": 0}


# --- listeners -------------------------------------------------------------------------------------------------------


class SeesListeners(pl.Callback):
    """What the engine calls with its events, in a fit."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model: Any = trainer.strategy.model
        self.seen += [model.engine._listener, model.engine.reducer._listener, model.engine.param_gather._listener]


class AddsListener(pl.Callback):
    """Listens by itself, as a profiler would."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, int]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.add_listener(lambda event: self.events.append((event.kind, event.index)))  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with pytest.raises(RuntimeError, match="set up already: add listeners before"):
            trainer.strategy.add_listener(print)  # type: ignore[attr-defined]


def test_without_the_monitor_the_engine_makes_no_events(ranks: Ranks) -> None:
    """Before, after, and after an exception in a fit that was monitored, with the same strategy object."""
    ranks.run(look_for_listeners)


def look_for_listeners() -> None:
    trainer = make_trainer(make_strategy("megatron_ddp"), max_epochs=0, logger=MemoryLogger())
    usual = trainer.callbacks
    for module, monitors in (
        (Net(), []),
        (Net(), [CommunicationMonitor()]),
        (Net(), []),
        (Raises(), [CommunicationMonitor()]),
        (Net(), []),
    ):
        sees = SeesListeners()
        trainer.callbacks = [*usual, sees, *monitors]
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        if isinstance(module, Raises):
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                trainer.fit(module, loader())
        else:
            trainer.fit(module, loader())
        assert [listener is None for listener in sees.seen] == [not monitors] * 3


class Raises(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 2:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def test_several_listeners_hear_the_same(ranks: Ranks) -> None:
    for lines, first, second in ranks.run(fit_with_three_listeners):
        assert column(lines, "sent_bytes") == [SENT_BYTES] * 7
        assert first == second
        assert first.count((EventKind.STEP_END, 0)) == 7


def fit_with_three_listeners() -> tuple[Lines, Any, Any]:
    others = [AddsListener(), AddsListener()]
    lines = monitored(callbacks=others, max_epochs=1)
    return lines, others[0].events, others[1].events


@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_a_fit_that_is_watched_is_the_same_fit(ranks: Ranks, mode: str) -> None:
    """To the bit."""
    watched, plain = (ranks.run(fit_awkward, MODES[mode], monitor) for monitor in (True, False))
    for mine, other in zip(watched, plain, strict=True):
        mine.logged = [
            (step, values) for step, values in mine.logged if not any(key.startswith("communication") for key in values)
        ]
        assert_same_fit(mine, other)


def fit_awkward(strategy_options: dict[str, Any], monitor: bool) -> Fit:
    callbacks = [CommunicationMonitor()] if monitor else []
    return fit("megatron_ddp", strategy_options=strategy_options, module=AwkwardModule(adamw), callbacks=callbacks)


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


# --- check_for_nan_in_grad -------------------------------------------------------------------------------------------


class BecomesNaN(AwkwardModule):
    """On rank 1 one element of a gradient is NaN in the fourth batch, and nothing else is, on any rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 3:
            self.out.bias.register_hook(poison)
        return loss


def poison(grad: Tensor) -> Tensor:
    spoiled = grad.clone()
    spoiled[2] = float("nan")
    return spoiled


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_nan_on_one_rank_ends_the_fit_on_all_with_its_place(ranks: Ranks, mode: str, accumulate: int) -> None:
    """Also if it came in a microbatch that was not sent; and the next fit in the same processes works."""
    (message, bucket, clean), (other, _, other_clean) = ranks.run(fit_until_nan, MODES[mode], accumulate)
    assert message == other
    assert f"before they were reduced: rank 1, parameter 'out.bias' (bucket {bucket}): 1 of 7 elements. Look" in message
    assert_same_fit(clean, ranks.run(fit, "megatron_ddp", strategy_options=MODES[mode])[0])
    assert all(torch.equal(clean.weights[name], weight) for name, weight in other_clean.weights.items())


def fit_until_nan(mode: dict[str, Any], accumulate: int) -> tuple[str, int, Fit]:
    options = {**mode, "check_for_nan_in_grad": True}
    places = FindsBucket()
    with pytest.raises(NonFiniteGradError) as caught:
        fit(
            "megatron_ddp",
            strategy_options=options,
            module=BecomesNaN(),
            accumulate_grad_batches=accumulate,
            callbacks=[places],
        )
    return str(caught.value), places.bucket, fit("megatron_ddp", strategy_options=options)


class FindsBucket(pl.Callback):
    """The bucket of ``out.bias``, which the first step's order of arrival may change."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        layout: Any = trainer.strategy.model.layout  # type: ignore[union-attr]
        [self.bucket] = [
            slot.bucket for spec, slot in zip(layout.params, layout.slots, strict=True) if spec.name == "out.bias"
        ]


def test_looking_for_nan_is_refused_beside_a_grad_scaler(ranks: Ranks) -> None:
    """The scaler provokes infinite gradients and skips their steps; the check would end the fit at the first."""
    ranks.run(fit_with_check_and_scaler)


def fit_with_check_and_scaler() -> None:
    plugin = half_precision()
    scaler = plugin.scaler
    trainer = make_trainer(MegatronDDPStrategy(check_for_nan_in_grad=True), plugins=[plugin])
    with pytest.raises(ValueError, match="check_for_nan_in_grad=True contradicts the GradScaler of MixedPrecision"):
        trainer.fit(Net(), loader())
    assert plugin.scaler is scaler
    assert type(plugin) is MixedPrecision
    for allowed in ({"precision": "bf16-mixed"}, {"plugins": [half_precision(enabled=False)]}):
        trainer = make_trainer(MegatronDDPStrategy(check_for_nan_in_grad=True), max_epochs=1, **allowed)
        trainer.fit(Net(), loader())
        assert trainer.global_step == BATCHES_PER_EPOCH
