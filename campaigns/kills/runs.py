"""Two rank processes that train, save after every step and resume, made to be killed at any moment.

Each rank appends its loss of every step to its own file before it continues, so that the steps of a killed run can be
compared with an undisturbed run, to the bit.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import random
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.files import load_file, save_file
from tests.doors.fits import make_strategy, make_trainer
from tests.doors.rank_processes import SIZE
from tests.support.object_store import PROTOCOL
from tests.support.ports import free_port

_RECORD = struct.Struct("<qd")
BUCKET_SIZE = 20_000
"""Elements: several buckets."""
ENDLESS = 9_000
"""More steps than a run does before it is killed, however fast the machine, and fewer than an epoch has."""


def make_model() -> nn.Sequential:
    """70,000 parameters: a checkpoint of 0.8 MB, whose writing is a good part of a step."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 240), nn.Tanh(), nn.Linear(240, 1))


def batch(step: int, rank: int) -> Tensor:
    """Whatever came before it: data loaders that go on within an epoch are another matter."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step * SIZE + rank))


def record(folder: Path, rank: int, step: int, loss: Tensor) -> None:
    with open(folder / f"losses_{rank}", "ab", buffering=0) as file:
        file.write(_RECORD.pack(step, loss.item()))


def recorded(folder: Path, rank: int) -> list[tuple[int, float]]:
    """All steps that a rank has begun, in order: those that it did again, again."""
    path = folder / f"losses_{rank}"
    return list(_RECORD.iter_unpack(path.read_bytes())) if path.exists() else []  # type: ignore[arg-type]


# --- what runs -------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self.folder = make_model(), folder

    def training_step(self, unused: Any, batch_idx: int) -> Tensor:
        step, rank = self.global_step, self.global_rank
        loss = self.net(batch(step, rank)).square().mean()
        record(self.folder, rank, step, loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_trainer(
    folder: Path,
    num_steps: int,
    kind: type[Module] = Module,
    state_dict_type: str = "full",
    *,
    dirpath: str | None = None,
    ckpt_path: str | None = "last",
    plugins: Sequence[Any] = (),
) -> dict[str, Tensor]:
    """As a user has it: the newest file, a last one beside it, and resuming by itself."""
    saver = ModelCheckpoint(
        dirpath or folder / "checkpoints",
        "{step}",
        every_n_train_steps=1,
        save_last=dirpath is None,  # directories in a store are never overwritten
        enable_version_counter=dirpath is None,  # a save that was cut off keeps its name
    )
    strategy = make_strategy("megatron_ddp", bucket_size=BUCKET_SIZE, state_dict_type=state_dict_type)
    limits = {"max_steps": num_steps, "max_epochs": -1, "log_every_n_steps": 50}
    trainer = make_trainer(strategy, callbacks=[saver], enable_checkpointing=True, plugins=[*plugins], **limits)
    module = kind(folder)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(SIZE * 10_000)), batch_size=1), ckpt_path=ckpt_path)
    return module.net.state_dict()


def with_directories(folder: Path, num_steps: int) -> dict[str, Tensor]:
    """The same with sharded checkpoints; every rank writes a part."""
    return with_trainer(folder, num_steps, state_dict_type="sharded")


def store_of(folder: Path, protocol: str = PROTOCOL) -> str:
    """The place of checkpoints in a store, whose names begin with a bucket unless it is ours."""
    return f"{protocol}://{'' if protocol == PROTOCOL else 'bucket'}{folder}/checkpoints"


def with_store(
    folder: Path, num_steps: int, protocol: str = PROTOCOL, plugins: Sequence[Any] = ()
) -> dict[str, Tensor]:
    """The same in an object store, where Lightning does not find the last one by itself."""
    url = store_of(folder, protocol)
    files, path = fsspec.url_to_fs(url)
    steps = [int(name.split("step=")[1].split(".")[0]) for name in files.glob(f"{path}/*/.metadata")]
    ckpt_path = f"{url}/step={max(steps)}.ckpt" if steps else None
    far = {"dirpath": url, "ckpt_path": ckpt_path, "plugins": plugins}
    return with_trainer(folder, num_steps, state_dict_type="sharded", **far)


def with_store_in_background(folder: Path, num_steps: int) -> dict[str, Tensor]:
    """The same while training goes on."""
    return with_store(folder, num_steps, plugins=[AsyncCheckpointIO()])


def with_s3(folder: Path, num_steps: int) -> dict[str, Tensor]:
    """The same in S3, or what answers as S3 does."""
    return with_store(folder, num_steps, "s3")


def with_loop(folder: Path, num_steps: int) -> dict[str, Tensor]:
    """Without a framework: every second step, and the other rank does not wait for the file."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=SIZE)
    module = make_model()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=BUCKET_SIZE))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    path, first = folder / "checkpoints" / "last.ckpt", 0
    if path.exists():
        saved = load_file(path)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, num_steps):
        loss = model(batch(step, rank)).square().mean()
        record(folder, rank, step, loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            state = optimizer.state_dict()
            if rank == 0:
                save_file({"model": module.state_dict(), "optimizer": state, "step": step + 1}, path)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    model.close()
    torch.distributed.destroy_process_group()
    return weights


def _run(job: Callable[[Path, int], dict[str, Tensor]], folder: Path, num_steps: int, rank: int, port: int) -> None:
    """Runs a rank process. Its exception is written to a file, and its exit status is that of a script."""
    with open(folder / f"output_{rank}", "a") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    try:
        weights = job(folder, num_steps)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test wants to know
        (folder / f"error_{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


# --- who kills -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kill:
    """One moment of one run.

    Attributes:
        ranks: who is killed, at once.
        num_steps: after how many steps of this start, on the first of them; 0: from when it is started.
        delay_s: how much later.
    """

    ranks: tuple[int, ...]
    num_steps: int
    delay_s: float


def draw_kills(seed: int, count: int) -> list[Kill]:
    """One rank or both, at a random point of one of the first steps; some while they start and load.

    A rank alone is killed only once both are connected: before that its launcher ends the other, not we.
    """
    source = random.Random(seed)
    kills = []
    for _ in range(count):
        if source.random() < 0.15:
            kills.append(Kill((0, 1), 0, source.uniform(0.0, 0.5)))
        else:
            ranks = source.choice([(0,), (0,), (1,), (1,), (0, 1)])
            kills.append(Kill(ranks, source.randint(1, 6), source.uniform(0.0, 0.2)))
    return kills


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The state after a kill.

    Attributes:
        writing: whether a part of a file is left, which the kill has cut off.
        survivor: the error with which the other rank ended, or None if there was none.
        survivor_s: how long it went on.
    """

    writing: bool
    survivor: str | None
    survivor_s: float


def start(job: Callable[[Path, int], dict[str, Tensor]], folder: Path, num_steps: int) -> list[BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.doors.fits"])
    port = free_port()
    processes: list[BaseProcess] = [
        context.Process(target=_run, args=(job, folder, num_steps, rank, port)) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    return processes


def finish(job: Callable[[Path, int], dict[str, Tensor]], folder: Path, num_steps: int, limit_s: float) -> float:
    """Runs to the end, in which both ranks must succeed; the seconds that it took."""
    folder.mkdir(exist_ok=True)
    begun = time.monotonic()
    processes = start(job, folder, num_steps)
    try:
        deadline = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        errors = [path.read_text() for path in folder.glob("error_*")]
        assert [process.exitcode for process in processes] == [0, 0], errors
        return time.monotonic() - begun
    finally:
        end(processes)


def run_and_kill(job: Callable[[Path, int], dict[str, Tensor]], folder: Path, kill: Kill, limit_s: float) -> Outcome:
    """Starts or resumes, kills, and waits for the rank that is left, which must end with an error of its own."""
    folder.mkdir(exist_ok=True)
    before = len(recorded(folder, kill.ranks[0]))
    processes = start(job, folder, ENDLESS)
    try:
        deadline = time.monotonic() + limit_s
        while len(recorded(folder, kill.ranks[0])) < before + kill.num_steps:
            assert time.monotonic() < deadline, "it does not get going"
            assert all(process.is_alive() for process in processes), [p.read_text() for p in folder.glob("error_*")]
            time.sleep(0.001)
        time.sleep(kill.delay_s)
        for rank in kill.ranks:
            processes[rank].kill()
        killed = time.monotonic()
        for process in processes:
            process.join(max(0.0, killed + limit_s - time.monotonic()))
        survivor_s = time.monotonic() - killed
        assert not any(process.is_alive() for process in processes), "the rank that is left does not end"
        writing = bool(list(folder.glob("checkpoints/.*.incomplete")))
        errors = [folder / f"error_{rank}" for rank in range(SIZE) if rank not in kill.ranks]
        text = errors[0].read_text() if errors else None
        for path in errors:
            path.unlink()
        return Outcome(writing, text, survivor_s if errors else math.nan)
    finally:
        end(processes)


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()
