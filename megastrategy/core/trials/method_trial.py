"""Finds the effect of a method of the user's optimizer, by trying it on copies with small tensors.

Optimizers have methods beside ``step``: Schedule-Free's ``train()`` and ``eval()`` move every weight, SAM's
``first_step()`` takes the norm of all gradients, others set a learning rate. Called on shards the first is right, the
second silently wrong, and the third does not care. A method's name says nothing about it, so a call is tried just
before it is made, with its own arguments, in the mode that the optimizer is in.

[Note: what a trial compares]
The call is made on copies that have taken a few steps: on whole tensors with gradients, on whole tensors without, and
on flat pieces without, each piece in an optimizer of its own, as on ranks. What differs between the first two depends
on gradients, which shards do not have between steps. What differs between the last two depends on more than one
element. Everything that a call can leave is compared: tensors, their state, the groups' options, the optimizer's
attributes, the arguments and the result. A call that computes with state and leaves no trace of it cannot be judged.
A call that returns a context manager, a generator, or a function that holds the optimizer is refused: later the groups
contain whole Parameters, and the state has no entries for them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .isolation import Isolation
from .optimizer_copy import TRIAL_SHAPE, Call, Contents, Found, OptimizerCopy
from .trial import enter_training
from .values import NotForShardsError, describe_error

_STEPS = 3  # state has then grown from zero, and sums differ from the last gradient
_LR = 0.01  # weights of size 1 move by more than rounding hides


class Effect(enum.Enum):
    """The effect of a call on the optimizer's tensors on this rank."""

    NONE = enum.auto()
    """It reads no state and moves no parameter: it may be made with the model's Parameters."""
    STATE = enum.auto()
    """It looks into the state, and computes with no tensor."""
    ELEMENTS = enum.auto()
    """It computes with tensors element by element, and may move parameters."""


