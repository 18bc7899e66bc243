"""Errors of what happened at run time; what a user passed in wrongly is a ``ValueError``.

Every message says what was expected, what was found, which parameter or bucket it concerns, and what to do.
"""

from __future__ import annotations

from typing import NoReturn


class MegastrategyError(RuntimeError):
    """Base class of every error raised for something that went wrong while training."""


class LayoutMismatchError(MegastrategyError):
    """The ranks hold different models or configurations, so their buckets do not line up."""


class ParameterChangedError(MegastrategyError):
    """A parameter no longer has the dtype, shape or device that its place in the buffers was made for."""


class UnusedParameterError(MegastrategyError):
    """A parameter received no gradient although the configuration promised that all of them do."""


class BucketInFlightError(MegastrategyError):
    """A gradient arrived for a bucket whose reduction had already been launched, in a graph declared static."""


class MainGradError(MegastrategyError):
    """A layer added a gradient to ``main_grad`` when it could not be taken in."""


class NonFiniteGradError(MegastrategyError):
    """A gradient was infinite or NaN before it was reduced, and the configuration asks for a check."""


class MicrobatchMismatchError(MegastrategyError):
    """The ranks reduce gradients of different microbatches with each other."""


class BatchMismatchError(MegastrategyError):
    """The ranks of a tensor group were given different batches, of which they would train a mixture."""


class StageError(MegastrategyError):
    """A pipeline was used as its schedule, which runs the backwards of a batch in the forward, does not allow."""


class ReplicaMismatchError(MegastrategyError):
    """The ranks hold different values of a weight that they should hold alike."""


class LossTokensError(MegastrategyError):
    """Gradients cannot be averaged by tokens: some of their losses were counted and others were not."""


class ReducedGradError(MegastrategyError):
    """Something computed with ``.grad`` after a reduce-scatter, when this rank has a shard of the gradient alone."""


class CollectiveError(MegastrategyError):
    """A collective did not complete, most often because another rank ended or hangs."""


class NotOnAllRanksError(MegastrategyError):
    """Some ranks called what has to be called on all of them."""


# A ValueError too: it is mostly raised for what the user has passed to a constructor.
class OptimizerNotShardableError(MegastrategyError, ValueError):
    """An update of one parameter depends on others, so that no division among ranks would leave it as it is."""


class DirectUseError(MegastrategyError):
    """The optimizer inside a DistributedOptimizer was used as if it were not sharded."""


class ClosedError(MegastrategyError):
    """Something was used after ``DistributedDataParallel.close()``."""


class CheckpointError(MegastrategyError):
    """A checkpoint could not be written, cannot be read, or does not fit what it is loaded into."""


def raise_closed() -> NoReturn:
    """Raises the error of a closed wrapper, of a copy, and of the optimizer of either."""
    raise ClosedError(
        "this DistributedDataParallel was closed, or its module or a layer of it was wrapped again since, or it is a "
        "copy (deepcopy, pickle): it reduces no gradients. To train its module, call the wrapper that was made last, "
        "or wrap the module again, and make a new DistributedOptimizer. Models that share a layer and are trained in "
        "turns have one wrapper: wrap one module that contains them all (torch.nn.ModuleDict)"
    )
