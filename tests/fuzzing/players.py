"""Plays cases: megastrategy on ranks, torch DDP on ranks (fp32), plain torch for all ranks at once (16 bits)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedOptimizer, GradScaler
from megastrategy._checkpoints.directories import written_by
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory
from megastrategy.core.collectives import make_collectives

from ..support import optimizers
from ..support.doubles import EVERYTHING, DelayingCollectives
from ..support.ranks import with_instances
from ..support.thread_checkpoints import gather_objects
from ..support.user_code import ROWS, Site
from .cases import (
    OPTIMIZERS,
    Action,
    Case,
    Change,
    Code,
    Drop,
    Evaluate,
    Freeze,
    LearningRate,
    Load,
    Model,
    Save,
    Thaw,
    Train,
    after_forward,
    coefficients,
    is_used,
)

CLIP_VALUE, CLIP_NORM = 1.5, 1e9  # a norm that is exceeded would scale by a rounded factor
LARGEST = 1.25  # of the norm of order infinity, which is exceeded
INITIAL_SCALE, STEPS_TO_GROW = 16.0, 5  # up to 2**8 in a program: fp16 ends at 65,504
LATE_S = 0.002
CODE = {code.name: code for code in ROWS}

_reading = threading.Lock()
"""Reading a directory replaces the list of warnings that are ignored, and puts it back."""


@dataclasses.dataclass
class Saved:
    """Copies of rank 0's state. ``weights``: module buffers too. ``main``: fp32, by name, of 16-bit weights."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    main: dict[str, Tensor]
    scaler: dict[str, Any]


@dataclasses.dataclass
class Clock:
    """The position of a player in the program; the same on all ranks. It outlives a script."""

    step: int = 0
    number: int = 0  # of microbatches
    saved: Saved | None = None
    frozen: frozenset[int] = frozenset()


def make_optimizer(case: Case, params: list[Tensor]) -> torch.optim.Optimizer:
    listed = list(zip(params, case.layers, strict=True))
    groups = [[param for param, layer in listed if layer.group == g] for g in (0, 1)]
    options = OPTIMIZERS[case.optimizer]
    made = [{"params": groups[0]}, *([{"params": groups[1], "lr": options["lr"] / 4}] if groups[1] else [])]
    kind: Any = getattr(torch.optim, case.optimizer, None) or getattr(optimizers, case.optimizer)
    return kind(made, **options)  # type: ignore[no-any-return]


