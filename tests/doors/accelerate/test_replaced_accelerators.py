"""``replace_accelerators``: a block of code whose Accelerators are ours, and nothing of it afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState

from megastrategy.accelerate import Accelerator, MegatronDDPPlugin, replace_accelerators
from megastrategy.accelerate.accelerator import Accelerator as Ours
from tests.support.ports import free_port

from ..python_processes import run_python

TheirClass = accelerate.Accelerator
METHODS = [(cls, vars(cls).get("__init__"), vars(cls).get("__new__")) for cls in (TheirClass, Ours)]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Whatever a test does, the classes are theirs again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert [(cls, vars(cls).get("__init__"), vars(cls).get("__new__")) for cls, _, _ in METHODS] == METHODS


def made(**options: Any) -> Any:
    return TheirClass(cpu=True, **options)


def test_accelerators_of_a_block_are_ours_and_those_after_it_theirs_twice() -> None:
    for bucket_size in (7, 8):
        with replace_accelerators(MegatronDDPPlugin(bucket_size=bucket_size)):
            accelerator = made(gradient_accumulation_steps=3)
            assert type(accelerator) is Accelerator
            assert accelerator.megatron_ddp_config.bucket_size == bucket_size
            assert accelerator.gradient_accumulation_steps == 3
            assert list(inspect.signature(TheirClass).parameters)[:2] == ["device_placement", "split_batches"]
        after = made(gradient_accumulation_steps=2)
        assert type(after) is TheirClass
        assert after.gradient_accumulation_steps == 2
        # what was made in the block goes on
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.backward(model(torch.ones(1, 2)).sum())


def test_launched_processes_that_train_apart_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate launch starts two on a machine without GPUs."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2, .* one process: .* set ACCELERATE_USE_CPU=true"):
        Accelerator()
    monkeypatch.setenv("RANK", "1")
    Accelerator()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    Accelerator()


def test_it_ends_with_an_exception_and_decorates_a_function() -> None:
    @replace_accelerators(MegatronDDPPlugin(bucket_size=9))
    def train(fails: bool) -> Any:
        if fails:
            raise ZeroDivisionError
        return made()

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train(True)
        assert type(made()) is TheirClass
        assert train(False).megatron_ddp_config.bucket_size == 9


NOTEBOOK = """
import sys

import torch
from accelerate import Accelerator, notebook_launcher
from torch.utils.data import DataLoader, TensorDataset

from megastrategy.accelerate import MegatronDDPPlugin, replace_accelerators


def train(name):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    model, optimizer, data = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01), data)
    for _ in range(2):
        for (inputs,) in data:
            optimizer.zero_grad()
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
    saw = {"made": type(accelerator).__module__, "ranks": accelerator.num_processes}
    ours = saw["made"] != "accelerate.accelerator"
    saw |= {"weights": module.state_dict(), "buckets": len(model.layout.buckets) if ours else 0}
    torch.save(saw, f"{name}.{accelerator.process_index}")
    accelerator.end_training()


port = sys.argv[1]
with replace_accelerators(MegatronDDPPlugin(bucket_size=32)):
    notebook_launcher(train, ("block",), num_processes=2, use_port=port)
notebook_launcher(replace_accelerators(MegatronDDPPlugin(bucket_size=32))(train), ("decorated",), 2, use_port=port)
notebook_launcher(train, ("stock",), num_processes=2, use_port=port)
"""


@pytest.mark.long
@pytest.mark.fresh
def test_a_function_that_notebook_launcher_starts_trains_to_the_bits_of_torch_ddp(tmp_path: Path) -> None:
    """In a block around it, whose processes are forked, or decorated; and after that stock again."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    run_python("notebook.py", str(free_port()), cwd=tmp_path, environment={"ACCELERATE_USE_CPU": "true"})
    for rank in range(2):
        stock, *ours = (torch.load(tmp_path / f"{name}.{rank}") for name in ("stock", "block", "decorated"))
        assert (stock["made"], stock["ranks"]) == ("accelerate.accelerator", 2)
        for saw in ours:
            assert (saw["made"], saw["ranks"], saw["buckets"]) == ("megastrategy.accelerate", 2, 2)
            for name, value in stock["weights"].items():
                torch.testing.assert_close(saw["weights"][name], value, rtol=0, atol=0)
