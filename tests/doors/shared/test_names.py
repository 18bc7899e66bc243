"""The names and the classes: known by torch's entry point or ``import megastrategy``, in all packages; versions."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import megastrategy
import megastrategy_autoload
from megastrategy._versions import ACCELERATE, LIGHTNING, RAY
from megastrategy_autoload import DOORS, START_METHODS

from ..rank_processes import run_python


def test_torch_finds_the_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="torch.backends")
    assert "megastrategy" in entries.names, "the installed metadata is older than pyproject.toml: pip install -e ."
    assert entries["megastrategy"].load() is megastrategy_autoload.register_strategy_names


def test_script_that_imports_nothing_has_the_names(tmp_path: Path) -> None:
    """In all four packages; until a strategy is asked for, only the one small module is imported."""
    code = """
        import sys

        def ours():
            return [name for name in sys.modules if name.startswith("megastrategy")]

        import torch
        assert ours() == ["megastrategy_autoload"], ours()
        assert not [name for name in sys.modules if name.startswith(("lightning", "pytorch_lightning"))]

        import lightning.pytorch, lightning.fabric, pytorch_lightning, lightning_fabric
        from lightning.fabric.cli import _get_supported_strategies
        assert "megatron_ddp" in _get_supported_strategies(), "fabric run --strategy=megatron_ddp"
        assert ours() == ["megastrategy_autoload"], ours()

        options = {"strategy": "megatron_ddp", "accelerator": "cpu", "devices": 2}
        for user, door in {
            lightning.pytorch.Trainer: "lightning",
            pytorch_lightning.Trainer: "pytorch_lightning",
            lightning.fabric.Fabric: "fabric",
            lightning_fabric.Fabric: "lightning_fabric",
        }.items():
            assert type(user(**options).strategy).__module__ == f"megastrategy.{door}"
            all_reduce = user(**options | {"strategy": "megatron_ddp_all_reduce"}).strategy
            assert not all_reduce.config.use_distributed_optimizer
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path, autoload=True)