def looks_at_tensors(optimizer: Optimizer, call: Call, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a call looks at parameters or their state at all: ``train()`` in training does not. No copy is stepped.

    Raises:
        NotForShardsError: if that cannot be found out.
    """
    with _without_trace(optimizer, device):
        tried = OptimizerCopy(optimizer, _fresh_contents(optimizer, device, dtype))
        tried.make(call)
        return bool(tried.touches) or tried.has_moved


@contextlib.contextmanager
def _without_trace(optimizer: Optimizer, device: torch.device) -> Iterator[Isolation]:
    """Enters an isolation, in which nothing is sent and whose changes are undone.

    Raises:
        NotForShardsError: at the end, if something was sent, or cannot be undone.
    """
    isolation = Isolation(optimizer, device)
    with isolation.open(), torch.no_grad():
        yield isolation
        isolation.check()


def try_call(optimizer: Optimizer, call: Call, device: torch.device, dtype: torch.dtype) -> Effect:
    """Returns the effect of a call; see [Note: what a trial compares]. The same on every rank whose optimizer has the
    same options and attributes. The optimizer is left untouched; ``device`` and ``dtype`` are of the tensors it steps.

    Raises:
        NotForShardsError: if it may not be made on shards.
    """
    # On an optimizer without any step, which costs least: most calls read or set an option.
    if not looks_at_tensors(optimizer, call, device, dtype):
        return Effect.NONE
    with _without_trace(optimizer, device) as isolation:
        stepped = _stepped(optimizer, _fresh_contents(optimizer, device, dtype))
        whole, bare = (OptimizerCopy(optimizer, stepped.copied(grads=grads)) for grads in (True, False))
        for tried in (whole, bare):
            isolation.restore()
            tried.make(call)
        if whole.error is not None:
            raise NotForShardsError(f"a trial of it raised {whole.error}")
        # A parameter by way of an attribute is the model's whole one, not the shard that is stepped in its place.
        if whole.uses_other_params or bare.uses_other_params:
            raise NotForShardsError("it uses parameters by other ways than the groups")
        if whole.has_other_groups:
            raise NotForShardsError("it changes which parameters are in the groups")
        # The three signs that gradients (or chance) matter: it fails without them, changes them, or ends otherwise.
        if bare.error is not None or whole.has_changed_grads or not whole.did_the_same(bare):
            raise NotForShardsError("it uses gradients, which shards do not have between steps, or random numbers")
        # It did look, in the groups alone, as at a parameter's shape; whole Parameters answer that as well.
        if not ("state" in bare.touches or bare.has_moved):
            return Effect.NONE
        _check_pieces([OptimizerCopy(optimizer, piece) for piece in stepped.cut()], bare, call, isolation)
        # A sum over state that is returned, say: on a rank it would be the sum of its own part.
        if bare.num_operations and not bare.has_changed:
            raise NotForShardsError("it computes with state, of which each rank has its part, and changes nothing")
        return Effect.ELEMENTS if bare.num_operations else Effect.STATE


def _check_pieces(pieces: Sequence[OptimizerCopy], whole: OptimizerCopy, call: Call, isolation: Isolation) -> None:
    for piece in pieces:
        isolation.restore()
        piece.make(call)
        if piece.error is not None:
            raise NotForShardsError(f"a trial of it on flat pieces of tensors raised {piece.error}")
        # The memory of a shard is a part of a run's, in which the engine goes on to look for it.
        if piece.has_new_memory:
            raise NotForShardsError("it gives tensors other memory (param.data = ...), and shards are views")
    tensors = [
        {
            name: torch.cat([values[name] for values in of_pieces]).reshape(TRIAL_SHAPE)
            for name in of_pieces[0]
            if all(name in values for values in of_pieces)
        }
        for of_pieces in zip(*(piece.after.tensors for piece in pieces), strict=True)
    ]
    # Each piece's other findings too, not the first's alone: a count kept by one rank differs from another's.
    if not all(whole.after.is_like(Found(tensors, piece.after.others)) for piece in pieces):
        raise NotForShardsError(
            "a trial of it gave other results when tensors were cut into flat pieces: it depends on more than one "
            "element at a time, or returns what belongs to elements"
        )


def _fresh_contents(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> Contents:
    """One tensor for all groups of the same options: a method treats them alike."""
    generator = torch.Generator().manual_seed(0)
    kinds: set[str] = set()
    groups: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        kind = repr({name: value for name, value in group.items() if name != "params"})
        groups.append([])
        if kind not in kinds and group["params"]:
            kinds.add(kind)
            groups[-1].append(_randn(generator, device, dtype))
    return Contents(groups, {})


def _stepped(optimizer: Optimizer, fresh: Contents) -> Contents:
    """Returns the tensors after a few steps, with a gradient for the next one, and their state."""
    contents, generator = fresh.copied(), torch.Generator().manual_seed(1)
    copied = OptimizerCopy(optimizer, contents).optimizer
    try:
        enter_training(copied)
        for group in copied.param_groups:
            if "lr" in group:  # at the start of a warm-up it is zero
                group["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], Tensor) else _LR
        # Once more than it steps: a call that uses gradients has to find some, as between backward and step.
        for step in range(_STEPS + 1):
            for tensor in contents.tensors:
                tensor.grad = _randn(generator, tensor.device, tensor.dtype)
            if step < _STEPS:
                copied.step()
    except Exception as error:
        raise NotForShardsError(f"it cannot be tried: a trial step raised {describe_error(error)}") from error
    state = dict(dict.items(copied.state))
    for tensor in contents.tensors:  # not what the last step copied from the state: a mode may copy it again
        tensor.copy_(_randn(generator, tensor.device, tensor.dtype))
        # A mode keeps what steps do not, and may give it back to the weights.
        for name, dtype in _kept_beside(optimizer, state.get(tensor, {})).items():
            state.setdefault(tensor, {})[name] = _randn(generator, tensor.device, dtype)
    return Contents(contents.groups, state)


def _randn(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(TRIAL_SHAPE, generator=generator, device="cpu").to(device, dtype)


def _kept_beside(optimizer: Optimizer, found: Mapping[str, object]) -> dict[str, torch.dtype]:
    """Returns the names and dtypes of per-element state that the optimizer has now and not after a few steps."""
    return {
        name: value.dtype
        for tensor, values in dict.items(optimizer.state)
        if isinstance(tensor, Tensor) and isinstance(values, dict)
        for name, value in values.items()
        if name not in found and isinstance(value, Tensor) and value.shape == tensor.shape and value.numel() > 1
    }
