"""Trial steps of a copy of an optimizer, on tensors that were made for it, whole or cut into flat pieces.

[Note: trial tensors]
What a trial can see depends on its tensors and gradients:

- A tall matrix of 20,480 elements and a wide 4-D tensor of 1,260. An update may look at rows, at the number of
  dimensions, at their proportions, or treat a tensor by its size: states in blocks begin at 4,096 elements, and some
  only where a whole number of blocks fits. The matrix is five times 4,096, so that all smaller powers of two fit.
- Cuts inside rows and on no multiple of a block, and gradients whose size differs by piece: any norm, sum or scale
  over a piece is another than over the whole. They are small, as real ones are: what is divided by them shows.
- A third of the weights begins at zero, where a movement is exact however small it is; decay shows on the others.
- Gradients that drift, so that an estimate of the distance to go grows; and noise of the same size, so that signs
  change and a mask of equal signs has holes.
- Every other gradient is nearly orthogonal to the weights, row by row: some updates project only then.
- Whole tensors require gradients, as parameters do, and pieces do not, as shards.
- The second rank's pieces are in the reverse order: on ranks the places of a group are not those of the parameters.
- One short trial has gradients of norms beyond 10,000. What clips by a norm inside its step does nothing below it.
- One short trial is of a square, a tall and a wide matrix: an update may take those for symmetric, or for embeddings.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .values import Copier, with_arithmetic

_SHAPES = ((160, 128), (12, 3, 5, 7))
_CUTS = (7_001, 500)  # by tensor, the part of the first of two ranks
PROPORTIONS = {(24, 24): 250, (320, 10): 1_001, (10, 320): 2_003}
"""Shapes of other proportions, and the first of two ranks' part of each."""
_ALONG = 0.03
"""The cosine of nearly orthogonal gradients with the weights, times the root of a row's length."""
SPIKE = 1e4
"""Gradients are multiplied by this in the trial that looks for a norm that clips."""
FALLBACK_LR = 0.01
"""The learning rate of a trial where a group's own is zero, as at the start of a warm-up."""


@dataclasses.dataclass
class Trial:
    """An optimizer that has stepped, and its tensors.

    Attributes:
        optimizer: the copy; it has one group.
        params: after the steps.
        grads: by step, what ``params`` were given.
        reach: by tensor, how far each element was from its start at most; of whole tensors only.
        sizes: by tensor and name, how large each element of a state was at most; of whole tensors only.
    """

    optimizer: torch.optim.Optimizer
    params: list[Tensor]
    grads: list[list[Tensor]] = dataclasses.field(default_factory=list)
    reach: list[Tensor] = dataclasses.field(default_factory=list)
    sizes: dict[tuple[int, str], Tensor] = dataclasses.field(default_factory=dict)

    def state(self, tensor: int) -> dict[str, Any]:
        """The state that the optimizer keeps for one of the tensors."""
        values: dict[str, Any] = self.optimizer.state.get(self.params[tensor], {})
        return values

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step of all tensors."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        self.optimizer.step()


