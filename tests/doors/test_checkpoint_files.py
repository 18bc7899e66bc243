"""A checkpoint file is complete or not there, never twice in memory, and one that does not fit changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _atomic_save
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megastrategy._checkpoints import files as checkpoint_files
from megastrategy._checkpoints.files import load_file, own_memory, save_file
from megastrategy._checkpoints.validation import check_module_state
from megastrategy._lightning.checkpoint_io import WholeFileIO
from megastrategy.core import CheckpointError
from megastrategy.fabric import MegatronDDPStrategy as FabricStrategy

from .fits import BATCHES_PER_EPOCH, AwkwardModule, assert_same_tensors, fit, loader, make_strategy, make_trainer
from .rank_processes import Failure, Ranks

STATE = {"weight": torch.arange(300_000, dtype=torch.float32), "step": 1}
"""1.2 MB: many writes of a buffered file."""
NEWER = {"weight": -STATE["weight"], "step": 2}  # type: ignore[operator]


def assert_is(path: Path, state: dict[str, Any]) -> None:
    loaded = torch.load(path, weights_only=True)
    assert loaded["step"] == state["step"]
    assert torch.equal(loaded["weight"], state["weight"])


# --- complete, or what was there before ------------------------------------------------------------------------------


def kill_self(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("never reached")


class KillsWhenPickled:
    __reduce__ = kill_self  # type: ignore[assignment]


def save_and_die(path: Path, moment: str) -> None:
    """In a process of its own."""
    state: dict[str, Any] = dict(NEWER)
    if moment == "pickling":
        state["bomb"] = KillsWhenPickled()
    elif moment == "writing":  # the write that goes beyond the limit is cut short, and the next kills
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_001, 700_001))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    elif moment == "fsync":
        os.fsync = kill_self  # type: ignore[assignment]
    elif moment == "replace":
        Path.replace = kill_self  # type: ignore[assignment, method-assign]
    elif moment == "replaced":
        checkpoint_files.sync_directory = kill_self  # type: ignore[assignment]
    save_file(state, path)


@pytest.mark.parametrize("moment", ["pickling", "writing", "fsync", "replace", "replaced"])
def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path, moment: str) -> None:
    """And the next save is not hindered by what it left beside it."""
    path = tmp_path / "last.ckpt"
    save_file(STATE, path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.doors.fits"])
    process = context.Process(target=save_and_die, args=(path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -(signal.SIGXFSZ if moment == "writing" else signal.SIGKILL)
    assert_is(path, NEWER if moment == "replaced" else STATE)
    left = [] if moment == "replaced" else [".last.ckpt.incomplete"]
    assert sorted(os.listdir(tmp_path)) == [*left, "last.ckpt"]
    save_file(NEWER, path)
    assert_is(path, NEWER)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a machine that loses power may come back with a complete name on an empty file."""
    path, synced = tmp_path / "last.ckpt", []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name).name, os.fstat(descriptor).st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_file(STATE, path)
    size = path.stat().st_size
    assert size > 1_200_000
    assert [(name, there) for name, _, there in synced] == [(".last.ckpt.incomplete", False), (tmp_path.name, True)]
    assert synced[0][1] == size


@contextlib.contextmanager
def disk_with(num_bytes: int) -> Iterator[None]:
    """Files cannot become larger, as on a full disk; Python ignores the signal that would come with it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [0, 300, 700_001, 1_200_300])
def test_a_full_disk_is_an_error_with_the_path_and_the_checkpoint_before_it_stays(
    tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "last.ckpt"
    save_file(STATE, path)
    with disk_with(num_bytes), pytest.raises(OSError, match=r"was not saved \(File too large\)") as raised:
        save_file(NEWER, path)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert_is(path, STATE)
    assert os.listdir(tmp_path) == ["last.ckpt"]


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """The permissions of files do not bind root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_directory_that_cannot_be_written_is_an_error_with_the_path() -> None:
    with tempfile.TemporaryDirectory() as folder:  # above tmp_path are directories that only its owner may enter
        path = Path(folder) / "last.ckpt"
        save_file(STATE, path)
        os.chmod(folder, 0o555)
        with without_privileges(), pytest.raises(PermissionError, match="was not saved") as raised:
            save_file(NEWER, path)
        assert raised.value.filename == str(path)
        assert_is(path, STATE)
        assert os.listdir(folder) == ["last.ckpt"]


