"""Runs an unmodified script with every ``accelerate.Accelerator`` that it makes being ours.

    accelerate launch [accelerate's flags] -m megastrategy.launch [--config FILE] script.py [arguments]
    accelerate launch [accelerate's flags] -m megastrategy.launch [--config FILE] -m module [arguments]

``accelerate launch --help`` lists accelerate's flags.

Those that ``transformers.Trainer`` and other libraries make are ours too. FILE is YAML with options under
``megatron_ddp_config:``; it may have accelerate's own keys beside. ``MEGATRON_DDP_<FIELD>`` in the environment goes
before it. Nothing outside of the process changes, nor do processes that the script starts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .accelerate.launch_config import LaunchConfigError, plugin_from_launch

if TYPE_CHECKING:
    from .accelerate.plugin import MegatronDDPPlugin

_log = logging.getLogger("megastrategy.launch")

_USAGE = "usage: megastrategy.launch [--config FILE] (script.py | -m module) [arguments]"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line, read.

    Attributes:
        config: the YAML file.
        target: the script, or the module's name.
        is_module: which of the two.
        arguments: for the script.
    """

    config: Path | None
    target: str
    is_module: bool
    arguments: tuple[str, ...]

    @staticmethod
    def read(arguments: Sequence[str]) -> Command:
        """Reads up to the script or module: whatever comes after it is the script's, ``--help`` and ``--`` included.

        Raises:
            LaunchConfigError: for anything else.
        """
        rest = list(arguments)
        config: Path | None = None
        # options of this launcher stand before the target alone: behind it the same names may be the script's
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
            option, has_value, value = rest.pop(0).partition("=")
            if option != "--config":
                raise LaunchConfigError(f"unknown option {option}. {_USAGE}")
            if not has_value:
                value = rest.pop(0) if rest else ""
            # a forgotten file would take the next option for its name, and the script's name for nothing
            if not value or value.startswith("-"):
                raise LaunchConfigError(f"--config needs a file. {_USAGE}")
            config = Path(value)
        is_module = bool(rest) and rest[0] in ("-m", "--module")
        if is_module:
            del rest[0]
        if not rest:
            raise LaunchConfigError(f"no {'module' if is_module else 'script'} is given. {_USAGE}")
        return Command(config, rest[0], is_module, tuple(rest[1:]))

    def check_target(self) -> None:
        """
        Raises:
            LaunchConfigError: if there is no such script or module.
        """
        # every rank would raise from runpy, with a traceback that names this package and not the mistake
        if not self.is_module:
            if not os.path.exists(self.target):
                raise LaunchConfigError(f"the script {self.target} does not exist (in {os.getcwd()})")
            return
        try:
            found = importlib.util.find_spec(self.target)  # imports the packages that it is in
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.target}.".startswith(f"{error.name}."):
                raise  # the package is there, and lacks something
            found = None
        if found is None:
            raise LaunchConfigError(f"there is no module {self.target}")

    def run(self) -> None:
        """Runs the target in this process, as ``python script.py`` or ``python -m module`` would."""
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            # whole, as Python's __file__ of a script
            runpy.run_path(os.path.abspath(self.target), run_name="__main__")

    def set_search_path(self) -> None:
        """Puts a script's folder first, as Python does. ``python -m megastrategy.launch`` put the working directory
        there, which is right for a module only."""
        if not self.is_module and not sys.flags.safe_path:
            real = os.path.realpath(self.target)
            sys.path[0] = real if os.path.isdir(real) else os.path.dirname(real)


def replace_accelerators(plugin: MegatronDDPPlugin) -> None:
    """Makes ``accelerate.Accelerator(...)`` return ours in this process from now on, however the name was imported.

    The class stays where it is, since libraries have it by reference already, and its ``__new__`` hands out an object
    of ours, which is a subclass. Other subclasses are left as they are. ``plugin`` holds for all of ours that are given
    none, those included that a script makes by our name.
    """
    import accelerate

    from .accelerate.accelerator import Accelerator
    from .accelerate.accelerator import MegatronDDPPlugin as Plugin

    init = Accelerator.__init__

    @functools.wraps(init)
    def init_with_options(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        handlers = given.get("kwargs_handlers") or ()
        if given.get("megatron_ddp_plugin") is None and not any(isinstance(item, Plugin) for item in handlers):
            given["megatron_ddp_plugin"] = plugin
        init(**given)

    Accelerator.__init__ = init_with_options  # type: ignore[method-assign]
    told: set[type] = set()

    def __new__(cls: type, *_: Any, **__: Any) -> Any:  # noqa: N807 - it becomes the class's
        if cls is accelerate.Accelerator:
            return object.__new__(Accelerator)  # whose __init__ is called next
        if not issubclass(cls, Accelerator) and cls not in told:
            told.add(cls)
            if os.environ.get("RANK", "0") == "0":
                _log.warning(
                    "%s.%s is a subclass of accelerate.Accelerator and is not replaced: it trains with torch DDP. "
                    "Derive it from megastrategy.accelerate.Accelerator",
                    cls.__module__,
                    cls.__qualname__,
                )
        return object.__new__(cls)

    # or the class would seem to take anything
    __new__.__signature__ = inspect.signature(accelerate.Accelerator.__init__)  # type: ignore[attr-defined]
    accelerate.Accelerator.__new__ = __new__


def main() -> None:
    """``python -m megastrategy.launch``"""
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\n")
        return
    try:
        command = Command.read(sys.argv[1:])
        command.set_search_path()
        command.check_target()
        plugin = plugin_from_launch(command.config, os.environ)
    except LaunchConfigError as error:
        sys.stderr.write(f"megastrategy.launch: {error}\n")
        sys.exit(2)
    try:
        replace_accelerators(plugin)
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        sys.exit("megastrategy.launch: it needs accelerate: pip install 'megastrategy[accelerate]'")
    command.run()


if __name__ == "__main__":
    # by its own name: __main__ is the script's from here on
    from megastrategy.launch import main as launch

    launch()
