"""The page of the command line, written from the commands' own help by ``python -m tests.docs.command_line``."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.testing import CliRunner

from megastrategy.tools.commands import root

from . import ROOT

PAGE = ROOT / "docs" / "reference" / "cli.md"
WIDTH = 100

_BEGIN = """\
# Command line

The package has the command `megastrategy`; `python -m megastrategy` is the same. `python -m tests.docs.command_line`
writes this page from the commands, and a test fails if it differs.

| command | guide |
|---|---|
| `megastrategy checkpoint` | [checkpoints](../checkpoints.md#the-tool) |
| `megastrategy launch` | [Accelerate and Transformers](../accelerate.md) |
| `megastrategy plan` | [know whether a model fits](../planning.md) |
| `megastrategy profile` | [see where a step waits](../profiling.md) |

Exit status: 0 after success, 1 after an error, and 2 if the command line is wrong, as by a file that does not exist. An
error is one line on stderr.

With this line in `~/.bashrc` the shell completes commands and options (`zsh_source` in `~/.zshrc`; for fish it is
`_MEGASTRATEGY_COMPLETE=fish_source megastrategy | source`):

```bash
eval "$(_MEGASTRATEGY_COMPLETE=bash_source megastrategy)"
```
"""


def commands(group: click.Group = root, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that is not a group."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def help_of(words: tuple[str, ...]) -> str:
    return CliRunner().invoke(root, [*words, "--help"], prog_name="megastrategy", terminal_width=WIDTH).output


def page() -> str:
    parts = [_BEGIN]
    for words in commands():
        lines = "\n".join(line.rstrip() for line in help_of(words).strip().splitlines())
        parts.append(f"\n## megastrategy {' '.join(words)}\n\n```text\n{lines}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