class Player:
    """Plays one rank of a script, from its start to its end or to a :class:`Resume`."""

    def __init__(self, case: Case, rank: int, ranks: int, clock: Clock) -> None:
        self.case, self.rank, self.ranks, self.clock = case, rank, ranks, clock
        self.norms: list[Tensor] = []
        self.read: list[Any] = []
        self.left_forward = False  # whether a forward of the wrapper had no backward since
        self.model = Model(case)
        kind = GradScaler if isinstance(self, Ours) else torch.amp.GradScaler
        options: dict[str, Any] = {"init_scale": INITIAL_SCALE, "growth_interval": STEPS_TO_GROW}
        self.scaler = kind("cpu", enabled=case.scaled, **options)

    def play(self, action: Action) -> None:
        if isinstance(action, Train):
            self.train(action)
        elif isinstance(action, Code):
            self.play_code(action.name)
        elif isinstance(action, Drop):
            self.drop()
        elif isinstance(action, Evaluate):
            self.evaluate()
        elif isinstance(action, Freeze | Thaw):
            self.freeze_or_thaw(action)
        elif isinstance(action, Change):
            self.halve(action.layer)
        elif isinstance(action, LearningRate):
            self.halve_learning_rates()
        elif isinstance(action, Save):
            self.clock.saved = self.save()
        elif isinstance(action, Load):
            self.load_if_saved()

    def drop(self) -> None:
        self.backward(1.0, True)
        self.zero_grad()

    def halve_learning_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def load_if_saved(self) -> None:
        if self.clock.saved is not None and not self.clock.frozen:
            self.zero_grad()
            self.load(self.clock.saved)

    def halve(self, layer: int) -> None:
        if layer < len(self.case.layers):
            with torch.no_grad():
                self.model.weights[layer].mul_(0.5)

    def freeze_or_thaw(self, action: Freeze | Thaw) -> None:
        clock = self.clock
        if action.layer < len(self.case.layers):
            self.zero_grad()  # what is frozen with a gradient is stepped once more
            self.model.weights[action.layer].requires_grad_(isinstance(action, Thaw))
            changed = {action.layer}
            clock.frozen = clock.frozen | changed if isinstance(action, Freeze) else clock.frozen - changed
            self.trainable_changed()

    def train(self, action: Train) -> None:
        self.zero_grad()
        infinite = {"none": None, "first": 0, "last": self.ranks - 1}[action.infinite]
        code = CODE.get(action.code)
        for number in range(action.accumulate):
            last = number == action.accumulate - 1
            synchronised = last or (action.synchronised and self.case.may_synchronise_each(self.ranks))
            before = action.code if last and code is not None and code.place == "before backward" else ""
            self.backward(1 / action.accumulate, synchronised, infinite if last else None, before)
        if code is not None and code.place == "before step":
            self.play_code(action.code)
        if action.clip != "no":
            self.scaler.unscale_(self.optimizer)
        if action.clip == "value":
            self.clip_value()
        elif action.clip != "no":
            by = (CLIP_NORM, 2.0) if action.clip == "norm" else (LARGEST, float("inf"))
            self.norms.append(self.clip_norm(*by).clone())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clock.step += 1

    # --- what the engines do differently --------------------------------------------------------------------------

    optimizer: Any
    wrapped: Any

    def backward(self, scale: float, synchronised: bool, infinite: int | None = None, code: str = "") -> None:
        """``infinite``: the rank whose loss is. ``code``: a row that is played before it."""
        with contextlib.nullcontext() if synchronised else self.wrapped.no_sync():
            loss = self.forward() * scale
            if code and (other := self.play_code(code)) is not None:
                loss = loss + other * scale
            if infinite == self.rank:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
        self.left_forward = False
        self.clock.number += 1

    def play_code(self, name: str) -> Any:
        row = CODE[name]
        if (row.leaves_forward and self.ranks == 3) or (row.is_on_one_rank and self.left_forward):
            return None
        self.left_forward |= row.leaves_forward

        def direct() -> Tensor:
            loss: Tensor = self.model(self.clock.step, self.clock.number, self.rank)
            return loss

        site = Site(
            self.model,
            self.wrapped,
            self.optimizer,
            self.rank,
            backward=lambda loss: loss.backward(),
            forward=self.forward,
            direct=direct,
            no_sync=self.wrapped.no_sync,
            seen=self.read,
        )
        return row.run(site)

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            loss: Tensor = self.wrapped(self.clock.step, self.clock.number, self.rank)
        return loss

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.wrapped.eval()
        with torch.no_grad():
            self.forward()
        self.wrapped.train()

    def clip_value(self) -> None:
        if any(param.grad is not None for param in self.model.parameters()):  # torch fails on none
            torch.nn.utils.clip_grad_value_(self.model.parameters(), CLIP_VALUE)

    def clip_norm(self, largest: float, order: float) -> Tensor:
        """The norm of the optimizer's gradients."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, largest, order)

    def trainable_changed(self) -> None:
        raise NotImplementedError

    def weights(self, rank: int) -> dict[str, Tensor]:
        """A copy of what this rank has, with the module's buffer."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def main(self) -> dict[str, Tensor]:
        return {}

    def save(self) -> Saved:
        optimizer, scaler = copy.deepcopy(self.optimizer.state_dict()), dict(self.scaler.state_dict())
        return Saved(self.weights(0), optimizer, self.main(), scaler)

    def load(self, saved: Saved) -> None:
        self.model.load_state_dict(saved.weights)
        self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        self.scaler.load_state_dict(saved.scaler)


class Ours(Player):
    def __init__(self, case: Case, rank: int, clock: Clock, group: ProcessGroup) -> None:
        super().__init__(case, rank, group.size(), clock)
        self.group = group
        instances = case.instances(group.size())
        config = dataclasses.replace(case.config, num_distributed_optimizer_instances=instances)
        collectives = with_instances(group, instances) if 1 < instances < group.size() else None
        if case.late and group.size() > 1:
            real = collectives or make_collectives(group, torch.device("cpu"))
            collectives = DelayingCollectives(group, LATE_S, EVERYTHING, real)
        self.wrapped = DistributedDataParallel(self.model, config, group, collectives=collectives)
        self.optimizer = DistributedOptimizer(make_optimizer(case, list(self.model.weights)), self.wrapped)

    def trainable_changed(self) -> None:
        """Noticed by itself."""

    def clip_value(self) -> None:
        self.optimizer.clip_grad_value_(CLIP_VALUE)

    def clip_norm(self, largest: float, order: float) -> Tensor:
        norm: Tensor = self.optimizer.clip_grad_norm_(largest, order)
        return norm

    def main(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.optimizer.main_params().items()}

    def save(self) -> Saved:
        return gather_objects(self.group, super().save())[0]

    def load(self, saved: Saved) -> None:
        super().load(saved)
        self.optimizer.load_main_params(saved.main)

    def save_directory(self, path: Path) -> None:
        weights = written_by(self.model.state_dict(), self.model, self.wrapped.engine.collectives.rank == 0)
        state = {"model": weights, "optimizer": self.optimizer.sharded_state_dict()}
        save_directory(state, {}, path, self.wrapped.engine.collectives)

    def load_directory(self, path: Path, saved: Saved) -> None:
        with _reading:
            self.model.load_state_dict(OpenDirectory(path).read("model"))
            apply = self.optimizer.read_sharded(path)
        apply()
        self.scaler.load_state_dict(saved.scaler)


