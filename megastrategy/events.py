"""What the engine reports while it runs, to the ``listener`` of a ``DistributedDataParallel`` or a strategy's
``add_listener``."""

from .core.events import Event, EventKind, Listener

__all__ = ["Event", "EventKind", "Listener"]
