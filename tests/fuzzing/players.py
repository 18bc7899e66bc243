"""Who plays a case: megastrategy on ranks, torch DDP on ranks (fp32), plain torch for all ranks at once (16 bits)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedOptimizer

from ..support.ranks import run_ranks, with_instances
from ..support.training import assert_same_state
from .cases import (
    OPTIMIZERS,
    Action,
    Case,
    Change,
    Drop,
    Evaluate,
    Freeze,
    LearningRate,
    Load,
    Model,
    Resume,
    Save,
    Thaw,
    Train,
    coefficients,
    is_used,
)

CLIP_VALUE, CLIP_NORM = 1.5, 1e9  # a norm that is exceeded would scale by a rounded factor


@dataclasses.dataclass
class Saved:
    """Copies. ``main``: fp32, by parameter name, of 16-bit weights."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    main: dict[str, Tensor]


@dataclasses.dataclass
class Clock:
    """Where in the program a player is; the same on all ranks. Nothing of it ends with a script."""

    step: int = 0
    number: int = 0  # of microbatches
    saved: Saved | None = None
    frozen: frozenset[int] = frozenset()


def make_optimizer(case: Case, params: list[Tensor]) -> torch.optim.Optimizer:
    groups = [[param for param, layer in zip(params, case.layers, strict=True) if layer.group == g] for g in (0, 1)]
    options = OPTIMIZERS[case.optimizer]
    made = [{"params": groups[0]}, *([{"params": groups[1], "lr": options["lr"] / 4}] if groups[1] else [])]
    kind: Any = getattr(torch.optim, case.optimizer)
    return kind(made, **options)  # type: ignore[no-any-return]


class Player:
    """One rank of a script, from its start to its end or to a :class:`Resume`."""

    def __init__(self, case: Case, rank: int, ranks: int, clock: Clock) -> None:
        self.case, self.rank, self.ranks, self.clock = case, rank, ranks, clock
        self.norms: list[Tensor] = []
        self.model = Model(case.layers)

    def play(self, action: Action) -> None:
        clock = self.clock
        if isinstance(action, Train):
            self.zero_grad()
            for number in range(action.accumulate):
                last = number == action.accumulate - 1
                self.backward(1 / action.accumulate, last or (action.synchronised and self.ranks != 3))
            if action.clip == "value":
                self.clip_value()
            elif action.clip == "norm":
                self.norms.append(self.clip_norm())
            self.step()
            clock.step += 1
        elif isinstance(action, Drop):
            self.backward(1.0, True)
            self.zero_grad()
        elif isinstance(action, Evaluate):
            self.evaluate()
        elif isinstance(action, Freeze | Thaw):
            if action.layer < len(self.case.layers):
                self.zero_grad()  # what is frozen with a gradient is stepped once more
                self.model.weights[action.layer].requires_grad_(isinstance(action, Thaw))
                changed = {action.layer}
                clock.frozen = clock.frozen | changed if isinstance(action, Freeze) else clock.frozen - changed
                self.trainable_changed()
        elif isinstance(action, Change):
            if action.layer < len(self.case.layers):
                with torch.no_grad():
                    self.model.weights[action.layer].mul_(0.5)
        elif isinstance(action, LearningRate):
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        elif isinstance(action, Save):
            clock.saved = self.save()
        elif isinstance(action, Load) and clock.saved is not None and not clock.frozen:
            self.zero_grad()
            self.load(clock.saved)

    # --- what the engines do differently --------------------------------------------------------------------------

    optimizer: Any
    wrapped: Any

    def backward(self, scale: float, synchronised: bool) -> None:
        with contextlib.nullcontext() if synchronised else self.wrapped.no_sync():
            (self.wrapped(self.clock.step, self.clock.number, self.rank) * scale).backward()
        self.clock.number += 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()

    def evaluate(self) -> None:
        self.wrapped.eval()
        with torch.no_grad():
            self.wrapped(self.clock.step, self.clock.number, self.rank)
        self.wrapped.train()

    def clip_value(self) -> None:
        torch.nn.utils.clip_grad_value_(self.model.parameters(), CLIP_VALUE)

    def clip_norm(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM).clone()

    def trainable_changed(self) -> None:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def main(self) -> dict[str, Tensor]:
        return {}

    def save(self) -> Saved:
        return Saved(self.weights(), copy.deepcopy(self.optimizer.state_dict()), self.main())

    def load(self, saved: Saved) -> None:
        self.model.load_state_dict(saved.weights)
        self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))


