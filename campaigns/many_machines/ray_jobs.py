"""Trains in workers of a real Ray: ``python -m campaigns.many_machines.ray_jobs CASE FOLDER``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:  # as Ray itself does
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

TIMEOUT_S = 123
NUM_EPOCHS = 4
SEED = 5
FAILS_IN_EPOCH = 2
"""From 0, so that checkpoints of two epochs have been reported."""


class Net(pl.LightningModule):
    """Two layers; keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        if self._trainer is not None:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (torch.randn(64, width, generator=generator) for width in (8, 1))
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)


def net() -> Net:
    pl.seed_everything(SEED)
    return Net()


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    usual = {"plugins": [RayLightningEnvironment()], "devices": "auto", "accelerator": "cpu", "max_epochs": NUM_EPOCHS}
    usual |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(strategy=strategy, **(usual | {"enable_model_summary": False} | options))


def rank() -> int:
    found: int = ray.train.get_context().get_world_rank()
    return found


def weights(module: Net) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


# --- several Trainers in one worker ----------------------------------------------------------------------------------


def train_alike(config: dict[str, Any]) -> None:
    """One after the other, Ray's strategy first; then what is refused, and one more."""
    from megastrategy.ray import RayMegatronDDPStrategy

    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    in_main_thread = threading.current_thread() is threading.main_thread()
    found: dict[str, Any] = {"runs": {}, "package": pl.__name__.partition(".")[0], "in_main_thread": in_main_thread}
    for name, make in {
        "ddp": RayDDPStrategy,
        "reduce-scatter": RayMegatronDDPStrategy,
        "all-reduce": lambda: RayMegatronDDPStrategy(use_distributed_optimizer=False),
        "again": RayMegatronDDPStrategy,
    }.items():
        module, trainer = net(), prepare_trainer(make_trainer(make()))
        trainer.fit(module, data())
        sampler = trainer.train_dataloader.sampler
        found["runs"][name] = {
            "losses": module.losses,
            "weights": weights(module),
            "device": str(trainer.strategy.root_device),
            "sampler": (sampler.num_replicas, sampler.rank),
        }
        if name == "reduce-scatter":
            engine = trainer.strategy._engine  # closed, and its groups are there
            timeout = engine.collectives.group._get_backend(torch.device("cpu")).options._timeout
            found["timeouts"] = [timeout.total_seconds(), trainer.strategy._timeout.total_seconds()]
    found["handlers_stay"] = handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    found["refusals"] = refusals()
    torch.save(found, Path(config["folder"]) / f"rank{rank()}.pt")


def refusals() -> list[str]:
    """The errors for another strategy of ours, with Ray's plugin and without, and for options that are Ray's."""
    import datetime

    from megastrategy import MegatronDDPStrategy
    from megastrategy.ray import RayMegatronDDPStrategy

    cases: list[Callable[[], Any]] = [
        lambda: make_trainer("megatron_ddp"),
        lambda: make_trainer(MegatronDDPStrategy(bucket_size=100)),
        lambda: make_trainer("megatron_ddp", plugins=[]),
        lambda: RayMegatronDDPStrategy(timeout=datetime.timedelta(seconds=5)),
        lambda: RayMegatronDDPStrategy(start_method="spawn"),
    ]
    said = []
    for case in cases:
        try:
            case()
        except Exception as error:  # noqa: BLE001 - which it is, the test looks at
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return said


# --- failures --------------------------------------------------------------------------------------------------------


class Fails(pl.Callback):
    """Rank 1 fails once, in the middle of an epoch."""

    def __init__(self, how: str, mark: Path) -> None:
        self._how, self._mark = how, mark

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch < FAILS_IN_EPOCH or batch_idx != 1 or trainer.global_rank != 1 or self._mark.exists():
            return
        self._mark.touch()
        if self._how == "raise":
            raise ValueError("a bad sample")
        os.kill(os.getpid(), signal.SIGKILL)


def train_reporting(config: dict[str, Any]) -> None:
    """Resumes from what was reported, or from what another run left, and reports after every epoch."""
    from megastrategy.ray import RayMegatronDDPStrategy

    folder, size = Path(config["folder"]), ray.train.get_context().get_world_size()
    callbacks: list[Any] = [RayTrainReportCallback()]
    if config["how"]:
        callbacks.append(Fails(config["how"], folder / "failed"))
    strategy = RayMegatronDDPStrategy(state_dict_type=config["state_dict_type"])
    module = net()
    trainer = prepare_trainer(make_trainer(strategy, callbacks=callbacks, max_epochs=config["epochs"]))
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None and config["begins_from"]:
        checkpoint = ray.train.Checkpoint(config["begins_from"])
    if checkpoint is None:
        trainer.fit(module, data())
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(module, data(), ckpt_path=str(Path(directory) / RayTrainReportCallback.CHECKPOINT_NAME))
    name = "resumed" if checkpoint is not None else "began"
    done = {"size": size, "losses": module.losses, "weights": weights(module), "step": trainer.global_step}
    torch.save(done, folder / f"{name}-rank{rank()}.pt")


