"""Re-exports the engine's events for a ``listener`` of a ``DistributedDataParallel``, or of a strategy's
``add_listener``."""

from .core.events import Event, EventKind, Listener

__all__ = ["Event", "EventKind", "Listener"]