# --- by import megastrategy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "start_method"), START_METHODS.items())
def test_trainer_takes_the_name(name: str, start_method: str) -> None:
    """The strategy of the name; its processes are started like those of ddp's name."""
    ddps_name = name.replace("megatron_ddp", "ddp").replace("_all_reduce", "")
    trainer, theirs = (
        pl.Trainer(strategy=text, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
        for text in (name, ddps_name)
    )
    assert type(trainer.strategy) is megastrategy.MegatronDDPStrategy
    assert type(trainer.strategy.launcher) is type(theirs.strategy.launcher)
    assert isinstance(theirs.strategy, DDPStrategy)
    assert trainer.strategy._start_method == theirs.strategy._start_method == start_method
    shards = "all_reduce" not in name
    unused = {"find_unused_parameters": name.endswith("_true")} if "find_unused" in name else {}
    expected = megastrategy.DistributedDataParallelConfig(use_distributed_optimizer=shards, **unused)
    assert trainer.strategy.config == expected
    assert "Megatron-LM" in StrategyRegistry[name]["description"]
    assert ("all-reduce" in StrategyRegistry[name]["description"]) == (not shards)


# --- import ----------------------------------------------------------------------------------------------------------

IMPORTS = {
    "before_lightning": """
        import megastrategy
        import megastrategy
        assert not [name for name in sys.modules if name.startswith(("lightning", "pytorch_lightning", "torchmetrics"))]
        importlib.reload(megastrategy)
    """,
    "between_lightnings_packages": """
        import lightning.fabric
        import megastrategy
        from lightning.pytorch.strategies import StrategyRegistry
    """,
}

CHECK_NAMES = """
for package, door in megastrategy_autoload.DOORS.items():
    module = importlib.import_module(f"{package}.strategies")
    registry = getattr(module, "StrategyRegistry" if "pytorch" in package else "STRATEGY_REGISTRY")
    names = sorted(name for name in registry if name.startswith("megatron"))
    assert names == sorted(megastrategy_autoload.START_METHODS), names
    assert door not in sys.modules, "the strategy is imported when it is asked for"
    api = importlib.import_module(package)
    user = getattr(api, "Trainer", None) or api.Fabric
    made = user(strategy="megatron_ddp", accelerator="cpu", devices=2).strategy
    assert type(made) is importlib.import_module(door).MegatronDDPStrategy, type(made)
    assert made.config.use_distributed_optimizer
assert megastrategy.MegatronDDPStrategy.__module__ == "megastrategy.lightning"
assert len([finder for finder in sys.meta_path if "megastrategy" in type(finder).__module__]) == 1
"""


@pytest.mark.nightly
@pytest.mark.parametrize("order", IMPORTS)
def test_names_are_there_in_every_order_of_imports(tmp_path: Path, order: str) -> None:
    """In all four packages; ``import megastrategy`` must not cost Lightning's seconds, and leaves no trace in it."""
    start = "import importlib, sys\n" + textwrap.dedent(IMPORTS[order]) + "import megastrategy_autoload\n"
    run_python("-c", start + CHECK_NAMES, cwd=tmp_path)


@pytest.mark.nightly
def test_class_without_lightning_is_the_old_packages(tmp_path: Path) -> None:
    """A project that has kept the old package has the same public name."""
    code = """
        import sys
        sys.modules["lightning"] = None  # Python's way to say that there is none
        import megastrategy
        import pytorch_lightning as pl
        assert megastrategy.MegatronDDPStrategy.__module__ == "megastrategy.pytorch_lightning"
        assert issubclass(megastrategy.MegatronDDPStrategy, pl.strategies.DDPStrategy)
        trainer = pl.Trainer(strategy="megatron_ddp", accelerator="cpu", devices=2)
        assert type(trainer.strategy) is megastrategy.MegatronDDPStrategy
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path)


@pytest.mark.nightly
def test_error_without_lightning_says_what_to_install(tmp_path: Path) -> None:
    """And a Lightning that is there but broken is not reported as absent, nor passed over for the other package."""
    broken = tmp_path / "lightning"
    broken.mkdir()
    (broken / "__init__.py").write_text("import its_missing_dependency\n")
    code = """
        import sys
        import megastrategy

        def ask():
            try:
                megastrategy.MegatronDDPStrategy
            except ImportError as error:
                return error
            raise AssertionError("there is no Lightning")

        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        error = ask()
        assert type(error) is ImportError and "pip install 'megastrategy[lightning]'" in str(error), error
        del sys.modules["lightning"], sys.modules["pytorch_lightning"]
        sys.path.insert(0, sys.argv[1])
        error = ask()
        assert error.name == "its_missing_dependency", error
        assert "pytorch_lightning" not in sys.modules
    """
    run_python("-c", textwrap.dedent(code), str(tmp_path), cwd=tmp_path)


# --- versions --------------------------------------------------------------------------------------------------------


OLDER = ("1.9.5", "2.1.4", "2.4.0", "2.5.6")
ASK = """
import importlib, sys

def refused(ask, *words):
    try:
        ask()
    except ImportError as error:
        assert type(error) is ImportError, repr(error)
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError(f"nothing refused {words}")
"""


@pytest.mark.nightly
def test_old_accelerate_is_refused(tmp_path: Path) -> None:
    code = """
        import accelerate
        accelerate.__version__ = "1.14.0"
        words = ("accelerate 1.14.0", "1.15 or later", "pip install 'accelerate>=1.15'")
        import megastrategy.accelerate  # as tools do, which need the launcher's options and no Accelerator
        refused(lambda: megastrategy.accelerate.Accelerator, *words)
        accelerate.__version__ = "1.15.0"
        megastrategy.accelerate.Accelerator
    """
    run_python("-c", ASK + textwrap.dedent(code), cwd=tmp_path)


def test_metadata_asks_for_the_same_minima() -> None:
    content = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = content["project"]["optional-dependencies"]
    assert f"lightning>={LIGHTNING}" in extras["lightning"]
    assert f"accelerate>={ACCELERATE}" in extras["accelerate"]
    assert f"ray[train]>={RAY}" in extras["ray"]


@pytest.mark.nightly
@pytest.mark.parametrize(("package", "door"), DOORS.items())
def test_old_lightning_is_refused_by_name_and_import(tmp_path: Path, package: str, door: str) -> None:
    """The installed one with an old version's number: what it lacks must not be what is complained about."""
    code = f"""
        import torch  # the names are there, and nothing was said
        top = importlib.import_module({package!r}.partition(".")[0])
        api = importlib.import_module({package!r})
        user = getattr(api, "Trainer", None) or api.Fabric
        present = top.__version__
        for version in {OLDER!r}:
            top.__version__ = version
            words = ({package!r} + " " + version, "{LIGHTNING} or later", "pip install '", ">={LIGHTNING}'")
            refused(lambda: user(strategy="megatron_ddp", accelerator="cpu", devices=2), *words)
            refused(lambda: importlib.import_module({door!r}), *words)
            user(strategy="ddp", accelerator="cpu", devices=2)  # is no business of ours
        for version in ("{LIGHTNING}", "2.10.0.dev20270101", "3.0", present):
            top.__version__ = version
            sys.modules.pop({door!r}, None)
            importlib.import_module({door!r})
    """
    run_python("-c", ASK + textwrap.dedent(code), cwd=tmp_path, autoload=True)


# --- one package's instance in another -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made_for", "given_to"),
    [("lightning.pytorch", "pytorch_lightning"), ("lightning_fabric", "lightning.fabric"), ("lightning.fabric",) * 2],
)
def test_wrong_package_names_the_right_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made_for: str, given_to: str
) -> None:
    """Lightning says only that it is no strategy; with the class's own name on both sides that would be a riddle."""
    monkeypatch.chdir(tmp_path)
    strategy = importlib.import_module(DOORS[made_for]).MegatronDDPStrategy(bucket_size=7)
    if made_for == given_to:
        assert give(given_to, strategy) is strategy
        return
    with pytest.raises(ValueError, match="invalid strategy") as caught:
        give(given_to, strategy)
    assert f"<{DOORS[made_for]}.MegatronDDPStrategy(bucket_size=7) made for {made_for};" in str(caught.value)
    assert f"{DOORS[given_to]}.MegatronDDPStrategy for {given_to}" in str(caught.value)
    assert f"for {made_for}," not in str(caught.value), "the class that was just refused is no remedy"


def give(package: str, strategy: Any) -> Any:
    """The strategy that a Trainer or Fabric of the package made of it."""
    api = importlib.import_module(package)
    user = getattr(api, "Trainer", None) or api.Fabric
    return user(strategy=strategy, accelerator="cpu", devices=2).strategy
