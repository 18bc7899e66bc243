"""``if accelerator.is_main_process: accelerator.save_state(...)``, as most scripts have it.

The main process saves alone where the others can hand over what it lacks, see the engine's [Note: handing over], or
where it lacks nothing. All its barriers are then skipped, since nobody else is in them. Where it cannot, all ranks
learn within moments why, and what to change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..core import Collectives, NotOnAllRanksError
from .prepared_model import PREPARED

REMEDY = (
    "Move accelerator.save_state(...) out of `if accelerator.is_main_process:`: every rank calls it, and the main "
    "process writes. Or leave the script as it is, and {} in the YAML file of -m megastrategy.launch, or as an "
    "argument of MegatronDDPPlugin"
)
_WHOLE = "keep the whole optimizer on every rank: `use_distributed_optimizer: false`"
_ONE_FILE = "write one file instead of a directory: `state_dict_type: full`"


class SavesAlone:
    """Lets an Accelerator save on the main process alone; comes before accelerate's own class."""

    _is_alone = False  # in a save that other ranks are not in

    # accelerate's
    _models: list[Any]
    device: Any
    use_distributed: bool
    project_configuration: Any

    def wait_for_everyone(self) -> None:
        """Waits as accelerate's does, but not in a save that the main process makes alone."""
        if not self._is_alone:
            self._enter("accelerator.wait_for_everyone()")
            super().wait_for_everyone()  # type: ignore[misc]

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers as accelerate's does."""
        self._enter("accelerator.gather()")
        return super().gather(*args, **kwargs)  # type: ignore[misc]

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduces as accelerate's does, with its defaults."""
        self._enter("accelerator.reduce()")
        return super().reduce(*args, **kwargs)  # type: ignore[misc]

    def _enter(self, barrier: str) -> None:
        """Counts a barrier, so that a rank in one of these is known to be past where another rank is."""
        engine = self._engine()
        if engine is not None:
            engine.progress.enter(barrier)

    def _engine(self) -> Collectives | None:
        """Returns the collectives of the prepared models; None in one process, or where nothing is prepared."""
        if not self.use_distributed:
            return None
        mine = (model for model in PREPARED.open() if any(model.module is item for item in self._models))
        return next((model.engine.collectives for model in mine), None)

    @contextlib.contextmanager
    def _saving(self, *, is_sharded: bool, in_directory: bool) -> Iterator[bool]:
        """Yields whether all ranks are here. If not, the main process is alone; on a rank that comes late, it was.

        Args:
            is_sharded: whether the main process lacks anything.
            in_directory: whether every rank has a part to write.

        Raises:
            NotOnAllRanksError: if the main process cannot save alone, and another rank is elsewhere.
        """
        engine = self._engine()
        if engine is None:
            yield True
            return
        # what accelerate numbers must not be there yet for any rank
        is_numbered = self.project_configuration.automatic_checkpoint_naming
        # on a GPU the host runs ahead, and cannot tell the shards before a step from those after it
        on_host = self.device.type == "cpu"
        may_go_alone = not in_directory and not is_numbered and (on_host or not is_sharded)
        remedy = REMEDY.format(_ONE_FILE if in_directory and on_host else _WHOLE)
        try:
            what = "accelerator.save_state()"
            with engine.meeting(what, may_go_alone=may_go_alone, remedy=remedy) as meeting:
                self._is_alone = not meeting.is_complete
                yield meeting.is_complete
        except NotOnAllRanksError as error:
            # the refusal of this meeting names the way out; one from inside the save does not yet
            if remedy in str(error):
                raise
            raise NotOnAllRanksError(f"in accelerator.save_state(): {error}\n{remedy}") from error
        finally:
            self._is_alone = False