class Ours(Player):
    def __init__(self, case: Case, rank: int, clock: Clock, group: ProcessGroup) -> None:
        super().__init__(case, rank, group.size(), clock)
        self.group, self.num_saves = group, 0
        instances = case.instances(group.size())
        config = dataclasses.replace(case.config, num_distributed_optimizer_instances=instances)
        collectives = with_instances(group, instances) if 1 < instances < group.size() else None
        self.wrapped = DistributedDataParallel(self.model, config, group, collectives=collectives)
        self.optimizer = DistributedOptimizer(make_optimizer(case, list(self.model.weights)), self.wrapped)

    def trainable_changed(self) -> None:
        """Noticed by itself."""

    def clip_value(self) -> None:
        self.optimizer.clip_grad_value_(CLIP_VALUE)

    def clip_norm(self) -> Tensor:
        norm: Tensor = self.optimizer.clip_grad_norm_(CLIP_NORM)
        return norm.clone()

    def main(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.optimizer.main_params().items()}

    def save(self) -> Saved:
        """What rank 0 has, on every rank."""
        saved, store = super().save(), self.group.get_group_store()
        key = f"saved {self.clock.step} {self.clock.number} {self.num_saves}"
        self.num_saves += 1
        if self.rank == 0:
            store.set(key, pickle.dumps(saved))
        return pickle.loads(store.get(key))  # type: ignore[no-any-return]

    def load(self, saved: Saved) -> None:
        super().load(saved)
        self.optimizer.load_main_params(saved.main)


class OfTorchDDP(Player):
    def __init__(self, case: Case, rank: int, clock: Clock, group: ProcessGroup) -> None:
        super().__init__(case, rank, group.size(), clock)
        self.group = group
        self.optimizer = make_optimizer(case, list(self.model.weights))
        self.trainable_changed()

    def trainable_changed(self) -> None:
        """It is told by a new wrapper."""
        self.wrapped = TorchDDP(self.model, process_group=self.group, find_unused_parameters=True)


class Emulation(Player):
    """All ranks at once, without any communication: gradients are added up, and main params are stepped in fp32."""

    def __init__(self, case: Case, clock: Clock, ranks: int) -> None:
        super().__init__(case, 0, ranks, clock)
        self.mains = [weight.detach().float().requires_grad_() for weight in self.model.weights]
        self.optimizer = make_optimizer(case, list(self.mains))

    def backward(self, scale: float, synchronised: bool) -> None:
        for rank in range(self.ranks):
            for index, layer in enumerate(self.case.layers):
                if is_used(layer, self.clock.step, rank) and self.model.weights[index].requires_grad:
                    main = self.mains[index]
                    grad = coefficients(layer, index, self.clock.number, rank) * (scale / self.ranks)
                    main.grad = grad if main.grad is None else main.grad + grad
        self.clock.number += 1

    def step(self) -> None:
        for weight, main in zip(self.model.weights, self.mains, strict=True):
            changed = weight.detach() != main.detach().to(weight.dtype)
            with torch.no_grad():
                main.copy_(torch.where(changed, weight.float(), main))
        self.optimizer.step()
        for weight, main in zip(self.model.weights, self.mains, strict=True):
            if main.grad is not None:
                with torch.no_grad():
                    weight.copy_(main)

    def evaluate(self) -> None:
        """Changes nothing."""

    def clip_value(self) -> None:
        torch.nn.utils.clip_grad_value_(self.mains, CLIP_VALUE)

    def clip_norm(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.mains, CLIP_NORM).clone()

    def trainable_changed(self) -> None:
        """Read where it matters."""

    def main(self) -> dict[str, Tensor]:
        named = zip(self.model.state_dict(), self.mains, self.case.layers, strict=True)
        return {name: main.detach().clone() for name, main, layer in named if layer.dtype != "float32"}

    def load(self, saved: Saved) -> None:
        self.model.load_state_dict(saved.weights)
        for (name, weight), main in zip(self.model.state_dict().items(), self.mains, strict=True):
            with torch.no_grad():
                main.copy_(saved.main.get(name, weight.float()))
        self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))


