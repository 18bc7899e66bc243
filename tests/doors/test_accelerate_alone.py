"""``if accelerator.is_main_process: accelerator.save_state(...)``: what most scripts do, and what torch DDP allows."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ports import free_port

from ..support.comparison import assert_equal
from .accelerate_loops import Run, Worlds, adamw, make_accelerator, state_of, weights_of
from .python_processes import run_pythons
from .rank_processes import Failure
from .test_accelerate_checkpoints import SAVED_AFTER, Counter, read, rest, train_from


def train_and_save_on_main(
    plugin: dict[str, Any] | None, folder: Path, *, dtype: torch.dtype, alone: bool, script: str
) -> Run:
    """As :func:`train_from`, saved in mid-epoch and at its end, by the main process ``alone`` or by all ranks.

    Args:
        plugin, folder, dtype, alone: see above.
        script: what follows a save: "next step", or "barrier"; with "gather" a metric is gathered after every batch,
            as most scripts do before they log.
    """
    from torch.nn import functional as F

    from .fabric_loops import AwkwardNet
    from .fits import loader

    accelerator = make_accelerator("megatron_ddp", plugin, gradient_accumulation_steps=2)
    net = AwkwardNet().to(dtype)
    inner = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
    counter = Counter()
    model, optimizer, data, scheduler = accelerator.prepare(net, inner, loader(), scheduler)
    accelerator.register_for_checkpointing(counter)
    run = Run({})
    for number, (features, tokens, targets) in enumerate(data):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(features.to(dtype), tokens, number % 2 == 1).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        run.rates.append(optimizer.param_groups[0]["lr"])
        counter.batches += 1
        if number + 1 == SAVED_AFTER and (accelerator.is_main_process or not alone):
            accelerator.save_state(str(folder / "middle"))
        if script == "gather":
            accelerator.gather(loss.detach())
        if script == "barrier":
            accelerator.wait_for_everyone()
    if accelerator.is_main_process or not alone:
        accelerator.save_state(str(folder / "end"))
        optimizer.state_dict()  # by hand, too
    accelerator.wait_for_everyone()
    run.weights, run.state = weights_of(net), state_of(accelerator, optimizer)
    accelerator.wait_for_everyone()  # the main process has asked once more than the others, whose parts it still takes
    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "script", "plugin", "size"),
    [
        (torch.float32, "next step", {}, 2),
        (torch.bfloat16, "gather", {"overlap_param_gather": "forward"}, 3),
        (torch.bfloat16, "barrier", {"grad_buffer": "pooled"}, 2),
        (torch.float32, "next step", {"use_distributed_optimizer": False}, 2),
    ],
    ids=["fp32", "bf16-gathered-late-on-three", "bf16-pooled-barrier", "all-reduce"],
)
def test_the_main_process_alone_saves_what_all_ranks_save(
    worlds: Worlds, tmp_path: Path, dtype: torch.dtype, script: str, plugin: dict[str, Any], size: int
) -> None:
    """To the bit; training goes on as if nobody had saved, and so does what resumes, on two ranks and on one."""
    runs = {}
    for alone in (False, True):
        options: dict[str, Any] = {"dtype": dtype, "alone": alone, "script": script}
        folder = tmp_path / f"{alone}"
        runs[alone] = worlds.run(train_and_save_on_main, plugin, folder, size=size, **options)
    assert_equal(runs[True], runs[False])
    for name in ("middle", "end"):
        assert_equal(read(tmp_path / "True" / name), read(tmp_path / "False" / name))
    middle = tmp_path / "True" / "middle"
    if size > 2:  # where a run that begins anew may add in another order
        return
    resumed = worlds.run(train_from, "megatron_ddp", plugin, load=middle, dtype=dtype, size=size)
    for whole, rest_of_it in zip(runs[True], resumed, strict=True):
        rest(whole, rest_of_it)
    (one,) = worlds.run(train_from, "megatron_ddp", plugin, load=middle, dtype=dtype, trains=False, size=1)
    assert_equal(one.state, read(middle)["optimizer.bin"])


def save_where_it_cannot(folder: Path, plugin: dict[str, Any], then: str) -> tuple[str, float]:
    """The message, and after how long it came."""
    from .fabric_loops import AwkwardNet

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


@pytest.mark.parametrize(
    ("plugin", "then", "why", "line"),
    [
        (
            {"state_dict_type": "sharded"},
            "barrier",
            "in accelerator.wait_for_everyone()",
            "state_dict_type: full",
        ),
        ({"state_dict_type": "sharded"}, "next", "of a later step", "state_dict_type: full"),
        ({}, "step", "rank 1 cannot hand its part over: it has begun its step 2", "use_distributed_optimizer: false"),
    ],
    ids=["directory-barrier", "directory-next-step", "before-the-step"],
)
def test_where_the_main_process_cannot_save_alone_it_says_what_to_change(
    worlds: Worlds, tmp_path: Path, plugin: dict[str, Any], then: str, why: str, line: str
) -> None:
    (message, seconds), _ = worlds.run(save_where_it_cannot, tmp_path / "saved", plugin, then)
    assert message.startswith("NotOnAllRanksError: ")
    assert why in message
    assert "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`" in message
    assert f"`{line}`" in message
    assert seconds < 5


def die_meanwhile(folder: Path) -> None:
    from .fabric_loops import AwkwardNet

    accelerator = make_accelerator("megatron_ddp")
    alive = os.open(folder.with_name("alive"), os.O_RDWR | os.O_CREAT)  # a number: nobody closes it before the process
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
    assert isinstance(zero, Failure)
    # a message to it fails at once, or nobody answers
    said = {"CollectiveError": "Most often another rank ended", "NotOnAllRanksError": "but rank 1 has ended"}
    assert said[zero.kind] in zero.message
    assert zero.seconds - one.seconds < 20


ENDS_AFTER_SAVING = """
import sys, time, torch
from megastrategy.accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(3, 2)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
accelerator.backward(model(torch.ones(4, 3)).sum())
optimizer.step()
if accelerator.is_main_process:
    time.sleep(1.0)
    accelerator.save_state(sys.argv[1])
    print(sorted(torch.load(sys.argv[1] + "/optimizer.bin")["state"]))
"""


@pytest.mark.fresh
@pytest.mark.long
def test_a_script_that_ends_with_a_save_on_the_main_process(tmp_path: Path) -> None:
    """The others stay for it, although they have nothing left to do, and end with it."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_AFTER_SAVING)
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "1"}
    environments = [{**base, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(2)]
    zero, one = run_pythons([str(script), str(tmp_path / "saved")], environments)
    assert "[0, 1]" in zero
    assert "Error" not in one
