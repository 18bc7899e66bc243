"""The errors that training, saving and loading raise; all are :class:`MegastrategyError`, a ``RuntimeError``.

A wrong argument of a user is a ``ValueError``.
"""

from .core.errors import (
    BackwardFailedError,
    BatchMismatchError,
    BucketInFlightError,
    CheckpointError,
    ClosedError,
    CollectiveError,
    DirectUseError,
    LayoutMismatchError,
    LossTokensError,
    MainGradError,
    MegastrategyError,
    MicrobatchMismatchError,
    NonFiniteGradError,
    NotOnAllRanksError,
    OptimizerNotShardableError,
    ParameterChangedError,
    ReducedGradError,
    ReplicaMismatchError,
    StageError,
    UnusedParameterError,
)

__all__ = [
    "BackwardFailedError",
    "BatchMismatchError",
    "BucketInFlightError",
    "CheckpointError",
    "ClosedError",
    "CollectiveError",
    "DirectUseError",
    "LayoutMismatchError",
    "LossTokensError",
    "MainGradError",
    "MegastrategyError",
    "MicrobatchMismatchError",
    "NonFiniteGradError",
    "NotOnAllRanksError",
    "OptimizerNotShardableError",
    "ParameterChangedError",
    "ReducedGradError",
    "ReplicaMismatchError",
    "StageError",
    "UnusedParameterError",
]
