"""Options of the Fabric door, its two packages, and a script that ends by itself."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megastrategy.fabric import MegatronDDPStrategy
from tests.support.comparison import assert_equal
from tests.support.patience import HANG_S

from ..fabric_loops import AwkwardNet, make_strategy, sgd, step_with
from ..fits import weights_of
from ..rank_processes import Ranks


def test_options_are_those_of_the_trainer() -> None:
    strategy = MegatronDDPStrategy(bucket_cap_mb=1, find_unused_parameters=False)
    assert strategy.config.bucket_size == 2**18
    assert not strategy.config.find_unused_parameters
    with pytest.raises(ValueError, match="did you mean 'bucket_size'"):
        MegatronDDPStrategy(bucket_siz=3)
    with pytest.raises(ValueError, match="ddp_comm_hook"):
        MegatronDDPStrategy(ddp_comm_hook=print)


def test_a_strategy_that_was_not_used_yet_can_be_pickled() -> None:
    """The launchers that spawn processes send it there."""
    assert pickle.loads(pickle.dumps(make_strategy("megatron_ddp"))).config == make_strategy("megatron_ddp").config


def train_by_name(package: str) -> Any:
    """The strategy's name is enough; in either of the packages, which refuse each other's strategies."""
    fabrics = importlib.import_module(package)
    fabric = fabrics.Fabric(accelerator="cpu", devices=2, strategy="megatron_ddp")
    fabric.launch()
    assert isinstance(fabric.strategy, fabrics.strategies.DDPStrategy)
    net = AwkwardNet()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    return step_with(fabric, model, optimizer), weights_of(net), type(fabric.strategy).__module__


def test_both_packages_train_alike_by_the_strategys_name(ranks: Ranks) -> None:
    *ours, module = ranks.run(train_by_name, "lightning.fabric")[0]
    *mirrored, other_module = ranks.run(train_by_name, "lightning_fabric")[0]
    assert_equal(mirrored, ours)
    assert (module, other_module) == ("megastrategy.fabric", "megastrategy.lightning_fabric")


SCRIPT = """
import sys
import torch
from lightning.fabric import Fabric
from megastrategy.fabric import MegatronDDPStrategy


def train(fabric, steps):
    torch.manual_seed(fabric.global_rank)
    net = torch.nn.Linear(3, 5)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    for _ in range(steps):
        fabric.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    total = fabric.all_reduce(net.weight.detach().clone(), reduce_op="sum")
    assert torch.equal(total, 2 * net.weight), "the ranks have the same weights"
    fabric.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    fabric.print(f"{fabric.world_size} ranks")
    if sys.argv[2:] == ["fails"]:
        raise SystemExit(3)
    return fabric.world_size


if __name__ == "__main__":
    strategy = MegatronDDPStrategy(start_method=sys.argv[1])
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    if sys.argv[1] == "popen":
        fabric.launch()
        train(fabric, 2)
    else:
        assert fabric.launch(train, 2) == 2
    print("end")
"""


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.sample(1)
@pytest.mark.parametrize(("start_method", "ends"), [("fork", 1), ("popen", 2), ("spawn", 1)])
def test_a_script_ends_by_itself(tmp_path: Path, start_method: str, ends: int) -> None:
    """A Fabric has no teardown: the engine's threads must not keep a process from ending, nor fail at its end.

    The script's last collective is not one of the default group's: gloo's threads of that are torch's to end, and may
    abort a process that ends right after one (under "ddp" too).
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NODE_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), start_method], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks") == 1
    assert done.stdout.count("end") == ends  # the processes share a stream: lines may run together
    assert "Traceback" not in done.stderr
