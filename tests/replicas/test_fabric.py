"""Fabric with replicas: processes that are killed, the leader's checkpoints, launchers, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler

from megastrategy import Replicas
from megastrategy.data import ResumableSampler
from megastrategy.fabric import MegatronDDPStrategy
from megastrategy.lightning import MegatronDDPStrategy as TrainerStrategy
from megastrategy.tools.conversion import consolidate
from tests.doors.python_processes import run_pythons
from tests.support.processes import run_processes
from tests.support.replica_loops import FabricLoop, SampledCase, run_with_a_kill, set_environment_of_torchrun
from tests.support.replica_processes import Kill
from tests.support.replicas import OPTIMIZERS, lighthouse

CASES: dict[str, tuple[SampledCase, FabricLoop, Kill, dict[str, Any]]] = {
    "two ranks": (SampledCase(ranks=2, num_batches=6), FabricLoop(), Kill(1, 1, "after sum 0"), {}),
    "bf16-mixed, clipped, the leader": (
        SampledCase(ranks=2, num_batches=6),
        FabricLoop(precision="bf16-mixed", clip_value=0.01),
        Kill(0, 0, "after sum 0"),
        {"autocast": True, "clip_value": 0.01},
    ),
    "a short window at the epoch's end": (
        SampledCase(num_epochs=3, num_batches=5, accumulate=2),
        FabricLoop(options={"state_dict_type": "sharded"}),
        Kill(1, 0, "before vote"),
        {},
    ),
    "bf16-true": (
        SampledCase(dtype=torch.bfloat16, num_batches=6),
        FabricLoop(precision="bf16-true"),
        Kill(1, 0, "after vote"),
        {},
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_replica_is_killed_and_comes_back(name: str, tmp_path: Path) -> None:
    case, loop, kill, replayed = CASES[name]
    found = run_with_a_kill(case, loop, kill, tmp_path, **replayed)
    saved = sorted(path.stem for path in tmp_path.glob("*.ckpt"))
    assert [name[0] for name in saved] == [str(epoch) for epoch in range(case.num_epochs)], "one replica each time"
    check_loads(case, tmp_path / f"{saved[-1]}.ckpt", found[0][0]["weights"])


def check_loads(case: SampledCase, path: Path, weights: list[Tensor]) -> None:
    """A checkpoint of the leader is one of any training; a directory is read by the tool of the command line."""
    if path.is_dir():
        consolidate(path, path.with_suffix(".file"), force=False, trust=False)
        path = path.with_suffix(".file")
    fabric = Fabric(accelerator="cpu", devices=1)
    module = case.module()
    model, optimizer = fabric.setup(module, OPTIMIZERS[case.optimizer](module.parameters()))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    for mine, theirs in zip(module.parameters(), weights, strict=True):
        assert torch.equal(mine, theirs)
    assert {int(state["step"]) for state in optimizer.state.values()} == {len(case.ends())}


SCRIPT = """
import sys
from datetime import timedelta
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler
from lightning.fabric import Fabric
from megastrategy import Replicas
from megastrategy.fabric import MegatronDDPStrategy

def train(fabric):
    replicas = fabric.strategy.replicas
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(torch.randn(64, 8), batch_size=4))
    for epoch in replicas.epochs(2):
        for batch in replicas.batches(loader):
            optimizer.zero_grad()
            fabric.backward(model(batch).square().mean())
            optimizer.step()
    assert fabric.world_size == 2 and len(loader) == 4
    print(f"trained {fabric.global_rank} {replicas.slot} {replicas.members} {module.weight.sum().item()}", flush=True)

if __name__ == "__main__":
    replicas = Replicas(skew_s=float(sys.argv[2]))
    strategy = MegatronDDPStrategy(replicas=replicas, start_method=sys.argv[1], timeout=timedelta(seconds=80))
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train)
"""


def launched(script: Path, of: int, *arguments: str, returncode: int = 0) -> list[str]:
    """Returns the output of each replica, a job that launches processes of its own."""
    script.write_text(SCRIPT)
    with lighthouse() as address:
        common = {"TORCHFT_LIGHTHOUSE": address, "NUM_REPLICA_GROUPS": str(of)}
        environments = [common | {"REPLICA_GROUP_ID": str(slot)} for slot in range(of)]
        return run_pythons([str(script), *arguments], environments, returncode=returncode)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_replicas_that_are_made_before_the_processes(method: str, tmp_path: Path) -> None:
    output = "".join(launched(tmp_path / "train.py", 2, method, "70"))
    found = re.findall(r"trained (\d) (\d) \(0, 1\) ([-+.\de]+)", output)  # two may be in one line
    assert sorted(line[:2] for line in found) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")], output
    assert len({line[2] for line in found}) == 1


@pytest.mark.long
@pytest.mark.fresh
def test_the_strategys_timeout_has_to_be_longer(tmp_path: Path) -> None:
    [output] = launched(tmp_path / "train.py", 1, "fork", "80", returncode=1)
    assert re.search("skew_s=80: expected less than 80 seconds.* MegatronDDPStrategy", output), output


@pytest.mark.parametrize(
    "option", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"]
)
@pytest.mark.parametrize("strategy", [MegatronDDPStrategy, TrainerStrategy], ids=("Fabric", "Trainer"))
def test_ranks_that_share_a_model_are_refused(strategy: Any, option: str) -> None:
    replicas = Replicas(of=1, slot=0, lighthouse="http://localhost:1")
    with pytest.raises(ValueError, match=f"replicas= and {option}=2 are not supported together"):
        strategy(replicas=replicas, **{option: 2})


def _in_one_process() -> None:
    replicas = Replicas(of=3, slot=2, lighthouse="http://localhost:1")
    precision = MixedPrecision("16-mixed", "cpu")
    set_environment_of_torchrun(rank=0, num_ranks=1)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=MegatronDDPStrategy(replicas=replicas), plugins=[precision])
    fabric.launch()
    module = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    assert fabric.setup_module(module).module is module, "the same model again"
    assert precision.scaler is not None
    assert replicas._registered["scaler"][0]() == precision.scaler.state_dict()
    with pytest.raises(ValueError, match=r"a model is set up already.*ModuleDict"):
        fabric.setup_module(torch.nn.Linear(8, 1))
    samples = torch.arange(12)
    with pytest.raises(ValueError, match=r"ResumableSampler, whose place.*replicas\.batch"):
        fabric.setup_dataloaders(DataLoader(samples, sampler=ResumableSampler(samples)))  # type: ignore[arg-type]
    drawn = SubsetRandomSampler([0, 1, 2])
    with pytest.raises(ValueError, match="SubsetRandomSampler, whose order is drawn"):
        fabric.setup_dataloaders(DataLoader(samples, sampler=drawn))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fabric\.save\(\) before the first batch"):
        fabric.save("never.ckpt", {"model": model, "optimizer": optimizer})
    samples_here = list(fabric.setup_dataloaders(DataLoader(samples, batch_size=2)))  # type: ignore[arg-type]
    assert torch.cat(samples_here).tolist() == [2, 5, 8, 11]
    whole = fabric.setup_dataloaders(DataLoader(samples), use_distributed_sampler=False)  # type: ignore[arg-type]
    assert len(whole) == 12
    with pytest.raises(ValueError, match=r"a backward outside of replicas\.batches"):
        fabric.backward(model(torch.ones(2, 8)).sum())
    fabric.strategy.teardown()
    with pytest.raises(ValueError, match="these replicas were left"):
        replicas.begin_batch()


def test_a_model_its_data_and_what_is_refused() -> None:
    run_processes(1, _in_one_process)
