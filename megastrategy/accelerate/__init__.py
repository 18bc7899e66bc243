"""Hugging Face Accelerate, and with it Transformers.

``from megastrategy.accelerate import Accelerator`` in place of ``from accelerate import Accelerator``, or an unmodified
script under ``-m megastrategy.launch``, or in a block of :func:`replace_accelerators`. These two need the package
accelerate; the plugin and the launcher's options are read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._versions import ACCELERATE, require
from .plugin import MegatronDDPPlugin

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .replacement import replace_accelerators

__all__ = ["Accelerator", "MegatronDDPPlugin", "replace_accelerators"]


def __getattr__(name: str) -> Any:
    if name in ("Accelerator", "replace_accelerators"):
        require("accelerate", ACCELERATE)  # first: an old one lacks what is imported next
        from .accelerator import Accelerator
        from .replacement import replace_accelerators

        return {"Accelerator": Accelerator, "replace_accelerators": replace_accelerators}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
