"""Accelerate with replicas: processes that are killed, the leader's checkpoints, and what is refused."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from megastrategy import Replicas
from megastrategy.accelerate import Accelerator, MegatronDDPPlugin, replace_accelerators
from megastrategy.data import ResumableSampler
from tests.support.processes import run_processes
from tests.support.replica_loops import AcceleratedCase, AcceleratedLoop, Counter, run_with_a_kill
from tests.support.replica_processes import Kill
from tests.support.replicas import OPTIMIZERS

CASES: dict[str, tuple[AcceleratedCase, AcceleratedLoop, Kill, dict[str, Any]]] = {
    "two ranks": (AcceleratedCase(ranks=2, num_batches=6), AcceleratedLoop(), Kill(1, 1, "after sum 0"), {}),
    "a short window at the epoch's end": (
        AcceleratedCase(num_epochs=3, num_batches=5, accumulate=2),
        AcceleratedLoop(),
        Kill(1, 0, "before vote"),
        {},
    ),
    "bf16, clipped, the leader": (
        AcceleratedCase(ranks=2, num_batches=6),
        AcceleratedLoop(mixed_precision="bf16", clip_value=0.01, options={"state_dict_type": "sharded"}),
        Kill(0, 0, "after sum 0"),
        {"autocast": True, "clip_value": 0.01},
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_replica_is_killed_and_comes_back(name: str, tmp_path: Path) -> None:
    case, loop, kill, replayed = CASES[name]
    replayed |= {"schedule": case.schedule, "schedule_steps": case.of * case.ranks}
    found = run_with_a_kill(case, loop, kill, tmp_path, **replayed)
    for mine, theirs in zip(*found, strict=True):
        assert mine["loop"] == theirs["loop"]
    saved = sorted(path.stem for path in tmp_path.glob("*.saved"))
    assert [name[0] for name in saved] == [str(epoch) for epoch in range(case.num_epochs)], "one replica each time"
    assert found[0][0]["loop"][0] == case.num_epochs * case.num_batches
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == [f"checkpoint_{epoch}" for epoch in range(case.num_epochs)]
    assert found[0][0]["loop"][3] == str(folders[-1])
    run_processes(1, _loads, case, folders[-1], found[0][0])


def _loads(case: AcceleratedCase, folder: Path, outcome: dict[str, Any]) -> None:
    """A checkpoint of the leader is one of any training."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator, module, counter = Accelerator(), case.module(), Counter()
    optimizer = OPTIMIZERS[case.optimizer](module.parameters())
    _, prepared, schedule, loader = accelerator.prepare(module, optimizer, case.schedule(optimizer), case.loader())
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(str(folder))
    for mine, theirs in zip(module.parameters(), outcome["weights"], strict=True):
        assert torch.equal(mine, theirs)
    assert {int(state["step"]) for state in prepared.state.values()} == {len(case.ends())}
    assert (counter.num_batches, schedule.get_last_lr()) == outcome["loop"][:2]
    assert len(loader) > case.num_batches


def _in_one_process() -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    replicas = Replicas(of=3, slot=2, lighthouse="http://localhost:1")
    plugin = MegatronDDPPlugin(replicas=replicas)
    with pytest.raises(ValueError, match=r"replicas=\.\.\.\) and a ParallelismConfig"):
        Accelerator(megatron_ddp_plugin=plugin, parallelism_config=accelerate.ParallelismConfig())
    _forget_accelerators()
    accelerator = Accelerator(megatron_ddp_plugin=plugin)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    module, samples = nn.Linear(8, 1), torch.arange(14)
    optimizer = torch.optim.AdamW(module.parameters())
    schedules = [torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=3) for _ in range(2)]
    model, optimizer, first, _ = accelerator.prepare(module, optimizer, *schedules)
    assert accelerator.prepare(model, first) == (model, first), "again"
    accelerator.register_for_checkpointing(Counter(), Counter())
    assert [*replicas._registered] == ["accelerator", "scaler 0", "schedule 0", "schedule 1", "object 0", "object 1"]
    assert (accelerator.num_processes, accelerator.is_main_process) == (1, True)
    check_loaders(accelerator, samples)
    frozen = nn.Linear(8, 1).requires_grad_(False)
    assert accelerator.prepare(frozen) is frozen
    with pytest.raises(ValueError, match=r"a model is prepared already.*ModuleDict"):
        accelerator.prepare(nn.Linear(8, 1))
    for call in (accelerator.save_state, functools.partial(accelerator.save_model, model)):
        with pytest.raises(ValueError, match=r"accelerator\.save_(state|model)\(\) before the first batch"):
            call("never")
    with pytest.raises(ValueError, match=r"a backward outside of replicas\.batches"):
        accelerator.backward(model(torch.ones(2, 8)).sum())
    accelerator.end_training()
    with pytest.raises(ValueError, match="these replicas were left"):
        replicas.begin_batch()


