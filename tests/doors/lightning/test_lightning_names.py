"""The names and the classes: known after ``import megastrategy`` in all packages, each package with a class of its own.

Here torch's entry points are off: it is the import that makes the names known. The other way is in test_autoload.py.
"""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import megastrategy
from megastrategy_autoload import DOORS, START_METHODS

from ..python_processes import run_python


@pytest.mark.parametrize(("name", "start_method"), START_METHODS.items())
def test_a_trainer_takes_the_name(name: str, start_method: str) -> None:
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


@pytest.mark.parametrize("ending", ["", "_spawn", "_fork", "_notebook"])
def test_all_reduce_can_be_chosen_by_a_string(ending: str) -> None:
    """For those who have no other way to pass an option."""
    trainer = pl.Trainer(strategy=f"megatron_ddp_all_reduce{ending}", accelerator="cpu", devices=2, logger=False)
    assert not trainer.strategy.config.use_distributed_optimizer


# --- import ----------------------------------------------------------------------------------------------------------

IMPORTS = {
    "before_lightning": """
        import megastrategy
        import megastrategy
        assert not [name for name in sys.modules if name.startswith(("lightning", "pytorch_lightning", "torchmetrics"))]
        importlib.reload(megastrategy)
    """,
    "after_lightning": """
        import lightning.pytorch, pytorch_lightning
        import megastrategy
        importlib.reload(megastrategy)
    """,
    "between_lightnings_packages": """
        import lightning.fabric
        import megastrategy
        from lightning.pytorch.strategies import StrategyRegistry
    """,
}

CHECK_NAMES = """
import inspect

for package, door in megastrategy_autoload.DOORS.items():
    module = importlib.import_module(f"{package}.strategies")
    assert "megastrategy" not in f"{type(module.__spec__.loader)} {type(module.__loader__)}"
    assert "megatron" not in inspect.getsource(module)
    registry = getattr(module, "StrategyRegistry" if "pytorch" in package else "STRATEGY_REGISTRY")
    names = sorted(name for name in registry if name.startswith("megatron"))
    endings = ["", "_fork", "_notebook", "_spawn"]
    kinds = ["megatron_ddp", "megatron_ddp_all_reduce"]
    assert names == sorted(kind + ending for kind in kinds for ending in endings), names
    assert door not in sys.modules, "the strategy is imported when it is asked for"
    api = importlib.import_module(package)
    user = getattr(api, "Trainer", None) or api.Fabric
    made = user(strategy="megatron_ddp", accelerator="cpu", devices=2).strategy
    assert type(made) is importlib.import_module(door).MegatronDDPStrategy, type(made)
    assert made.config.use_distributed_optimizer
    made = user(strategy="megatron_ddp_all_reduce", accelerator="cpu", devices=2).strategy
    assert type(made) is importlib.import_module(door).MegatronDDPStrategy, type(made)
    assert not made.config.use_distributed_optimizer
assert megastrategy.MegatronDDPStrategy.__module__ == "megastrategy.lightning"
assert len([finder for finder in sys.meta_path if "megastrategy" in type(finder).__module__]) == 1
"""


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.sample(1)
@pytest.mark.parametrize("order", IMPORTS)
def test_the_names_are_there_in_every_order_of_imports(tmp_path: Path, order: str) -> None:
    """In all four packages; ``import megastrategy`` must not cost Lightning's seconds, and leaves no trace in it."""
    start = "import importlib, sys\n" + textwrap.dedent(IMPORTS[order]) + "import megastrategy_autoload\n"
    run_python("-c", start + CHECK_NAMES, cwd=tmp_path)


@pytest.mark.fresh
@pytest.mark.long
def test_without_lightning_the_class_is_pytorch_lightnings(tmp_path: Path) -> None:
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


@pytest.mark.long
@pytest.mark.fresh
def test_without_either_an_error_says_what_to_install(tmp_path: Path) -> None:
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


# --- one package's instance in another -------------------------------------------------------------------------------


def give(package: str, strategy: Any) -> Any:
    """The strategy that a Trainer or Fabric of the package made of it."""
    api = importlib.import_module(package)
    user = getattr(api, "Trainer", None) or api.Fabric
    return user(strategy=strategy, accelerator="cpu", devices=2).strategy


@pytest.mark.parametrize("given_to", DOORS)
@pytest.mark.parametrize("made_for", DOORS)
def test_the_wrong_package_says_which_class_is_the_right_one(
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
