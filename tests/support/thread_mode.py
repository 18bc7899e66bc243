"""A dispatch mode that several ranks, which are threads, may be in at a time; and what modes leave in a process."""

from __future__ import annotations

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.counts import ThreadMode

__all__ = ["ThreadMode", "forget_entered_modes", "take_stance_back"]


def forget_entered_modes() -> None:
    """Puts the flags of the process back that modes have left; none may be entered."""
    for flag in ("torch_dispatch_mode", "non_infra_torch_dispatch_mode", "any_mode_without_ignore_compile_internals"):
        if hasattr(_python_dispatch, f"_is_in_{flag}"):  # the last two are recent
            setattr(_python_dispatch, f"_is_in_{flag}", False)
    with TorchDispatchMode():  # whose end puts back what it found, in C++ too
        pass


def take_stance_back() -> str:
    """The stance of torch.compile that the process was left in; it is "default" afterwards."""
    stance = torch.compiler.set_stance("default")
    return stance.prev.stance
