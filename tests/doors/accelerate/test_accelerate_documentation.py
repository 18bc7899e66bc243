"""The examples of Accelerate's documentation, under its own Accelerator and under ours.

Each is written as the documentation has it; the model and the data are small.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, both_modes, make_accelerator, weights_of

NUM_SAMPLES = 30  # 8 batches of 4, the last one short: 4 a rank, and the last one filled up


def make_data(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=batch_size)


def make_model(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 6))


def start(name: str, mode: dict[str, Any], **options: Any) -> Any:
    return make_accelerator(name, mode, find_unused=False, **options)


def gradient_accumulation(name: str, mode: dict[str, Any]) -> Any:
    """usage_guides/gradient_accumulation."""
    accelerator = start(name, mode, gradient_accumulation_steps=3)
    model, training_dataloader = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    losses = []
    for _ in range(2):
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                x, targets = batch
                loss = F.cross_entropy(model(x), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses, scheduler.get_last_lr(), weights_of(accelerator.unwrap_model(model))


def tokens_over_devices(name: str, mode: dict[str, Any]) -> Any:
    """usage_guides/gradient_accumulation, "Gradient accumulation on training samples of variable size"."""
    accelerator = start(name, mode, gradient_accumulation_steps=2)
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    batches = iter(data)
    for _ in range(2):
        window = [next(batches), next(batches)]
        num_items = accelerator.gather(torch.tensor(sum(len(targets) for _, targets in window))).sum().item()
        for number, (x, targets) in enumerate(window):
            context = accelerator.no_sync(model) if number == 0 else torch.enable_grad()
            with context:
                loss = F.cross_entropy(model(x), targets, reduction="sum")
                loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / num_items
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(accelerator.unwrap_model(model))


def early_stopping(name: str, mode: dict[str, Any]) -> Any:
    """concept_guides/deferring_execution: one rank asks, and all stop."""
    accelerator = start(name, mode)
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    steps = 0
    for number, (x, targets) in enumerate(data):
        loss = F.cross_entropy(model(x), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if accelerator.is_last_process and number == 1:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return steps, weights_of(accelerator.unwrap_model(model))


def multiple_models(name: str, mode: dict[str, Any]) -> Any:
    """usage_guides/deepspeed_multiple_model, without DeepSpeed: a student, and a teacher that is not trained."""
    accelerator = start(name, mode)
    student, teacher = make_model(1), make_model(2)
    for param in teacher.parameters():
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    student, optimizer, data = accelerator.prepare(student, optimizer, make_data())
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    losses = []
    for x, _ in data:
        with torch.no_grad():
            aim = teacher(x)
        loss = F.mse_loss(student(x), aim)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(accelerator.unwrap_model(student))


def metrics(name: str, mode: dict[str, Any]) -> Any:
    """quicktour, "Distributed evaluation": what fills the last batch up is dropped."""
    accelerator = start(name, mode)
    model, data = accelerator.prepare(make_model(), make_data())
    model.eval()
    predictions, references = [], []
    for x, targets in data:
        with torch.no_grad():
            outputs = model(x)
        all_predictions, all_targets = accelerator.gather_for_metrics((outputs.argmax(-1), targets))
        predictions.append(all_predictions)
        references.append(all_targets)
    assert len(torch.cat(references)) == NUM_SAMPLES
    return torch.cat(predictions), torch.cat(references)


def join(name: str, mode: dict[str, Any]) -> Any:
    """``join_uneven_inputs`` around even batches, which accelerate says does nothing on CPUs."""
    accelerator = start(name, mode)
    net = make_model()
    model, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), make_data())
    with accelerator.join_uneven_inputs([model], even_batches=True):
        for x, targets in data:
            accelerator.backward(F.cross_entropy(model(x), targets))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


@pytest.mark.sample(1)
@both_modes
@pytest.mark.parametrize(
    "example",
    [gradient_accumulation, tokens_over_devices, early_stopping, multiple_models, metrics, join],
    ids=lambda job: job.__name__,
)
def test_an_example_ends_in_the_bits_of_torch_ddp(
    worlds: Worlds, example: Callable[..., Any], mode: dict[str, Any]
) -> None:
    assert_equal(worlds.run(example, "megatron_ddp", mode), worlds.run(example, "ddp", mode))


def tracking(name: str, folder: Path) -> list[float]:
    """usage_guides/tracking, with TensorBoard and a tracker of one's own."""
    from accelerate.tracking import GeneralTracker, on_main_process

    class Remembering(GeneralTracker):
        name = "remembering"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.values: list[float] = []

        @property
        def tracker(self) -> list[float]:
            return self.values

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.configuration = values

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.values.append(values["train_loss"])

    accelerator = make_accelerator(
        name, find_unused=False, log_with=["tensorboard", Remembering()], project_dir=str(folder)
    )
    accelerator.init_trackers("example", config={"lr": 0.1})
    model, data = make_model(), make_data()
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for step, (x, targets) in enumerate(data):
        loss = F.cross_entropy(model(x), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train_loss": loss.item()}, step=step)
    values: list[float] = accelerator.get_tracker("remembering", unwrap=True) if accelerator.is_main_process else []
    for tracker in accelerator.trackers:
        tracker.finish()
    return values


def test_tracking(worlds: Worlds, tmp_path: Path) -> None:
    ours = worlds.run(tracking, "megatron_ddp", tmp_path / "ours")
    assert ours == worlds.run(tracking, "ddp", tmp_path / "theirs")
    assert len(ours[0]) == 4
    assert list((tmp_path / "ours").rglob("events.out.tfevents.*"))


def automatic_batch_size(name: str, mode: dict[str, Any], outside: bool) -> tuple[list[int], dict[str, Tensor]]:
    """usage_guides/explore, "Avoid CUDA out-of-memory": tried again with less until it fits.

    Args:
        outside: the model is made once, outside of what is tried.
    """
    from accelerate.utils import find_executable_batch_size

    accelerator = start(name, mode)
    made = make_model()
    tried = []

    @find_executable_batch_size(starting_batch_size=4, reduce_batch_size_fn=lambda: tried[-1] // 2)  # type: ignore[untyped-decorator]
    def inner_training_loop(batch_size: int) -> dict[str, Tensor]:
        accelerator.free_memory()
        net = made if outside else make_model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, optimizer, data = accelerator.prepare(net, optimizer, make_data(batch_size))
        tried.append(batch_size)
        for x, targets in data:
            loss = F.cross_entropy(model(x), targets)
            if len(x) > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(net)

    weights: dict[str, Tensor] = inner_training_loop()
    return tried, weights


@both_modes
@pytest.mark.parametrize("outside", [False, True])
def test_automatic_batch_size(worlds: Worlds, mode: dict[str, Any], outside: bool) -> None:
    expected = worlds.run(automatic_batch_size, "ddp", mode, outside)
    assert expected[0][0] == [4, 2]
    assert_equal(worlds.run(automatic_batch_size, "megatron_ddp", mode, outside), expected)


def checkpointing(name: str, mode: dict[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    """usage_guides/checkpoint: state is saved, training goes on, and is taken back."""
    accelerator = start(name, mode)
    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    my_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.99)
    model, optimizer, data = accelerator.prepare(net, optimizer, make_data())
    accelerator.register_for_checkpointing(my_scheduler)
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    ends = []
    for _ in range(2):
        for _ in range(2):
            for x, targets in data:
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(x), targets))
                optimizer.step()
            my_scheduler.step()
        ends.append(weights_of(net))
        accelerator.load_state(str(folder))
    return ends


@both_modes
def test_checkpointing(worlds: Worlds, mode: dict[str, Any], tmp_path: Path) -> None:
    expected = worlds.run(checkpointing, "ddp", mode, tmp_path / "theirs")
    ours = worlds.run(checkpointing, "megatron_ddp", mode, tmp_path / "ours")
    assert_equal(ours, expected)
    assert_equal(ours[0][1], ours[0][0])