def fit_reporting(folder: Path, *, num_workers: Any = 2, **config: Any) -> Path:
    """Returns where the last checkpoint is. ``config``: for :func:`train_reporting`."""
    folder.mkdir(exist_ok=True)
    usual = {"how": "", "state_dict_type": "full", "epochs": NUM_EPOCHS, "begins_from": ""}
    result = TorchTrainer(
        train_reporting,
        train_loop_config={"folder": str(folder)} | usual | config,
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    return Path(result.checkpoint.path)


# --- Transformers ----------------------------------------------------------------------------------------------------


def train_transformers(config: dict[str, Any]) -> None:
    """Ray's integration with ``transformers.Trainer``: with torch DDP, in a block of ours, and from its checkpoint."""
    import transformers
    from ray.train.huggingface import transformers as integration

    from megastrategy.accelerate import MegatronDDPPlugin, replace_accelerators

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net().net

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.net(x) - labels).square().mean()}

    inputs, targets = data().dataset.tensors  # type: ignore[attr-defined]
    samples = [{"x": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]

    def train(name: str, epochs: int, resumes: str | None = None) -> dict[str, Any]:
        folder = f"{config['folder']}/{name}"
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=8,
            use_cpu=True,
            save_strategy="epoch",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=3,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # a norm is summed in the order of shards, and clipping by it the same to rounding
        )
        callbacks = [integration.RayTrainReportCallback()]
        trainer = transformers.Trainer(Squares(), arguments, train_dataset=samples, callbacks=callbacks)  # type: ignore
        integration.prepare_trainer(trainer)
        trainer.train(resume_from_checkpoint=resumes)
        accelerator = type(trainer.accelerator).__module__
        state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        return {"made": accelerator, "weights": state, "step": trainer.state.global_step}

    found = {"stock": train("stock", 2)}
    with replace_accelerators(MegatronDDPPlugin(bucket_size=64)):
        found["ours"] = train("ours", 2)
        train("half", 1)
    # after the block: what a block wrote is resumed by another one
    half = f"{config['folder']}/half/checkpoint-4"
    with replace_accelerators():
        found["resumed"] = train("ours resumed", 2, half)
    found["stock resumed"] = train("stock resumed", 2, half)
    torch.save(found, f"{config['folder']}/rank{rank()}.pt")


# --- cases -----------------------------------------------------------------------------------------------------------


def alike(folder: Path) -> None:
    TorchTrainer(
        train_alike,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "storage")),
        torch_config=TorchConfig(timeout_s=TIMEOUT_S),
    ).fit()


def failures(folder: Path) -> None:
    """A run that nothing happens to, one for each kind of failure and of checkpoint, and one that goes on alone."""
    saved = {
        "none": fit_reporting(folder / "none"),
        "raise": fit_reporting(folder / "raise", how="raise"),
        "kill": fit_reporting(folder / "kill", how="kill", state_dict_type="sharded"),
    }
    more = {"epochs": NUM_EPOCHS + 1, "begins_from": str(saved["kill"]), "state_dict_type": "sharded"}
    saved["fewer"] = fit_reporting(folder / "fewer", num_workers=1, **more)
    found = {name: sorted(str(file.relative_to(path)) for file in path.rglob("*.*")) for name, path in saved.items()}
    module = net()
    module.load_state_dict(torch.load(folder / "kill" / "resumed-rank0.pt")["weights"])
    # on one worker Lightning's sampler shuffles all samples, by net()'s seed and the epoch
    sampler: DistributedSampler[Any] = DistributedSampler(data().dataset, num_replicas=1, rank=0, seed=SEED)
    sampler.set_epoch(NUM_EPOCHS)
    batch = next(iter(DataLoader(data().dataset, batch_size=8, sampler=sampler)))
    (folder / "found.json").write_text(json.dumps([found, module.training_step(batch, 0).item()]))


def in_transformers(folder: Path) -> None:
    TorchTrainer(
        train_transformers,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "storage")),
    ).fit()


CASES = {"alike": alike, "failures": failures, "transformers": in_transformers}


@contextmanager
def a_ray() -> Iterator[None]:
    """A Ray of this process's own, which goes with it."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # no token in the home folder
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets allow no long path
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    options = {"num_cpus": 2, "include_dashboard": False, "_temp_dir": temporary, "log_to_driver": True}
    ray.init(runtime_env={"env_vars": variables}, **options)
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    with a_ray():
        CASES[sys.argv[1]](Path(sys.argv[2]))
