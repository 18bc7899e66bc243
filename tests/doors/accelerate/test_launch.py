"""Accelerators of scripts that are not ours: by ``megastrategy launch``, and by ``replace_accelerators``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState

from megastrategy import launch
from megastrategy.accelerate import Accelerator, MegatronDDPPlugin, replace_accelerators
from megastrategy.accelerate.launch_config import LaunchConfigError, plugin_from_launch
from megastrategy.core import field_names
from megastrategy.core.torch_ddp_surface import _REFUSED_DDP_ARGUMENTS
from megastrategy.tools import launching
from tests.support.comparison import assert_equal
from tests.support.scripts import run_script

from ..rank_processes import run_python

SCRIPT = '''
"""Ordinary user code: a loop under accelerate, and what it saw, saved by rank."""
import argparse
import inspect
import os
import pickle
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, index):
        torch.manual_seed(index)
        features = torch.randn(9)
        return features, features.square().sum().view(1)


class TheirAccelerator(Accelerator):
    def __init__(self, note, **options):
        super().__init__(**options)
        self.note = note


def main(arguments):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    data = DataLoader(pickle.loads(pickle.dumps(Squares())), batch_size=3, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(2):
        for features, targets in data:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    theirs = TheirAccelerator("subclassed")
    TheirAccelerator("twice")
    plugin = getattr(accelerator, "megatron_ddp_plugin", None)
    saw = {
        "losses": losses,
        "weights": accelerator.unwrap_model(model).state_dict(),
        "ranks": accelerator.num_processes,
        "cpu": os.environ["ACCELERATE_USE_CPU"],
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "path": sys.path[0],
        "signature": list(inspect.signature(Accelerator).parameters),
        "their signature": list(inspect.signature(TheirAccelerator).parameters),
        "made": type(accelerator).__module__,
        "subclass": (theirs.note, type(theirs).__mro__[1].__module__, hasattr(theirs, "megatron_ddp_plugin")),
        "bucket_size": plugin and plugin.bucket_size,
        "overlap": plugin and plugin.overlap_grad_reduce,
        "again": plugin and Accelerator().megatron_ddp_plugin is plugin,
        "buckets": len(model.layout.buckets) if plugin and accelerator.num_processes > 1 else None,
    }
    torch.save(saw, f"{arguments.out}.{accelerator.process_index}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--lr", type=float)
    main(parser.parse_args())
'''

STOCK = "accelerate.accelerator"

OURS = "megastrategy.accelerate"

MEGASTRATEGY = "from megastrategy.tools.commands import root; root()"

OPTIONS = "megatron_ddp_config:\n  bucket_size: 1e2\n  overlap_grad_reduce: true\n"

ACCELERATES = (
    "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\nmain_process_port: 0\nmixed_precision: 'no'\n"
)


def write_script(folder: Path) -> Path:
    """In a folder that is not the working directory, for what is said about sys.path."""
    script = folder / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    return script


def launched(folder: Path, *command: str, ranks: int = 2, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """The ranks' findings in a script that was started in the folder, and all output."""
    out = folder / "saw"
    output = run_python(
        *command,
        *("--out", str(out), "--lr", "0.01"),
        cwd=folder,
        environment={"ACCELERATE_USE_CPU": "true", **environment},
    )
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)], output