class Problem:
    """Weights and gradients for trials, the same at each call. See [Note: trial tensors]."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_small: bool = False,
        shapes: Sequence[tuple[int, ...]] | None = None,
        cuts: Sequence[int] = (),
        scale: float = 1.0,
    ) -> None:
        """``is_small``: of the smaller tensor alone. ``shapes``: of other tensors, which are not to be cut without
        ``cuts``. ``scale``: of all gradients."""
        first = 1 if is_small else 0
        self._cuts: Sequence[int] = _CUTS[first:] if shapes is None else cuts
        shapes = _SHAPES[first:] if shapes is None else shapes
        numel = sum(math.prod(shape) for shape in (*shapes, *_SHAPES))
        # drawn once, and read at another place for each use: drawing would be a third of a trial
        self._random = torch.randn(2 * numel, generator=torch.Generator().manual_seed(0), device="cpu").to(
            device, dtype
        )
        self.starts: list[Tensor] = []
        self._sizes: list[Tensor] = []
        for number, shape in enumerate(shapes):
            start = self._randn(shape, number if not self._cuts else 0).clone()
            if start.numel() > 2:
                start.view(-1)[::3] = 0
                # A third is small: rounding hides a thousandth of what it hides at the others.
                start.view(-1)[1::3] *= 1e-3
            self.starts.append(start)
            # Growing in one tensor and shrinking in the other, so that no rank's pieces are all the larger.
            ends = (-3, -1) if number % 2 == 0 else (-1, -3)
            size = torch.logspace(*ends, start.numel(), dtype=dtype, device=device).reshape(shape)
            self._sizes.append(size.mul_(scale))

    def _randn(self, shape: tuple[int, ...], place: int) -> Tensor:
        numel = math.prod(shape)
        first = 397 * place % (self._random.numel() - numel)  # no multiple of a row
        return self._random[first : first + numel].view(shape)

    def grads(self, step: int, params: Sequence[Tensor]) -> list[Tensor]:
        """A step's gradients at these weights."""
        grads = []
        for param, size in zip(params, self._sizes, strict=True):
            drift = self._randn(param.shape, 1)
            noise = self._randn(param.shape, 2 + step)
            grad = (drift + noise).mul_(size)
            # [Note: trial tensors]: some updates project only where gradient and weights are nearly orthogonal.
            if step % 2 == 1:
                rows = _rows(grad)
                weights = _rows(param)
                squares = weights.square().sum(1, keepdim=True)
                rows.addcmul_((rows * weights).sum(1, keepdim=True) / squares, weights, value=-1)
                # a projection has to have something to take away
                along = _ALONG * rows.square().sum(1, keepdim=True).div(squares * rows.shape[1]).sqrt_()
                grad = rows.addcmul_(along, weights).view(param.shape)
            grads.append(grad)
        return grads

    def run(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Trial:
        """The optimizer steps whole tensors."""
        trial = Trial(optimizer, [start.clone().requires_grad_() for start in self.starts])
        optimizer.param_groups[0]["params"] = list(trial.params)
        trial.reach = [torch.zeros_like(start) for start in self.starts]
        for step in range(num_steps):
            # At the weights of this trial, once: reruns are given the same ones, or rounding would feed back.
            trial.grads.append(self.grads(step, [param.detach() for param in trial.params]))
            trial.step(trial.grads[-1])
            for number, start in enumerate(self.starts):
                param = trial.params[number].detach()
                torch.maximum(trial.reach[number], (param - start).abs_(), out=trial.reach[number])
                for name, value in trial.state(number).items():
                    # a tensor of another kind may know few operations
                    if type(value) is Tensor and value.shape == param.shape and value.is_floating_point():
                        size = with_arithmetic(value.detach()).abs().nan_to_num_()
                        before = trial.sizes.get((number, name))
                        trial.sizes[number, name] = size if before is None else torch.maximum(before, size)
        return trial

    def rerun_in_parts(self, optimizer: torch.optim.Optimizer, whole: Trial) -> Trial:
        """Repeats the steps of the same tensors with the same gradients, each by a call for every tensor."""
        trial = Trial(optimizer, [start.clone().requires_grad_() for start in self.starts])
        for grads in whole.grads:
            for param, grad in zip(trial.params, grads, strict=True):
                param.grad = grad.clone()
            for param in trial.params:
                optimizer.param_groups[0]["params"] = [param]
                optimizer.step()
        return trial

    def rerun_cut(self, make_copy: Callable[[], torch.optim.Optimizer], whole: Trial) -> list[Trial]:
        """Repeats the steps with the same gradients on flat pieces, each rank's in an optimizer of its own: a sum over
        an optimizer's tensors shows."""
        trials: list[Trial] = []
        for spans in self.spans():
            trial = Trial(make_copy(), [cut(start, span) for start, span in zip(self.starts, spans, strict=True)])
            # A step that goes by the place in a group (decay by layer, a list of options) would take another's.
            trial.optimizer.param_groups[0]["params"] = trial.params[:: 1 if not trials else -1]
            for grads in whole.grads:
                trial.step([cut(grad, span) for grad, span in zip(grads, spans, strict=True)])
            trials.append(trial)
        return trials

    def rerun_alone(self, make_copy: Callable[[], torch.optim.Optimizer], whole: Trial) -> list[Trial]:
        """Repeats the steps with the same gradients on the same tensors, each in a separate optimizer.

        The tensors are plain, like those that owners step."""
        trials = []
        for number, start in enumerate(self.starts):
            trial = Trial(make_copy(), [start.clone()])
            trial.optimizer.param_groups[0]["params"] = list(trial.params)
            for grads in whole.grads:
                trial.step([grads[number]])
            trials.append(trial)
        return trials

    def spans(self) -> list[list[tuple[int, int]]]:
        """The part that each rank has of each tensor, by rank."""
        by_tensor = [
            itertools.pairwise((0, place, start.numel())) for place, start in zip(self._cuts, self.starts, strict=True)
        ]
        return [list(spans) for spans in zip(*by_tensor, strict=True)]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def cut(tensor: Tensor, span: tuple[int, int]) -> Tensor:
    """A flat copy of some elements."""
    return tensor.reshape(-1)[slice(*span)].clone()


def copy_optimizer(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], lr: float | None = None
) -> torch.optim.Optimizer:
    """Returns an optimizer like the given one, with one group like the given one, of no tensors, and no state.

    It has neither the hooks, which count, log or profile real calls, nor a wrapper of ``step``. ``lr`` replaces the
    group's own, if it has one.
    """
    copier = Copier()
    # Without its constructor, which may ask for more, register hooks, or make state of the model's parameters.
    copied = object.__new__(type(optimizer))
    copier.replace(optimizer, copied)  # in methods that are bound to it
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            copied.__dict__[name] = collections.OrderedDict()
        elif name not in ("step", "state", "param_groups"):
            copied.__dict__[name] = copier.copy(value)
    copied.state = collections.defaultdict(dict)
    options = {name: copier.copy(value) for name, value in group.items() if name != "params"}
    # A tensor replaces a tensor: a capturable optimizer asks for one.
    if lr is not None and isinstance(before := options.get("lr"), Tensor | float | int):
        options["lr"] = torch.full_like(before, lr) if isinstance(before, Tensor) else lr
    copied.param_groups = [{**options, "params": []}]
    enter_training(copied)
    return copied


