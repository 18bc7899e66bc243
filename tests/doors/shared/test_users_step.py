"""The user's optimizer class runs its ``step`` and ``zero_grad`` as under "ddp", through each door."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from ..accelerate_loops import Worlds, make_accelerator
from ..fits import make_strategy, make_trainer
from ..matrix import MODES
from ..rank_processes import Ranks

both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def noting(calls: list[str]) -> type[torch.optim.SGD]:
    """A class that notes the callers of its methods."""

    class Noting(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().step(*args, **kwargs)

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            calls.append("zero_grad")
            super().zero_grad(*args, **kwargs)

    return Noting


# --- Lightning -------------------------------------------------------------------------------------------------------


class Watched(BoringModel):
    """As in Lightning's ``test_train_loop_system``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def configure_optimizers(self) -> Any:
        return noting(self.calls)(self.parameters(), lr=0.1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("training_step")
        return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(*args, **kwargs)


def calls_in_a_fit(name: str, devices: int, dtype: torch.dtype, **options: Any) -> list[str]:
    model = Watched().to(dtype)
    precision = "bf16-true" if dtype == torch.bfloat16 else "32-true"
    trainer = make_trainer(
        make_strategy(name, **options),
        devices=devices,
        precision=precision,
        max_epochs=1,
        limit_train_batches=5,
        limit_val_batches=1,
    )
    trainer.fit(model)
    return model.calls


EXPECTED = ["step", "training_step", "zero_grad", "backward"] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@both_modes
def test_a_fit_on_one_rank_calls_what_a_fit_under_ddp_calls(
    one_rank: Ranks, mode: dict[str, Any], dtype: torch.dtype
) -> None:
    """Main params take a closure once, before the user's ``step``."""
    order = EXPECTED if dtype == torch.float32 else ["training_step", "zero_grad", "backward", "step"] * 5
    assert one_rank.run(calls_in_a_fit, "ddp", 1, dtype) == [EXPECTED]
    assert one_rank.run(calls_in_a_fit, "megatron_ddp", 1, dtype, **mode) == [order]


class Scaling(torch.optim.SGD):
    """Takes an argument that torch's does not."""

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            result = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * scale, alpha=group["lr"])
        return result


class ByHand(BoringModel):
    """As in Lightning's ``test_step_with_optimizer_closure_with_different_frequencies``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 2)

    def configure_optimizers(self) -> Any:
        return Scaling(self.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward(self(torch.ones(2, 32) + batch_idx + self.global_rank).square().mean())

        optimizer.step(closure=closure, scale=[0.5, 0.0, 2.0][batch_idx % 3])


def fit_by_hand(name: str, **options: Any) -> list[Tensor]:
    model = ByHand()
    make_trainer(make_strategy(name, **options), max_epochs=1, limit_train_batches=4, limit_val_batches=0).fit(model)
    return [param.detach().clone() for param in model.parameters()]


def test_lightning_hands_arguments_of_step_on(ranks: Ranks) -> None:
    expected, ours = (
        ranks.run(fit_by_hand, "ddp"),
        ranks.run(fit_by_hand, "megatron_ddp", use_distributed_optimizer=False),
    )
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


# --- Fabric ----------------------------------------------------------------------------------------------------------


# --- Accelerate ------------------------------------------------------------------------------------------------------


def calls_with_accelerate(name: str, dtype: torch.dtype) -> list[str]:
    accelerator = make_accelerator(name, {"use_distributed_optimizer": False})
    calls: list[str] = []

    class TakesNothing(noting(calls)):  # type: ignore[misc]
        """accelerate asks for the signature."""

        def zero_grad(self) -> None:
            super().zero_grad()

    module = nn.Linear(3, 3).to(dtype)
    model, optimizer = accelerator.prepare(module, TakesNothing(module.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 3, dtype=dtype)).sum())
        optimizer.step()
    return calls


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accelerate_calls_what_it_calls_under_ddp(worlds: Worlds, dtype: torch.dtype, size: int) -> None:
    expected = [["zero_grad", "step"] * 3] * size
    assert worlds.run(calls_with_accelerate, "ddp", dtype, size=size) == expected
    assert worlds.run(calls_with_accelerate, "megatron_ddp", dtype, size=size) == expected
