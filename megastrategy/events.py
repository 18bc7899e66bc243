"""Re-exports what a ``listener`` of a ``DistributedDataParallel``, or one given to a strategy's ``add_listener``, hears
from the engine while it runs."""

from .core.events import Event, EventKind, Listener

__all__ = ["Event", "EventKind", "Listener"]