def ran(folder: Path, script: Path, *launcher: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """The same on two ranks that accelerate's launcher need not start; ``launcher``: our module and its options."""
    done = run_script(
        script,
        *("--out", folder / "saw", "--lr", "0.01"),
        cwd=folder,
        before=launcher,
        environment={"ACCELERATE_USE_CPU": "true", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"saw.{rank}") for rank in range(2)], done.stdout + done.stderr


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same script under accelerate alone, with torch DDP."""
    folder = tmp_path_factory.mktemp("stock")
    saw, _ = ran(folder, write_script(folder))
    assert [rank["made"] for rank in saw] == [STOCK, STOCK]
    assert saw[0]["losses"] != saw[1]["losses"], "each rank has its own samples"
    return saw


def assert_same_training(saw: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    for name in ("ranks", "losses", "weights"):
        assert_equal([rank[name] for rank in saw], [rank[name] for rank in stock])


def test_unmodified_script_equals_ddp(stock: list[dict[str, Any]], tmp_path: Path) -> None:
    script = write_script(tmp_path)
    (tmp_path / "options.yaml").write_text(OPTIONS)
    options = ("--config", "options.yaml")
    overlap = {"MEGATRON_DDP_OVERLAP_GRAD_REDUCE": "false"}
    saw, output = ran(tmp_path, Path("scripts/train.py"), "megastrategy.launch", *options, **overlap)
    assert_same_training(saw, stock)
    for rank in saw:
        assert rank["argv"] == [str(script), "--out", str(tmp_path / "saw"), "--lr", "0.01"]
        assert (rank["name"], rank["file"], rank["path"]) == ("__main__", str(script), str(script.parent))
        assert (rank["made"], rank["again"]) == (OURS, True)
        assert rank["subclass"] == ("subclassed", STOCK, False)
        assert (rank["bucket_size"], rank["overlap"]) == (100, False), "the environment goes before the file"
        assert rank["buckets"] > 1
        for name in ("signature", "their signature"):
            assert rank[name] == stock[0][name]
    assert output.count("megatron_ddp on 2 rank(s): reduce-scatter, sharded optimizer") == 1, "by rank 0, once"
    [said] = [line for line in output.splitlines() if "is not replaced" in line]
    assert "__main__.TheirAccelerator is a subclass" in said


@pytest.mark.nightly
def test_one_file_serves_accelerate_and_us(stock: list[dict[str, Any]], tmp_path: Path) -> None:
    write_script(tmp_path)
    (tmp_path / "one.yaml").write_text(ACCELERATES + OPTIONS)
    command = ("-c", MEGASTRATEGY, "launch", "--config_file", "one.yaml", "scripts/train.py")
    saw, _ = launched(tmp_path, *command, ACCELERATE_USE_CPU="false")
    assert_same_training(saw, stock)
    found = [(rank["made"], rank["bucket_size"], rank["overlap"], rank["cpu"]) for rank in saw]
    assert found == [(OURS, 100, True, "true")] * 2


def test_launch_on_cpus_starts_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate starts one for ``--cpu --num_processes 2``."""
    started = []
    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", started.append)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    launching.launch(["--cpu", "--num_processes", "2", str(write_script(tmp_path))])
    [arguments] = started
    assert arguments.num_processes == 2
    assert os.environ.pop("ACCELERATE_USE_CPU") == "true"


@pytest.mark.nightly
def test_script_on_cpus_equals_ddp(stock: list[dict[str, Any]], tmp_path: Path) -> None:
    write_script(tmp_path)
    options = ("--cpu", "--num_processes", "2", "--main_process_port", "0")
    command = ("-c", MEGASTRATEGY, "launch", *options, "scripts/train.py")
    saw, _ = launched(tmp_path, *command, ACCELERATE_USE_CPU="false")
    assert_same_training(saw, stock)


OUR_SCRIPT = """
from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

class Derived(Accelerator):
    def __init__(self, **options):
        super().__init__(**options)

for kind in (Accelerator, Derived):
    made = kind()
    assert type(made) is kind
    assert made.megatron_ddp_config.bucket_size == 100
    own = MegatronDDPPlugin(bucket_size=7)
    assert kind(megatron_ddp_plugin=own).megatron_ddp_config.bucket_size == 7
    assert kind(kwargs_handlers=[own]).megatron_ddp_config.bucket_size == 7
print("all seen")
"""


def test_options_reach_accelerators_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OUR_SCRIPT)
    (tmp_path / "options.yaml").write_text(OPTIONS)
    launcher = ("megastrategy.launch", "--config", "options.yaml")
    done = run_script(Path("train.py"), cwd=tmp_path, ranks=1, before=launcher)
    assert (done.returncode, done.stdout) == (0, "all seen\n"), done.stderr


