"""The names that work in a notebook, said where Lightning would name those of its own strategies."""

from __future__ import annotations

from typing import Any, ClassVar

from megastrategy_autoload import START_METHODS


class PointsToNotebookNames:
    """Comes in front of a package's ``DDPStrategy``, which says the same of "ddp"."""

    # the package's; set by the class that is made from this one
    _is_interactive: ClassVar[bool]
    _incompatible: ClassVar[type[Exception]]
    _user: ClassVar[str]
    # of the DDPStrategy
    launcher: Any
    _start_method: Any

    def _configure_launcher(self) -> None:
        """Refuses a launcher that cannot work in a notebook before Lightning does, whose text would send the user to
        torch DDP."""
        super()._configure_launcher()  # type: ignore[misc]
        launcher = self.launcher
        if not self._is_interactive or launcher is None or launcher.is_interactive_compatible:
            return
        names = " or ".join(f"'{name}'" for name in START_METHODS if name.endswith("_notebook"))
        raise self._incompatible(
            f"{type(self).__name__} with start_method={self._start_method!r} is not compatible with an interactive "
            f"environment. Run your code as a script, or choose a notebook-compatible strategy: `{self._user}(strategy="
            f"{names})`, or with options `MegatronDDPStrategy(start_method='fork', ...)`. In case you are spawning "
            f"processes yourself, make sure to include the {self._user} creation inside the worker function."
        )