def test_a_file_where_the_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "last.ckpt"
    with pytest.raises(FileExistsError, match=rf"was not saved \(File exists: {tmp_path / 'file'}\)") as raised:
        save_file(STATE, path)
    assert raised.value.filename == str(path)


def test_what_cannot_be_pickled_is_its_own_error_even_while_another_is_dealt_with(tmp_path: Path) -> None:
    """Checkpoints are saved on exceptions, too, and a full disk elsewhere is not why this one fails."""
    path = tmp_path / "last.ckpt"
    save_file(STATE, path)
    try:
        raise OSError(errno.ENOSPC, "the user's own")
    except OSError:
        with pytest.raises(Exception, match="local") as raised:
            save_file({"function": lambda: 0}, path)
    assert not isinstance(raised.value, OSError)
    assert_is(path, STATE)
    assert os.listdir(tmp_path) == ["last.ckpt"]


# --- memory ----------------------------------------------------------------------------------------------------------

LARGE_BYTES = 40 * 2**20
"""A tensor larger than any that malloc keeps for itself when it is freed."""


def status(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_growth(run: Callable[[], Any]) -> int:
    """How much more memory than before was resident at any time."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be there to be used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = status("VmHWM")
    run()
    return status("VmHWM") - before


def test_saving_makes_no_copy_of_the_state(tmp_path: Path) -> None:
    state = {"weight": torch.ones(LARGE_BYTES // 4)}
    assert peak_growth(lambda: save_file(state, tmp_path / "ours.ckpt")) < LARGE_BYTES / 8
    assert peak_growth(lambda: _atomic_save(state, tmp_path / "theirs.ckpt")) > 0.9 * LARGE_BYTES, "the measure works"


NUM_FEATURES = 1024
BUCKET_BYTES = NUM_FEATURES**2 * 4
SLACK_BYTES = 8 * 2**20
"""For what is not tensors: in the kernel's account, pages of code that runs for the first time count, too."""


class Wide(pl.LightningModule):
    """Five layers of one bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False) for _ in range(5)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SavesAndMeasures(pl.Callback):
    """The second save: the first one has imported what it needs."""

    growth = 0

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.strategy.barrier()
        self.growth = peak_growth(lambda: trainer.save_checkpoint(self.path))


def save_wide(path: Path) -> int:
    measure = SavesAndMeasures(path)
    strategy = make_strategy("megatron_ddp", bucket_size=NUM_FEATURES**2)
    trainer = make_trainer(strategy, callbacks=[measure], max_epochs=1, limit_train_batches=1)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.ones(4, NUM_FEATURES)), batch_size=2))
    return measure.growth


def test_saving_takes_the_gathered_state_on_rank_0_and_a_bucket_elsewhere(ranks: Ranks, tmp_path: Path) -> None:
    """A bucket is gathered in one flat tensor, from which the whole state tensors are copied one by one."""
    path = tmp_path / "wide.ckpt"
    first, other = ranks.run(save_wide, path)
    weights_bytes, state_bytes = 5 * BUCKET_BYTES, 10 * BUCKET_BYTES
    assert abs(path.stat().st_size - (weights_bytes + state_bytes)) < 20_000, "the sum of its tensors"
    assert first < state_bytes + BUCKET_BYTES + SLACK_BYTES
    assert other < BUCKET_BYTES + SLACK_BYTES


def test_loading_maps_the_file(tmp_path: Path) -> None:
    """All of it is looked at, and no page of it counts as this process's own; but the one that is written to."""
    path = tmp_path / "last.ckpt"
    save_file({"weight": torch.ones(LARGE_BYTES // 4)}, path)
    before = status("RssAnon")
    loaded = load_file(path)
    assert loaded["weight"].sum().item() == LARGE_BYTES // 4
    assert status("RssAnon") - before < LARGE_BYTES / 8
    read = torch.load(path)
    assert status("RssAnon") - before > 0.9 * LARGE_BYTES, "the measure works"
    loaded["weight"][0] = 7.0
    assert torch.load(path, mmap=True)["weight"][0] == 1.0, "the file is not written through"
    assert read["weight"][0] == 1.0


def test_a_mapped_file_may_be_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_file(STATE, path)
    loaded = load_file(path)
    save_file(NEWER, path)
    path.unlink()
    assert torch.equal(loaded["weight"], STATE["weight"])  # type: ignore[arg-type]


def test_own_memory_outlives_a_file_overwritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_file({"callbacks": [{"best": (STATE["weight"], "name")}], "model": nn.Linear(2, 2).state_dict()}, path)
    owned = own_memory(load_file(path))
    assert owned["model"]._metadata, "the version of each module, by which torch knows old checkpoints"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(owned["callbacks"][0]["best"][0], STATE["weight"])  # type: ignore[arg-type]
    assert owned["callbacks"][0]["best"][1] == "name"


# --- what is loaded --------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_mapped_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of before torch 1.6, and storages that were on a device which is not here."""
    torch.save(STATE, tmp_path / "legacy.ckpt", _use_new_zipfile_serialization=False)
    assert torch.equal(load_file(tmp_path / "legacy.ckpt")["weight"], STATE["weight"])  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save_file(STATE, tmp_path / "cuda.ckpt")
    for map_location in ("cpu", lambda storage, location: storage, {"cuda:0": "cpu"}):
        loaded = load_file(tmp_path / "cuda.ckpt", map_location)
        assert torch.equal(loaded["weight"], STATE["weight"])  # type: ignore[arg-type]


def broken_files(folder: Path) -> dict[Path, str]:
    """Path -> what its error says."""
    made = {}
    for kind, is_zip in (("zip", True), ("legacy", False)):
        torch.save(STATE, folder / f"{kind}.ckpt", _use_new_zipfile_serialization=is_zip)
        content = (folder / f"{kind}.ckpt").read_bytes()
        for size in (5, 100, 10_000, len(content) - 1):
            path = folder / f"{kind}_{size}.ckpt"
            path.write_bytes(content[:size])
            made[path] = f"is cut off after {size:,} bytes"
    (folder / "empty.ckpt").touch()
    (folder / "text.ckpt").write_text("hello, I am no checkpoint\n" * 100)
    (folder / "pickle.ckpt").write_bytes(pickle.dumps({"a": 1}, protocol=2)[:-3])
    with zipfile.ZipFile(folder / "other.ckpt", "w") as archive:
        archive.writestr("word/document.xml", "text")
    made[folder / "empty.ckpt"] = "is empty"
    return made | {folder / f"{name}.ckpt": "is no checkpoint" for name in ("text", "pickle", "other")}


def test_a_broken_file_is_an_error_with_its_path_and_what_is_wrong(tmp_path: Path) -> None:
    made = broken_files(tmp_path)
    assert len(made) == 12
    for path, problem in made.items():
        for weights_only in (True, False):
            with pytest.raises(CheckpointError) as raised:
                load_file(path, weights_only=weights_only)
            assert str(raised.value).startswith(f"{path} {problem}")


def test_what_a_whole_file_may_not_load_stays_torchs_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "class.ckpt"
    save_file({"path": Fabric}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") as raised:
        load_file(path, weights_only=True)
    assert raised.value.__notes__ == [f"while loading the checkpoint {path}"]
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        load_file(tmp_path / "missing.ckpt")


# --- who uses it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["lightning", "pytorch_lightning", "fabric", "lightning_fabric"])
def test_strategies_save_and_load_with_it_unless_the_user_gave_another(door: str, tmp_path: Path) -> None:
    strategy_class: Any = getattr(__import__(f"megastrategy.{door}", fromlist=["x"]), "MegatronDDPStrategy")  # noqa: B009
    mirrors = "lightning_fabric" if door in ("pytorch_lightning", "lightning_fabric") else "lightning.fabric"
    lightnings = __import__(f"{mirrors}.plugins", fromlist=["x"]).TorchCheckpointIO
    io = strategy_class().checkpoint_io
    assert isinstance(io, WholeFileIO)
    assert isinstance(io, lightnings)
    assert not isinstance(strategy_class(checkpoint_io=lightnings()).checkpoint_io, WholeFileIO)
    for path in (tmp_path / "a" / "last.ckpt", f"file://{tmp_path}/b/last.ckpt", "memory://c/last.ckpt"):
        io.save_checkpoint(STATE, path)
        assert torch.equal(io.load_checkpoint(path)["weight"], STATE["weight"])  # type: ignore[arg-type]
        io.remove_checkpoint(path)
        with pytest.raises(FileNotFoundError, match=r"not found: .*last\.ckpt"):
            io.load_checkpoint(path)


def test_wrappers_wrap_it() -> None:
    """``AsyncCheckpointIO()`` takes the strategy's default; one that was given its own keeps it."""
    own: CheckpointIO = TorchCheckpointIO()
    for outer, expected in ((AsyncCheckpointIO(), WholeFileIO), (AsyncCheckpointIO(own), TorchCheckpointIO)):
        strategy = make_strategy("megatron_ddp", checkpoint_io=outer)
        assert strategy.checkpoint_io is outer
        assert isinstance(outer.checkpoint_io, expected)
    assert outer.checkpoint_io is own


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    defaults: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": BATCHES_PER_EPOCH, "save_top_k": -1}
    return ModelCheckpoint(folder, **{**defaults, "save_on_train_epoch_end": False, **options})


def fit_saving(folder: Path, plugins: tuple[Any, ...] = ()) -> None:
    fit("megatron_ddp", callbacks=[saver(folder)], enable_checkpointing=True, plugins=list(plugins))


def test_an_asynchronous_save_writes_the_same(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(fit_saving, tmp_path / "sync")
    ranks.run(fit_saving, tmp_path / "async", (AsyncCheckpointIO(),))
    for step in (7, 14):
        ours, theirs = (
            torch.load(tmp_path / kind / f"step={step}.ckpt", weights_only=True) for kind in ("async", "sync")
        )
        assert_same_tensors(ours["state_dict"], theirs["state_dict"])
        states = (found["optimizer_states"][0]["state"] for found in (ours, theirs))
        for mine, expected in zip(*(state.values() for state in states), strict=True):
            assert_same_tensors(mine, expected)
    assert sorted(os.listdir(tmp_path / "async")) == ["step=14.ckpt", "step=7.ckpt"]


class FillsTheDisk(pl.Callback):
    """Rank 0's disk, before the second checkpoint is saved."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == BATCHES_PER_EPOCH + 1 and trainer.global_rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # this process ends with the fit


def test_a_fit_whose_disk_is_full_ends_on_all_ranks_and_says_why(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(fit_filling_the_disk, tmp_path)
    full, waiting = outcomes
    assert isinstance(full, Failure)
    assert isinstance(waiting, Failure)
    assert full.kind == "OSError"
    assert str(tmp_path / "step=14.ckpt") in full.message
    assert "was not saved (File too large)" in full.message
    assert waiting.seconds < 30
    assert os.listdir(tmp_path) == ["step=7.ckpt"]
    assert torch.load(tmp_path / "step=7.ckpt", weights_only=True)["global_step"] == BATCHES_PER_EPOCH


def fit_filling_the_disk(folder: Path) -> None:
    fit("megatron_ddp", callbacks=[saver(folder), FillsTheDisk()], enable_checkpointing=True)


# --- a state for another model ---------------------------------------------------------------------------------------


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)


class OtherModule(AwkwardModule):
    """Not the model that the checkpoint is of."""

    def __init__(self, how: str) -> None:
        super().__init__(two_groups if how == "groups" else None)
        if how == "missing":
            self.more = nn.Linear(2, 2)
        elif how == "extra":
            del self.side
        elif how == "shape":
            self.inputs = nn.Linear(6, 13)


WRONG = {
    "missing": ["'more.weight' is missing there", "'more.bias' is missing there"],
    "extra": ["'side.weight' is there, and not in the model"],
    "shape": ["'inputs.weight' has shape (13, 5) there, (13, 6) in the model"],
    "groups": ["it has 1 parameter group(s), the optimizer 2"],
}


def resume_other(how: str, path: Path) -> str:
    module = OtherModule(how)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(make_strategy("megatron_ddp"))
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(module, loader(), ckpt_path=path)
    if how != "groups":  # Lightning loads the weights before there are optimizers
        assert_same_tensors(module.state_dict(), before)
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    return str(raised.value)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(fit_saving, folder)
    return folder / "step=7.ckpt"


@pytest.mark.parametrize("how", list(WRONG))
def test_a_checkpoint_of_another_model_loads_nothing_and_says_what_differs(
    ranks: Ranks, trained: Path, how: str
) -> None:
    for message in ranks.run(resume_other, how, trained):
        assert str(trained) in message
        for problem in WRONG[how]:
            assert problem in message


def resume_foreign(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        make_trainer(make_strategy("megatron_ddp")).fit(AwkwardModule(), loader(), ckpt_path=path)
    return str(raised.value)


def test_a_trainer_says_what_is_wrong_with_a_file_on_every_rank(ranks: Ranks, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "short.ckpt").write_bytes(trained.read_bytes()[:1000])
    torch.save(AwkwardModule().state_dict(), tmp_path / "weights.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    problems = {"short": "is cut off", "weights": "is no checkpoint of a Trainer", "list": "got a list"}
    for name, problem in problems.items():
        path = tmp_path / f"{name}.ckpt"
        for message in ranks.run(resume_foreign, path):
            assert message.startswith(str(path))
            assert problem in message


class Keeps(pl.Callback):
    """What it is given by the checkpoint, for as long as it lives."""

    best = torch.zeros(0)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = torch.ones(3)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.best = checkpoint["best"]


def is_mapped(tensor: Tensor, path: Path) -> bool:
    """Whether the kernel knows the tensor's memory as a part of the file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(str(path))
    raise AssertionError("no memory of this process")


def resume_and_keep(path: Path, sharded: bool) -> None:
    assert is_mapped(load_file(path)["state_dict"]["out.weight"], path), "the measure works"
    keeper = Keeps()
    strategy = make_strategy("megatron_ddp", use_distributed_optimizer=sharded)
    trainer = make_trainer(strategy, callbacks=[keeper], max_epochs=1)  # of which the checkpoint is the end
    trainer.fit(AwkwardModule(), loader(), ckpt_path=path)
    states = [value for values in trainer.optimizers[0].state.values() for value in values.values()]
    assert len(states) > (6 if sharded else 20)
    assert torch.equal(keeper.best, torch.ones(3))
    assert not any(is_mapped(tensor, path) for tensor in [keeper.best, *states, *trainer.model.parameters()])


@pytest.mark.parametrize("sharded", [True, False])
def test_nothing_that_lives_on_after_loading_is_in_the_file(ranks: Ranks, tmp_path: Path, sharded: bool) -> None:
    """A file that is removed by another machine, or overwritten in place, would end the process weeks later."""
    ranks.run(fit_and_keep, tmp_path)
    ranks.run(resume_and_keep, tmp_path / "step=7.ckpt", sharded)


def fit_and_keep(folder: Path) -> None:
    fit("megatron_ddp", callbacks=[saver(folder), Keeps()], enable_checkpointing=True, max_epochs=1)


class TwoOptimizers(pl.LightningModule):
    """The second optimizer has another parameter group where ``changed``."""

    def __init__(self, changed: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)
        self.changed = changed

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.first, self.second), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(layer(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        weight, bias = self.second.parameters()
        groups = [{"params": [weight]}, {"params": [bias]}] if self.changed else [weight, bias]
        return torch.optim.AdamW(self.first.parameters()), torch.optim.AdamW(groups)


def save_and_resume_two(folder: Path) -> str:
    trainer = make_trainer(
        make_strategy("megatron_ddp"),
        callbacks=[saver(folder, every_n_train_steps=2 * BATCHES_PER_EPOCH)],
        enable_checkpointing=True,
        max_epochs=1,
    )
    trainer.fit(TwoOptimizers(changed=False), loader())
    trainer = make_trainer(make_strategy("megatron_ddp"))
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(TwoOptimizers(changed=True), loader(), ckpt_path=folder / f"step={2 * BATCHES_PER_EPOCH}.ckpt")
    assert [len(optimizer.state) for optimizer in trainer.optimizers] == [0, 0]
    return str(raised.value)


def test_the_first_of_two_optimizers_is_not_loaded_where_the_second_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(save_and_resume_two, tmp_path):
        assert message.startswith(f"optimizer 1 in {tmp_path / 'step=14.ckpt'} is of another")


def fabric_load(path: Path, sharded: bool) -> dict[str, str]:
    """Problem -> message; in each case model and optimizer must be as they were."""
    strategy = FabricStrategy(bucket_size=20, use_distributed_optimizer=sharded)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()

    def make(num_inputs: int = 5, num_groups: int = 1) -> tuple[Any, Any]:
        torch.manual_seed(num_inputs)
        module = nn.Sequential(nn.Linear(num_inputs, 7), nn.Linear(7, 3))
        params = list(module.parameters())
        groups = [{"params": params[:1]}, {"params": params[1:]}][-num_groups:]
        groups = groups if num_groups == 2 else [{"params": params}]
        model, optimizer = fabric.setup(module, torch.optim.AdamW(groups, lr=0.1))
        fabric.backward(model(torch.ones(2, num_inputs)).square().mean())
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    messages = {}
    for problem, (other, others_optimizer) in {"shape": make(num_inputs=6), "groups": make(num_groups=2)}.items():
        weights = {name: value.clone() for name, value in other.state_dict().items()}
        state = own_memory(others_optimizer.state_dict())
        # the part that fits comes first, and must not be loaded either
        objects = {"model": other, "optimizer": others_optimizer, "step": 0}
        keys = ["step", "model", "optimizer"] if problem == "groups" else ["step", "optimizer", "model"]
        asked = {key: objects[key] for key in keys}
        with pytest.raises(CheckpointError) as raised:
            fabric.load(path, asked)
        messages[problem] = str(raised.value)
        assert asked["step"] == 0
        assert_same_tensors(other.state_dict(), weights)
        assert str(others_optimizer.state_dict()) == str(state)
    with pytest.raises(KeyError, match="has no 'scheduler'"):
        fabric.load(path, {"model": model, "scheduler": 0})
    rest = fabric.load(path, {"optimizer": optimizer})
    assert rest["step"] == 3
    states = [value for values in optimizer.state.values() for value in values.values()]
    assert not any(is_mapped(tensor, path) for tensor in [*states, *rest["model"].values()])
    return messages


@pytest.mark.parametrize("sharded", [True, False])
def test_fabric_loads_everything_or_nothing(ranks: Ranks, tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "last.ckpt"
    for messages in ranks.run(fabric_load, path, sharded):
        assert str(path) in messages["shape"]
        assert "'optimizer' in" in messages["groups"]
        assert "it has 1 parameter group(s), the optimizer 2" in messages["groups"]


class Renames(nn.Module):
    """Reads checkpoints of a version in which its weight had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}new"] = state_dict.pop(f"{prefix}old")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def forgive(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys.clear()


def test_modules_with_ways_of_their_own_to_load_are_left_alone() -> None:
    """The check is only for what torch would refuse."""
    forgiving = nn.Linear(2, 2)
    forgiving.register_load_state_dict_post_hook(forgive)
    check_module_state(forgiving, {}, True, "file")
    forgiving.load_state_dict({})
    model = nn.Sequential(Renames(), nn.Linear(2, 2))
    state = model.state_dict()
    state["0.old"] = state.pop("0.new")
    check_module_state(model, state, True, "file")
    model.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"^file holds .*\n  '1.weight' is missing there$"):
        check_module_state(model, {name: value for name, value in state.items() if name != "1.weight"}, True, "file")


@pytest.mark.parametrize("strict", [True, False])
def test_the_check_finds_what_torch_finds(strict: bool) -> None:
    """Tied and lazily missing names, buffers, old scalars: torch itself says what is right."""

    def make(**changes: Any) -> dict[str, Tensor]:
        state = dict(AwkwardModule().state_dict())
        state.update({name: value for name, value in changes.items() if value is not None})
        return {name: value for name, value in state.items() if name not in changes or changes[name] is not None}

    states = {
        "itself": make(),
        "old scalar": make(scale=torch.ones(1)),
        "no counter": make(**{"norm.num_batches_tracked": None}),
        "no buffer": make(**{"norm.running_mean": None}),
        "no tied name": make(**{"head.weight": None}),
        "extra": make(nothing=torch.ones(1)),
        "shape": make(**{"out.bias": torch.ones(8)}),
        "dtype": make(**{"out.bias": torch.ones(7, dtype=torch.float64)}),
    }
    for name, state in states.items():
        theirs = ours = False
        module = AwkwardModule()
        try:
            check_module_state(module, state, strict, "file")
        except CheckpointError:
            ours = True
        try:
            module.load_state_dict(state, strict)
        except RuntimeError:
            theirs = True
        assert ours == theirs, name