# --- the command line, and the options --------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script that must not run."""
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script is given. usage: "),
        (["-m"], "no module is given"),
        (["--config", "-m", "train"], "--config needs a file"),
        (["--confg", "x.yaml", "train.py"], "unknown option --confg"),
        (["trian.py"], "the script trian.py does not exist"),
        (["-m", "email.nothing"], "there is no module email.nothing"),
        (["--config", "x.yaml", "train.py"], "x.yaml: No such file"),
    ],
)
def test_wrong_command_line_ends_with_code_2(
    in_folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        launch.main()
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert line.startswith(f"megastrategy.launch: {message}")


def options_of(path: Path, text: str, **environment: str) -> MegatronDDPPlugin:
    path.write_text(text)
    return plugin_from_launch(path, {f"MEGATRON_DDP_{name}": value for name, value in environment.items()})


def test_every_option_can_be_set_in_the_environment() -> None:
    for name in field_names():
        values = {"bucket_size": "5", "num_distributed_optimizer_instances": "5", "grad_buffer": "pooled"}
        values |= {"grad_wire_dtype": "fp16"}
        value = values.get(name, "true")
        others = {"MEGATRON_LM_TP_DEGREE": "2"}
        if name == "reduce_scatter_with_fp32_accumulation":
            others["MEGATRON_DDP_GRAD_REDUCE_IN_FP32"] = "false"
        plugin = plugin_from_launch(None, {f"MEGATRON_DDP_{name.upper()}": value, **others})
        assert getattr(plugin, name) == {"5": 5, "true": True}.get(value, value), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected keys, such as megatron_ddp_config: with options under it"),
        ("a: b: c", "is not YAML: mapping values are not allowed here"),
        ("megatron_dpp_config: {}", "'megatron_dpp_config' is near: expected the key megatron_ddp_config:"),
        ("bucket_size: 3\nmegatron_ddp_config: {}", "bucket_size stands beside megatron_ddp_config:, and belongs"),
        ("megatron_ddp_config: 5", "megatron_ddp_config=5: expected options under it"),
        (
            "megatron_ddp_config: {store_param_remainders: true}",
            "under megatron_ddp_config: the option 'store_param_remainders' was removed",
        ),
        ("megatron_ddp_config: {state_dict_typ: full}", "did you mean 'state_dict_type'?"),
        ("megatron_ddp_config: {state_dict_type: shard}", "state_dict_type='shard'"),
        ("megatron_ddp_config: {bucket_size: big}", "bucket_size='big': expected a positive number of elements"),
        ("megatron_ddp_config: {bucket_size: yes}", "bucket_size=True: expected"),
        ("megatron_ddp_config: {overlap_grad_reduce: }", "overlap_grad_reduce=None: expected True or False"),
        ("megatron_ddp_config: {use_contiguous_buffers: no}", "contradicts use_distributed_optimizer=True"),
    ],
)
def test_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(LaunchConfigError) as caught:
        options_of(path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("BUCKT_SIZE", "3", "unknown argument 'buckt_size': did you mean 'bucket_size'?"),
        ("PARAM_WIRE_DTYPE", "bf16", "the option 'param_wire_dtype' was removed: leave it out; weights are sent"),
        ("OVERLAP_PARAM_GATHER", "step", "overlap_param_gather='step' was removed: write False"),
        ("BUCKET_SIZE", "", "bucket_size='': expected a positive number"),
        ("BUCKET_CAP_MB", "nan", "bucket_cap_mb=nan: expected a positive number of MiB"),
        ("STATIC_GRAPH", "maybe", "static_graph='maybe': expected True or False"),
    ],
)
def test_wrong_variable_is_refused_by_name(tmp_path: Path, variable: str, value: str, message: str) -> None:
    with pytest.raises(LaunchConfigError) as caught:
        options_of(tmp_path / "x.yaml", "megatron_ddp_config: {grad_reduce_in_fp32: false}", **{variable: value})
    assert str(caught.value).startswith(f"environment, MEGATRON_DDP_{variable}: {message}")


def test_option_without_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchConfigError, match="forward_sync_buffers is torch DDP's"):
        options_of(tmp_path / "x.yaml", "megatron_ddp_config: {forward_sync_buffers: true}")


@pytest.mark.parametrize("name", _REFUSED_DDP_ARGUMENTS)
def test_option_of_torch_ddp_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchConfigError) as caught:
        options_of(tmp_path / "x.yaml", f"megatron_ddp_config: {{{name}: 1}}")
    assert _REFUSED_DDP_ARGUMENTS[name] in str(caught.value)


# --- replace_accelerators ---------------------------------------------------------------------------------------------


TheirClass = accelerate.Accelerator

METHODS = [(cls, vars(cls).get("__init__"), vars(cls).get("__new__")) for cls in (TheirClass, Accelerator)]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Whatever a test does, the classes are theirs again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert [(cls, vars(cls).get("__init__"), vars(cls).get("__new__")) for cls, _, _ in METHODS] == METHODS


def made(**options: Any) -> Any:
    return TheirClass(cpu=True, **options)


def test_block_makes_our_accelerators() -> None:
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


def test_separate_processes_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_replacement_ends_with_an_exception() -> None:
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
