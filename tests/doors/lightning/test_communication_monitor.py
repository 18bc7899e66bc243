"""The CommunicationMonitor's numbers in the log: when they come, and what bytes they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from megastrategy import CommunicationMonitor

from ..fits import BATCHES_PER_EPOCH, MemoryLogger, fit, loader, make_strategy, make_trainer
from ..monitored_fits import (
    MODES,
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


# --- manual optimization ---------------------------------------------------------------------------------------------


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
