"""``if accelerator.is_main_process: accelerator.save_state(...)``: what most scripts do, and what torch DDP allows."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.comparison import assert_equal
from tests.support.ports import free_port

from ..accelerate_loops import Worlds, adamw, make_accelerator
from ..fits import AwkwardNet
from ..python_processes import run_pythons
from ..rank_processes import assert_failed


def save_on_main(folder: Path) -> list[float]:
    """Saves without the other rank after each step, at the end with it; returns the losses."""
    accelerator = make_accelerator("megatron_ddp", {"use_distributed_optimizer": False})
    net = AwkwardNet().bfloat16()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    losses = []
    for number in range(3):
        loss = model(torch.ones(4, 5).bfloat16(), torch.arange(4)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.is_main_process:
            accelerator.save_state(str(folder / f"{number}"))
    accelerator.save_state(str(folder / "all"))
    return losses


def test_the_main_process_saves_without_the_others_what_is_whole(worlds: Worlds, tmp_path: Path) -> None:
    """With ``use_distributed_optimizer=False``, bf16 weights' fp32 main params too: what all ranks save."""
    first, second = worlds.run(save_on_main, tmp_path)
    assert first == second
    one, all_ranks = (tmp_path / name for name in ("2", "all"))
    names = {path.name for path in one.iterdir()}
    assert "megatron_ddp_main_params.bin" in names
    assert {path.name for path in all_ranks.iterdir()} - names == {"random_states_1.pkl"}
    for name in ("optimizer.bin", "megatron_ddp_main_params.bin"):
        assert_equal(*(torch.load(folder / name) for folder in (one, all_ranks)))
    assert (one / "model.safetensors").read_bytes() == (all_ranks / "model.safetensors").read_bytes()


def save_where_it_cannot(folder: Path, plugin: dict[str, Any], then: str) -> tuple[str, float]:
    """The message, and after how long it came."""
    accelerator = make_accelerator("megatron_ddp", plugin)
    net = AwkwardNet()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))

    def train() -> None:
        accelerator.backward(model(torch.ones(4, 5), torch.arange(4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    train()
    if then == "step":
        accelerator.backward(model(torch.ones(4, 5), torch.arange(4)).square().mean())
    message, start = "", time.monotonic()
    if accelerator.is_main_process:
        with pytest.raises(RuntimeError) as caught:
            accelerator.save_state(str(folder))
        message = f"{type(caught.value).__name__}: {caught.value}"
    seconds = time.monotonic() - start
    if then == "barrier":
        accelerator.wait_for_everyone()
    elif then == "step":
        optimizer.step()
    train()  # all ranks are in step
    return message, seconds


@pytest.mark.parametrize("plugin", [{}, {"state_dict_type": "sharded"}], ids=["file", "directory"])
@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("barrier", "in accelerator.wait_for_everyone()"),
        ("next", "rank 1 is elsewhere, waiting in "),
        ("step", "rank 1 is elsewhere, waiting in "),
    ],
    ids=["barrier", "next-step", "before-the-step"],
)
def test_the_main_process_that_saves_a_sharded_optimizer_without_the_others_is_told_what_to_change(
    worlds: Worlds, tmp_path: Path, plugin: dict[str, Any], then: str, why: str
) -> None:
    (message, seconds), _ = worlds.run(save_where_it_cannot, tmp_path / "saved", plugin, then)
    assert message.startswith("NotOnAllRanksError: ")
    assert why in message
    assert "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`" in message
    assert "`use_distributed_optimizer: false`" in message
    assert seconds < 5


def die_meanwhile(folder: Path) -> None:
    accelerator = make_accelerator("megatron_ddp")
    alive = os.open(folder.with_name("alive"), os.O_RDWR | os.O_CREAT)  # a number: it stays open until the process
    if not accelerator.is_main_process:
        fcntl.flock(alive, fcntl.LOCK_EX)
    net = AwkwardNet()
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    accelerator.backward(model(torch.ones(4, 5), torch.arange(4)).square().mean())
    optimizer.step()
    if not accelerator.is_main_process:
        raise ValueError("a rank that fails after its step")
    fcntl.flock(alive, fcntl.LOCK_EX)  # the other process has ended
    os.close(alive)
    accelerator.save_state(str(folder))


def test_a_rank_that_died_meanwhile_is_told_of(worlds: Worlds, tmp_path: Path) -> None:
    """Its shards are lost; nothing waits for them."""
    zero, one = worlds.outcomes(die_meanwhile, tmp_path / "saved")
    assert_failed(zero, "rank(s) [1] have ended: if with an error, look at that one first", kind="NotOnAllRanksError")
    assert zero.seconds - one.seconds < 20


ENDS_WITH_A_SAVE = """
import sys, time, torch
from megastrategy.accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(3, 2)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
accelerator.backward(model(torch.ones(4, 3)).sum())
optimizer.step()
if accelerator.is_main_process:
    time.sleep(1.0)
    try:
        accelerator.save_state(sys.argv[1])
    except RuntimeError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.fresh
@pytest.mark.long
def test_a_script_that_ends_with_a_save_on_the_main_process_is_told_what_to_change(tmp_path: Path) -> None:
    """The other process has nothing left to do, and has ended."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITH_A_SAVE)
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "1"}
    environments = [{**base, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(2)]
    zero, one = run_pythons([str(script), str(tmp_path / "saved")], environments)
    assert "NotOnAllRanksError" in zero
    assert "Move accelerator.save_state(...) out of" in zero
    assert "Error" not in one
