"""Commands whose help begins with an example, and whose usage errors are one line; settings that several share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click

ARGUMENTS_ARE_THE_SCRIPTS = {"allow_interspersed_args": False, "show_default": True}
"""The context settings of a command whose last argument is a script, followed by the script's own arguments."""

is_module_option = click.option(
    "--module", "-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as for python -m."
)


class Command(click.Command):
    """A command whose help begins with ``example``."""

    def __init__(self, *args: Any, example: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.example = example

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the example above click's own line."""
        formatter.write(f"Example: {self.example}\n\n")
        super().format_usage(ctx, formatter)


class Group(Command, click.Group):
    """A group of commands: the same, and errors of usage without click's three lines above them."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Reads the group's own options."""
        with _in_one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Reads and runs a command of the group."""
        with _in_one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise  # it prints the help
    except click.UsageError as error:
        if error.ctx is None:
            raise
        raise click.UsageError(f"{error.format_message()} ({error.ctx.command_path} --help)") from error
