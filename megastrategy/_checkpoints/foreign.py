"""Describes directories and objects of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe_deepspeed(path: Path) -> str:
    """Says what to do with a checkpoint of DeepSpeed; empty for other folders."""
    inside = [path, *(child for child in path.iterdir() if child.is_dir())]
    if not any(any(place.glob(f"*_{kind}_states.pt")) for kind in ("model", "optim") for place in inside):
        return ""
    script = path if (path / "zero_to_fp32.py").is_file() else path.parent
    return (
        f"is a checkpoint of DeepSpeed: python {script / 'zero_to_fp32.py'} {script} OUT writes its weights into a "
        "folder OUT, to be loaded as weights. Its optimizer state cannot be taken over"
    )


def describe_value(value: Any) -> str:
    """Describes a value of an unexpected kind in a few words."""
    if isinstance(value, Mapping):
        keys = list(value)
        return f"a {type(value).__name__} with {keys[:5]}{' and more' if len(keys) > 5 else ''}"
    return f"a {type(value).__name__}"
