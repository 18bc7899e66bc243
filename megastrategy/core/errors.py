"""Errors at run time; a wrong argument of the user's is a ``ValueError``.

Every message says what was expected, what was found, which parameter or bucket it concerns, and what to do.
"""

from __future__ import annotations

from typing import NoReturn


class MegastrategyError(RuntimeError):
    """Base class of all errors for failures during training."""


class LayoutMismatchError(MegastrategyError):
    """The ranks hold different models or configurations, so their buckets do not line up."""


class ParameterChangedError(MegastrategyError):
    """A parameter no longer has the dtype, shape or device that its place in the buffers was made for, or user code has
    replaced it, or stepped it during a backward."""


class UnusedParameterError(MegastrategyError):
    """A parameter received no gradient although the configuration promised that all of them do."""


class BucketInFlightError(MegastrategyError):
    """A gradient arrived for a bucket whose reduction had already been launched, in a graph declared static."""


class MainGradError(MegastrategyError):
    """A layer added a gradient to ``main_grad`` at a time when it could not be used."""


class NonFiniteGradError(MegastrategyError):
    """A gradient was infinite or NaN before it was reduced, and the configuration asks for a check."""


class MicrobatchMismatchError(MegastrategyError):
    """The ranks, or replicas, reduce gradients of different microbatches with each other."""


class BackwardFailedError(MegastrategyError):
    """A forward or a backward raised on another rank, and the gradients of all ranks were dropped."""


class BatchMismatchError(MegastrategyError):
    """The ranks of a tensor group were given different batches, and would train on a mixture of them."""


class StageError(MegastrategyError):
    """A pipeline was used in a way that its schedule, which runs a batch's backwards in the forward, does not allow."""


class ReplicaMismatchError(MegastrategyError):
    """The ranks have different values of a weight that should be equal, or a replica differs from the others."""


class LossTokensError(MegastrategyError):
    """Gradients cannot be averaged by tokens: some of their losses were counted and others were not."""


class ReducedGradError(MegastrategyError):
    """A computation used ``.grad`` after a reduce-scatter, when this rank has only a shard of the gradient."""


class CollectiveError(MegastrategyError):
    """A collective did not complete, most often because another rank ended or hangs."""


class NotOnAllRanksError(MegastrategyError):
    """Only some ranks made a call that all ranks have to make."""


# A ValueError, too: it is mostly raised for an argument of a constructor.
class OptimizerNotShardableError(MegastrategyError, ValueError):
    """An update of one parameter depends on others, so that the optimizer cannot be divided among ranks."""


class DirectUseError(MegastrategyError):
    """The optimizer inside a DistributedOptimizer was used as if it were not sharded."""


class ClosedError(MegastrategyError):
    """An object was used after ``DistributedDataParallel.close()``."""


class CheckpointError(MegastrategyError):
    """A checkpoint could not be written or read, or does not fit the object that it is loaded into."""


def raise_closed() -> NoReturn:
    """Raises the error of a closed wrapper, of a copy, and of the optimizer of either."""
    raise ClosedError(
        "this DistributedDataParallel was closed, or its module or a layer of it was wrapped again since, or it is a "
        "copy (deepcopy, pickle): it reduces no gradients.\n"
        "Call the newest wrapper, or wrap the module again and make a new DistributedOptimizer. Wrap models that share "
        "a layer together, in a torch.nn.ModuleDict"
    )