class OfTorchDDP(Player):
    def __init__(self, case: Case, rank: int, clock: Clock, group: ProcessGroup) -> None:
        super().__init__(case, rank, group.size(), clock)
        self.group = group
        self.optimizer = make_optimizer(case, list(self.model.weights))
        self.wrapped = self.wrap()

    def wrap(self) -> TorchDDP:
        wrapped = TorchDDP(self.model, process_group=self.group, find_unused_parameters=True)
        wrapped.broadcast_buffers = self.case.config.broadcast_buffers  # as an argument it warns, its follower is new
        return wrapped

    def trainable_changed(self) -> None:
        """A new wrapper applies it; it broadcasts no module buffer that the old one would not have."""
        own = [buffer.clone() for buffer in self.model.buffers()]
        will_broadcast = self.wrapped.require_forward_param_sync
        # It may live a little longer on some rank, and after a forward without a backward its hooks would reduce, too.
        self.wrapped._remove_autograd_hooks()
        self.wrapped = self.wrap()
        self.wrapped.require_forward_param_sync = will_broadcast
        for buffer, value in zip(self.model.buffers(), own, strict=True):
            buffer.copy_(value)

    def save(self) -> Saved:
        return gather_objects(self.group, super().save())[0]


class Emulation(Player):
    """All ranks at once, without any communication: gradients are added up, and main params are stepped in fp32."""

    def __init__(self, case: Case, clock: Clock, ranks: int) -> None:
        super().__init__(case, 0, ranks, clock)
        self.mains = [weight.detach().to(torch.float32, copy=True).requires_grad_() for weight in self.model.weights]
        self.optimizer = make_optimizer(case, list(self.mains))
        self.optimizer.register_step_pre_hook(lambda *_: self.take_changes())
        self.optimizer.register_step_post_hook(lambda *_: self.round())
        self.seen = [torch.zeros(3) for _ in range(ranks)]
        self.will_broadcast = True

    def backward(self, scale: float, synchronised: bool, infinite: int | None = None, code: str = "") -> None:
        assert not code, "rows are played by engines"
        self.before_forward()
        self.will_broadcast = synchronised
        scale *= float(self.scaler.scale(torch.ones(())))
        for rank in range(self.ranks):
            self.seen[rank] = after_forward(self.seen[rank], self.clock.number, rank)
            for index, layer in enumerate(self.case.layers):
                if is_used(layer, self.clock.step, rank) and self.model.weights[index].requires_grad:
                    main = self.mains[index]
                    grad = coefficients(layer, index, self.clock.number, rank) * (scale / self.ranks)
                    grad = grad * float("inf") if rank == infinite else grad
                    main.grad = grad if main.grad is None else main.grad + grad
        self.clock.number += 1

    def before_forward(self) -> None:
        if self.will_broadcast and self.case.config.broadcast_buffers:
            self.seen = [self.seen[0]] * self.ranks

    @torch.no_grad()
    def take_changes(self) -> None:
        for weight, main in zip(self.model.weights, self.mains, strict=True):
            main.copy_(torch.where(weight != main.to(weight.dtype), weight.float(), main))

    @torch.no_grad()
    def round(self) -> None:
        for weight, main in zip(self.model.weights, self.mains, strict=True):
            if main.grad is not None:
                weight.copy_(main)

    def evaluate(self) -> None:
        self.before_forward()
        self.will_broadcast = False

    def clip_value(self) -> None:
        torch.nn.utils.clip_grad_value_(self.mains, CLIP_VALUE)

    def trainable_changed(self) -> None:
        """Read where it matters."""

    def weights(self, rank: int) -> dict[str, Tensor]:
        return super().weights(rank) | ({"seen": self.seen[rank].clone()} if self.case.buffer else {})

    def named_weights(self) -> list[tuple[str, Tensor]]:
        names = {id(param): name for name, param in self.model.named_parameters()}
        return [(names[id(weight)], weight) for weight in self.model.weights]

    def named_mains(self) -> list[tuple[str, Tensor]]:
        return [(name, main) for (name, _), main in zip(self.named_weights(), self.mains, strict=True)]

    def main(self) -> dict[str, Tensor]:
        pairs = zip(self.named_weights(), self.mains, strict=True)
        return {n: main.detach().clone() for (n, w), main in pairs if w.dtype != torch.float32}

    def load(self, saved: Saved) -> None:
        super().load(saved)
        for name, main in self.named_mains():
            with torch.no_grad():
                main.copy_(saved.main.get(name, saved.weights[name].float()))
        if self.case.buffer:
            self.seen = [saved.weights["seen"]] * self.ranks
