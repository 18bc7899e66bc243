"""Trains on one of two ranks: python training.py STRATEGY FOLDER [long] [one-node].

It runs as a separate script, as users' scripts do, on two nodes or (one-node) on one. Each batch leaves a mark in
FOLDER/in-RANK, and the end, a RuntimeError too, FOLDER/STRATEGY-RANK.pt: what was trained, or what was said, and how
long it took. A long run is there to be met in training.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import megastrategy  # noqa: F401 - registers the strategy's name

PAUSE_S = 0.05
"""Before each batch of a long run."""


class Model(pl.LightningModule):
    """Two layers; keeps its losses."""

    def __init__(self, folder: Path, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        self.losses: list[float] = []
        self._folder, self._pause_s = folder, pause_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self._pause_s)
        with (self._folder / f"in-{self.global_rank}").open("a") as file:
            file.write("x")
        loss = (self.layers(batch[0]) - batch[0].square()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(strategy: str, folder: Path, *, is_long: bool, num_nodes: int) -> None:
    """One rank of two."""
    dataset = TensorDataset(torch.randn(80_000 if is_long else 64, 8, generator=torch.Generator().manual_seed(1)))
    model = Model(folder, PAUSE_S if is_long else 0.0)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2 // num_nodes,
        num_nodes=num_nodes,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found: dict[str, Any] = {"environment": type(trainer.strategy.cluster_environment).__name__}
    began_at = time.monotonic()
    try:
        trainer.fit(model, DataLoader(dataset, batch_size=4))
        found |= {"world_size": trainer.world_size, "losses": model.losses}
        found["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
    except RuntimeError as error:
        found["error"] = "".join(traceback.format_exception_only(error))
        raise
    finally:
        seconds = time.monotonic() - began_at
        torch.save(found | {"seconds": seconds}, folder / f"{strategy}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    name, path, *kinds = sys.argv[1:]
    main(name, Path(path), is_long="long" in kinds, num_nodes=1 if "one-node" in kinds else 2)
