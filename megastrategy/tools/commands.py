"""The ``megastrategy`` command.

A command imports what it does when it runs: ``--help``, and the completion of a shell, do not wait for torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import click
from click.core import ParameterSource

from .. import __version__
from .click_commands import ARGUMENTS_ARE_THE_SCRIPTS, Command, Group, is_module_option

P = ParamSpec("P")

_PATH = click.Path(path_type=Path)
_existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_existing_directory = click.Path(exists=True, file_okay=False, path_type=Path)
_trust = click.option("--trust", is_flag=True, help="Load objects of any class, which can run code from the file.")
_script = click.argument("script")
_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
_num_ranks = click.option(
    "--nproc-per-node", "num_ranks", type=click.IntRange(min=1), default=2, help="Processes on this machine."
)
_skip = click.option("--skip", type=click.IntRange(min=0), default=5, help="Steps before them, to warm up.")
_force = click.option("--force", is_flag=True, help="Replace a file or checkpoint that is already there.")


class _UnlaunchableError(click.ClickException):
    exit_code = 2  # as for a command line that is wrong


def _expected_failures(command: Callable[P, None]) -> Callable[P, None]:
    """Reports expected failures in one line, with exit status 1, or 2 for a configuration that is wrong."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        from ..accelerate.launch_config import LaunchConfigError
        from ..core import CheckpointError

        try:
            command(*args, **options)
        except CheckpointError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}") from error
        except LaunchConfigError as error:
            raise _UnlaunchableError(str(error)) from error
        except ModuleNotFoundError as error:
            # a module that the user's own code lacks is an error of that code, with its traceback
            extras = {"accelerate": "accelerate", "yaml": "accelerate"}
            extra = extras.get(error.name or "")
            if extra is None:
                raise
            raise click.ClickException(f"this needs {error.name}: pip install 'megastrategy[{extra}]'") from error

    return run


@click.group(
    cls=Group,
    example="megastrategy plan --ranks 8,64 train.py",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="megastrategy")
def root() -> None:
    """Tools for trainings with megastrategy."""


@root.group(cls=Group, example="megastrategy checkpoint inspect last.ckpt")
def checkpoint() -> None:
    """Inspect checkpoints, and convert between files and directories."""


@checkpoint.command("inspect", cls=Command, example="megastrategy checkpoint inspect last.ckpt")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--depth", type=click.IntRange(min=1), default=1, show_default=True, help="Names are cut after so many dots."
)
@click.option("--all", "everything", is_flag=True, help="A line for every tensor.")
@_trust
@_expected_failures
def inspect_command(path: Path, depth: int, everything: bool, trust: bool) -> None:
    """Show the contents of the file or directory PATH, and which strategies load it. Reads no tensor's data."""
    from .contents import inspect_checkpoint
    from .rendering import render, show

    show(*render(inspect_checkpoint(path, trust), None if everything else depth))


@checkpoint.command("consolidate", cls=Command, example="megastrategy checkpoint consolidate step=7.ckpt one.ckpt")
@click.argument("directory", type=_existing_directory)
@click.argument("out", type=_PATH, required=False)
@_force
@_trust
@_expected_failures
def consolidate_command(directory: Path, out: Path | None, force: bool, trust: bool) -> None:
    """Make one file of a sharded DIRECTORY, as strategy="ddp" would have written it.

    OUT is NAME.consolidated.ckpt for NAME.ckpt if it is not given. The directory is read into memory.
    """
    from .conversion import consolidate, default_file

    file = default_file(directory) if out is None else out
    consolidate(directory, file, force=force, trust=trust)
    click.echo(file)


@checkpoint.command(
    "convert",
    cls=Command,
    example="megastrategy checkpoint convert last.ckpt sharded.ckpt --names names.json",
)
@click.argument("file", type=_existing_file)
@click.argument("directory", type=_PATH)
@click.option("--names", type=click.Path(exists=True, path_type=Path), help="JSON, or a sharded directory of the run.")
@_force
@_trust
@_expected_failures
def convert_command(file: Path, directory: Path, names: Path | None, force: bool, trust: bool) -> None:
    """Make a sharded DIRECTORY from one FILE, so that every rank reads its part.

    \b
    A file has optimizer state by number, a directory by parameter name. The names are taken from
      --names   {"optimizer_0": [["first.weight", ...], ...]}, by optimizer and group
    or from the file, if the optimizer was made from named_parameters(). They are never guessed.
    """
    from .checkpoint_parts import read_file
    from .conversion import check_target, convert, names_from, names_in_file

    check_target(directory, force)  # before any work
    parts = read_file(file, trust)
    convert(parts, names_from(names, trust) if names else names_in_file(parts), directory, force=force)
    click.echo(directory)


