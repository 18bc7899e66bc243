"""The page of options, written from the configuration's own docstrings by ``python -m tests.docs.options``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap

from megastrategy import DistributedDataParallelConfig

from . import ROOT

PAGE = ROOT / "docs" / "reference" / "options.md"

_BEGIN = """\
# Options

Fields of `DistributedDataParallelConfig`, under Megatron-LM's names. This page is written from their docstrings
(`python -m tests.docs.options`), and a test fails if it differs.

| you train with | an option is |
|---|---|
| Lightning, Fabric | an argument of the [strategy](../lightning.md#arguments-of-the-strategy): `bucket_size=10**6` |
| Accelerate | a field of the plugin: `MegatronDDPPlugin(bucket_size=1_000_000)` |
| `megastrategy launch` | a key under `megatron_ddp_config:`, or `MEGATRON_DDP_BUCKET_SIZE` in the environment |
| a plain loop | a field of `DistributedDataParallelConfig(bucket_size=1_000_000)` |

torch DDP's own names [are accepted](../coming_from/torch_ddp.md) if there is an equivalent here. Any other name is
refused, and so are options that contradict each other:

```python
from megastrategy import DistributedDataParallelConfig

try:
    DistributedDataParallelConfig(grad_buffer="pooled", use_distributed_optimizer=False)
except ValueError as error:
    print(str(error).partition(":")[0])
```

prints

```text
grad_buffer='pooled' contradicts use_distributed_optimizer=False
```

In what follows d is the number of ranks.
"""

_LINKS = {
    "build's [Note: default bucket size]": (
        "[Note: default bucket size] in [core/layout/build.py](../../megastrategy/core/layout/build.py)"
    ),
    "Not with a GradScaler": "[Example](../gradients.md#find-what-is-not-finite). Not with a GradScaler",
}
"""What stands in the docstrings, and where the page leads from it."""


def field_docstrings() -> dict[str, str]:
    """Each field's docstring as Markdown in one line, by name, in the order of declaration."""
    [kind] = ast.parse(textwrap.dedent(inspect.getsource(DistributedDataParallelConfig))).body
    assert isinstance(kind, ast.ClassDef)
    found = {}
    for field, following in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(following, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(following.value, ast.Constant)
            found[field.target.id] = _to_markdown(inspect.cleandoc(following.value.value))
    return found


def _to_markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)  # a role; its last name is shown
    text = " ".join(text.replace("``", "`").split())
    for words, link in _LINKS.items():
        text = text.replace(words, link)
    return text


def page() -> str:
    """The page, from the docstrings."""
    defaults = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}
    docstrings = field_docstrings()
    lines = [_BEGIN, "| field | default | |", "|---|---|---|"]
    for name, text in docstrings.items():
        # Up to the first stop, without text in parentheses: the rest is in the field's own section.
        gist = re.split(r"[.:;](?=\s|$)", re.sub(r" \([^)]*\)", "", text), maxsplit=1)[0]
        lines.append(f"| [`{name}`](#{name}) | `{_literal(defaults[name])}` | {gist} |")
    for name, text in docstrings.items():
        lines += ["", f"## {name}", "", f"Default: `{_literal(defaults[name])}`.", ""]
        lines.append(textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def _literal(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else repr(default)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