class StateAtStart(collections.defaultdict[Any, dict[str, Any]]):
    """The state of an optimizer whose tensors have state before their first step."""

    def __init__(self, param: Tensor | None, values: Mapping[str, Any]) -> None:
        super().__init__(dict)
        self._param = param
        self._values = values

    @classmethod
    def like(cls, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> StateAtStart:
        """Makes it as the optimizer's constructor does, otherwise as it is kept for the first tensor of a group.

        State of the tensor's shape gets one value everywhere, since other tensors have other elements.
        """
        fresh = Parameter(torch.zeros(2, 2, device="cpu"))
        for param in group["params"]:
            # The first that has some: others may have joined later, without any.
            values = optimizer.state.get(param)
            if values:
                fresh = Parameter(torch.zeros((2,) * max(param.dim(), 1), dtype=param.dtype, device=param.device))
                # beside a sum that has grown, gradients move nothing and a coupling hides
                if (made := _state_at_construction(optimizer, group, fresh)).keys() == values.keys():
                    return cls(fresh, made)
                if param.numel() > 1:  # a single element has the shape of a counter
                    return cls(param, values)
        # A wrapped optimizer keeps state by shards, which are not in its groups between steps.
        return cls(fresh, _state_at_construction(optimizer, group, fresh)) if optimizer.state else cls(None, {})

    def copy(self) -> StateAtStart:
        """Returns the same for another trial, in which no tensor has its state yet."""
        return StateAtStart(self._param, self._values)

    def __missing__(self, tensor: Tensor) -> dict[str, Any]:
        self[tensor] = {name: self._of(tensor, value) for name, value in self._values.items()}
        return self[tensor]

    def _of(self, tensor: Tensor, value: Any) -> Any:
        param = self._param
        if isinstance(value, Tensor) and param is not None and value.shape == param.shape and value.dim() > 0:
            # State in the weight's dtype follows the trial's; one with a dtype of its own keeps it.
            dtype = tensor.dtype if value.dtype == param.dtype else value.dtype
            return torch.full_like(tensor, value.flatten()[0].item(), dtype=dtype)
        return Copier().copy(value)


def _state_at_construction(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Parameter
) -> dict[str, Any]:
    """The state that the optimizer's class makes for a parameter under a group's options; none if it asks for more."""
    try:
        names = inspect.signature(type(optimizer)).parameters.keys() & (group.keys() - {"params"})
        another = type(optimizer)([param], **{name: Copier().copy(group[name]) for name in names})
    except Exception:  # noqa: BLE001 - whatever an unknown constructor raises, there is other state to try with
        return {}
    return dict(another.state.get(param, {}))


def enter_training(optimizer: torch.optim.Optimizer) -> None:
    """Calls ``train()`` if the optimizer has modes, as Schedule-Free has: one that begins in evaluation refuses to
    step."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def values_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields the names in words and the values of everything that a copy keeps beside the state of tensors."""
    (group,) = optimizer.param_groups
    yield from ((f"entry {name!r} of its group", value) for name, value in group.items() if name != "params")
    attributes = [name for name in optimizer.__dict__ if name not in ("step", "state", "param_groups")]
    yield from ((f"its attribute {name!r}", optimizer.__dict__[name]) for name in attributes)
    yield from ((f"state {key!r}", value) for key, value in optimizer.state.items() if not isinstance(key, Tensor))
