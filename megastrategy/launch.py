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
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .accelerate.launch_config import LaunchConfigError, plugin_from_launch

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
        # options of this launcher are only before the target: after it the same names may be the script's
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
            # absolute, as Python's __file__ of a script
            runpy.run_path(os.path.abspath(self.target), run_name="__main__")

    def set_search_path(self) -> None:
        """Puts a script's folder first, as Python does. ``python -m megastrategy.launch`` put the working directory
        there, which is right for a module only."""
        if not self.is_module and not sys.flags.safe_path:
            real = os.path.realpath(self.target)
            sys.path[0] = real if os.path.isdir(real) else os.path.dirname(real)


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
        from .accelerate import replace_accelerators
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        sys.exit("megastrategy.launch: it needs accelerate: pip install 'megastrategy[accelerate]'")
    with replace_accelerators(plugin):
        command.run()


if __name__ == "__main__":
    # by its own name: __main__ is the script's from here on
    from megastrategy.launch import main as launch

    launch()