@root.command(
    "launch",
    cls=Command,
    example="megastrategy launch --config_file megatron_ddp.yaml train.py --epochs 3",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[accelerate's options]",
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@_expected_failures
def launch_command(arguments: tuple[str, ...]) -> None:
    """Run a script as accelerate launch does, with every Accelerator in it being megastrategy's.

    The file of --config_file may have both accelerate's keys and our options under megatron_ddp_config:. All
    options are those of accelerate launch, which lists them:

    \b
        accelerate launch --help
    """
    from .launching import launch

    launch(arguments)


@root.command(
    "profile",
    cls=Command,
    example="megastrategy profile --nproc-per-node 2 --steps 10 train.py --epochs 1",
    context_settings=ARGUMENTS_ARE_THE_SCRIPTS,
)
@click.option("--steps", type=click.IntRange(min=1), default=10, help="Steps to record.")
@_skip
@click.option("--out", type=_PATH, default=Path("profile"), help="Folder for records and pictures.")
@_num_ranks
@is_module_option
@_script
@_arguments
@_expected_failures
def profile_command(script: str, arguments: tuple[str, ...], out: Path, skip: int, **options: Any) -> None:
    """Run SCRIPT as torchrun does, and show the time of its communication and how much computation hides.

    Nothing in the script changes: a plain loop with megastrategy, Lightning or Fabric with "megatron_ddp" on as many
    devices as there are processes, or -m megastrategy.launch SCRIPT for Accelerate. It runs to its end; Ctrl-C ends it
    sooner, and loses nothing once the steps are recorded. The last line names the bottleneck: its input, its own work,
    the link, or a rank that is late. The folder then has timeline.png, and the events of each rank.
    """
    from .bottlenecks import verdicts
    from .profile_report import draw, has_steps, tables, why_nothing
    from .profiling import run_script
    from .rendering import show

    _check_script(script, options["is_module"])
    done = run_script(script, arguments, out, skip=skip, **options)
    # also of a script that failed later: its record may show why
    if has_steps(done.ranks):
        show(*tables(done.ranks))
        click.echo(draw(done.ranks, out))
        for verdict in verdicts(done.ranks):
            click.echo(verdict.sentence)
    elif not done.failure:
        raise click.ClickException(why_nothing(done.ranks, skip))
    if done.failure:
        raise click.ClickException(done.failure)


@root.command(
    "plan",
    cls=Command,
    example="megastrategy plan --ranks 8,64 --device-memory 24GiB train.py --epochs 3",
    context_settings=ARGUMENTS_ARE_THE_SCRIPTS,
)
@click.option("--ranks", default="1,2,4,8", help="Numbers of ranks, with commas between them.")
@click.option("--device-memory", "memory", default="80GiB", help="Of one device, with its unit.")
@click.option("--values", "computes", is_flag=True, help="Compute the step, and do not only look at its shapes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@is_module_option
@click.option("--cards", help="Cut SCRIPT, a module:layers, for these: 3090:2,2080ti:1, or mine=24GB@35.6TFLOPS:2.")
@click.option("--batch", help="With --cards: a microbatch, or a function that returns one, as module:name.")
@click.option("--microbatches", type=click.IntRange(min=1), default=4, help="With --cards: of a step.")
@click.option("--objective", type=click.Choice(["time", "waste"]), default="time", help="With --cards: least of what.")
@click.option("--schedule", type=click.Choice(["1f1b", "gpipe"]), default="1f1b", help="With --cards.")
@click.option("--slack", type=float, default=0.0, help="With --cards: the part of each card's memory that stays free.")
@click.option(
    "--frozen", metavar="FIRST-LAST,...", help="With --cards: layers that are not trained.  [default: as they are]"
)
@click.option("--split", metavar="N-N-...", help="With --cards: what this cut takes, on the cards in this order.")
@click.option("--keep-together", "together", multiple=True, metavar="FIRST-LAST", help="With --cards: layers not cut.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def plan_command(
    context: click.Context, /, script: str, arguments: tuple[str, ...], cards: str | None, **options: Any
) -> None:
    """Say whether SCRIPT fits, on each number of ranks: its first step is run here, without devices and peers.

    Nothing in the script changes: a plain loop with megastrategy, Lightning or Fabric with "megatron_ddp", or
    -m megastrategy.launch SCRIPT for Accelerate. It is ended when its second step begins; what it writes until then is
    written. Large tensors have shapes and no values, so a model larger than this machine can be planned.

    With --cards, say how SCRIPT, a module:name of a list of layers, is best cut for cards that differ.
    """
    _check_given(context, cuts=cards is not None)

    from .plan.command import plan_partitions, plan_ranks
    from .plan.scripts import PlanError

    try:
        if cards is not None:
            plan_partitions(script, cards, **options)
        else:
            plan_ranks(script, arguments, **options)
    except PlanError as error:
        raise click.ClickException(str(error)) from error


_OF_RANKS = ("ranks", "memory", "computes", "is_module", "arguments")
_OF_CARDS = ("batch", "microbatches", "objective", "schedule", "slack", "frozen", "split", "together")


def _check_given(context: click.Context, *, cuts: bool) -> None:
    """Raises for options of the other question, and for options after the script."""
    spelled = {param.name: param.opts[0] for param in context.command.params}
    for name in _OF_RANKS if cuts else _OF_CARDS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and context.params[name]:
            name_of_option = "arguments after module:layers" if name == "arguments" else spelled[name]
            raise click.UsageError(f"--cards takes no {name_of_option}" if cuts else f"{name_of_option} needs --cards")
    options = {option for param in context.command.params for option in param.opts if option.startswith("--")}
    script = context.params["script"]
    arguments = context.params["arguments"]
    for argument in arguments if arguments[:1] != ("--",) else ():
        option = argument.partition("=")[0]
        if option in options:
            raise click.UsageError(
                f"{option} after {script} is an argument of the script: type {context.command_path} {option} ... "
                f"{script} for the plan, or {context.command_path} {script} -- {' '.join(arguments)} for the script"
            )


def _check_script(script: str, is_module: bool) -> None:
    if not is_module and not Path(script).is_file():
        raise click.UsageError(f"the script {script} does not exist")