def check_loaders(accelerator: Any, samples: torch.Tensor) -> None:
    """This is the third of three replicas."""

    def make(**options: Any) -> Any:
        return DataLoader(samples, **{"batch_size": 2, **options})  # type: ignore[arg-type]

    loader, evaluated = accelerator.prepare(make()), accelerator.prepare_data_loader(make(), in_replica=True)
    assert accelerator.prepare(loader) is loader
    assert [batch.tolist() for batch in loader] == [[4, 5], [10, 11], [2, 3]]
    assert torch.cat([accelerator.gather_for_metrics(batch) for batch in evaluated]).tolist() == samples.tolist()
    with pytest.raises(ValueError, match=r"gather_for_metrics\(\) with a loader.*in_replica=True"):
        [accelerator.gather_for_metrics(batch) for batch in loader]
    with pytest.raises(ValueError, match=r"skip_first_batches\(\) with a loader.*replicas\.batch"):
        accelerator.skip_first_batches(loader, 1)
    with pytest.raises(ValueError, match="ResumableSampler"):
        accelerator.prepare(make(sampler=ResumableSampler(samples)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SubsetRandomSampler, whose order is drawn"):
        accelerator.prepare(make(sampler=SubsetRandomSampler([0, 1, 2])))
    for name, value in (("even_batches", False), ("dispatch_batches", True), ("use_stateful_dataloader", True)):
        default = getattr(accelerator.dataloader_config, name)
        setattr(accelerator.dataloader_config, name, value)
        with pytest.raises(ValueError, match=name):
            accelerator.prepare(make())
        setattr(accelerator.dataloader_config, name, default)
    accelerator.dataloader_config.split_batches = True
    assert [batch.tolist() for batch in accelerator.prepare(make(batch_size=6))] == [[4, 5], [10, 11], [2, 3]]


def _forget_accelerators() -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()


def test_a_model_its_data_and_what_is_refused() -> None:
    run_processes(1, _in_one_process)


@pytest.mark.parametrize("value", ["yes", 2], ids=str)
def test_what_is_no_replicas_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"replicas=.*: expected a megastrategy\.Replicas"):
        MegatronDDPPlugin(replicas=value)


def test_divided_experts_are_refused() -> None:
    replicas = Replicas(of=1, slot=0, lighthouse="http://localhost:1")
    with pytest.raises(ValueError, match="replicas= and expert_parallel_size=2 are not supported together"):
        MegatronDDPPlugin(replicas=replicas, expert_parallel_size=2)


def _under_a_trainer(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    plugin = MegatronDDPPlugin(replicas=Replicas(of=1, slot=0, lighthouse="http://localhost:1"))
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[])
    with replace_accelerators(plugin):
        trainer = transformers.Trainer(nn.Linear(8, 1), arguments, train_dataset=[{"x": 1}])
        with pytest.raises(ValueError, match=r"replicas=\.\.\.\) and transformers\.Trainer"):
            trainer.train()


def test_transformers_trainer_is_refused(tmp_path: Path) -> None:
    run_processes(1, _under_a_trainer, tmp_path)
