"""A dispatch mode that several ranks, which are threads, may be in at a time."""

from __future__ import annotations

from typing import Any, Self

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class ThreadMode(TorchDispatchMode):
    """Sees the operations of the threads that enter it.

    torch's own also sets flags of the process while it is entered, and puts back what it found. Where threads enter and
    leave in turns, the last to leave finds them set, and they stay: torch.compile compiles nothing any more.
    """

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _pop_mode()


def forget_entered_modes() -> None:
    """Puts the flags of the process back that modes have left; none may be entered."""
    for flag in ("torch_dispatch_mode", "non_infra_torch_dispatch_mode", "any_mode_without_ignore_compile_internals"):
        if hasattr(_python_dispatch, f"_is_in_{flag}"):  # the last two are recent
            setattr(_python_dispatch, f"_is_in_{flag}", False)
    with TorchDispatchMode():  # whose end puts back what it found, in C++ too
        pass