@dataclasses.dataclass
class Outcome:
    """Of one script on one rank."""

    saved: Saved
    norms: list[Tensor]
    clock: Clock


def scripts(case: Case) -> list[tuple[int, tuple[Action, ...]]]:
    """(ranks, actions) of each, divided where the program resumes; nothing is resumed with something frozen."""
    made: list[tuple[int, tuple[Action, ...]]] = []
    ranks, actions, frozen = case.ranks, list[Action](), set[int]()
    for action in case.program:
        if isinstance(action, Resume):
            if not frozen:
                made.append((ranks, tuple(actions)))
                ranks, actions = action.ranks, []
            continue
        actions.append(action)
        if isinstance(action, Freeze) and action.layer < len(case.layers):
            frozen.add(action.layer)
        elif isinstance(action, Thaw):
            frozen.discard(action.layer)
    return [*made, (ranks, tuple(actions))]


def play(case: Case, *, reference: bool) -> list[list[Outcome]]:
    """By script and rank. The reference for 16 bits has one rank, which stands for all."""
    outcomes: list[list[Outcome]] = []
    for ranks, actions in scripts(case):
        before = outcomes[-1][0] if outcomes else None

        def run(make: Callable[[Clock], Player], actions: tuple[Action, ...], before: Outcome | None) -> Outcome:
            player = make(dataclasses.replace(before.clock) if before else Clock())
            if before is not None:
                player.load(before.saved)
            for action in actions:
                player.play(action)
            outcome = Outcome(player.save(), player.norms, player.clock)
            if isinstance(player, Ours):
                player.wrapped.close()
            return outcome

        def on_rank(rank: int, group: ProcessGroup, actions: Any = actions, before: Any = before) -> Outcome:
            kind = OfTorchDDP if reference else Ours
            return run(lambda clock: kind(case, rank, clock, group), actions, before)

        if reference and not case.is_fp32:
            outcomes.append([run(lambda clock, ranks=ranks: Emulation(case, clock, ranks), actions, before)])
        else:
            outcomes.append(run_ranks(ranks, on_rank))
    return outcomes


def main_that_counts(saved: Saved, name: str) -> Tensor:
    """Whoever loads takes the weight where the main param does not round to it: somebody changed it since."""
    weight, main = saved.weights[name], saved.main[name]
    return torch.where(main.to(weight.dtype) == weight, main, weight.float())


def check(case: Case) -> None:
    """Raises an AssertionError that says what differs, in which script."""
    both = zip(play(case, reference=False), play(case, reference=True), strict=True)
    for number, (ours, reference) in enumerate(both):
        expected = reference[0]
        for rank, outcome in enumerate(ours):
            where = f"script {number}, rank {rank}"
            for name, value in expected.saved.weights.items():
                assert torch.equal(outcome.saved.weights[name], value), f"{where}: {name} differs"
            for mine, theirs in zip(outcome.norms, expected.norms, strict=True):
                # of 16-bit gradients it has 16 bits, as torch's
                assert torch.allclose(mine.float(), theirs, rtol=4 * torch.finfo(mine.dtype).eps), where
        for name in expected.saved.main:
            mine, theirs = (main_that_counts(saved, name) for saved in (ours[0].saved, expected.saved))
            assert torch.equal(mine, theirs), f"script {number}: main param of {name} differs"
        assert_same_state(ours[0].saved.optimizer, expected.saved.optimizer)
