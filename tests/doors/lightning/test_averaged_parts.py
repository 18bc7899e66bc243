"""``StochasticWeightAveraging`` under tensor ranks: averages are those of one process, in checkpoints too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from megastrategy import MegatronDDPStrategy
from tests.support.tensor_parallel import LanguageModel, plan

from ..fits import make_trainer
from ..rank_processes import Ranks
from .test_lightning_tensor_parallel import LitModel, assert_close, loader, read


class MadeLate(LitModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = LanguageModel(64, tied=False, width=16)
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan(sequence_parallel=True))


def fit(is_mesh: bool, epochs: int, folder: Path, resume: str | None, kind: Any = LitModel) -> dict[str, Tensor]:
    module, averages = kind(), StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
    devices = 4 if is_mesh else 1
    trainer = make_trainer(
        MegatronDDPStrategy(tensor_parallel_size=2) if is_mesh else "ddp",
        devices=devices,
        max_epochs=epochs,
        callbacks=[averages],
    )
    trainer.fit(module, loader(2 if is_mesh else 4), ckpt_path=resume)
    trainer.save_checkpoint(folder / f"{devices} devices, {epochs} epochs.ckpt")
    assert not vars(averages).keys() & {"update_parameters", "transfer_weights"}, "given back as it was"
    params = {name: param.detach() for name, param in module.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in params.items()}


@pytest.mark.long
def test_averages_are_those_of_one_process(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    [alone] = one_rank.run(fit, False, 2, tmp_path, None)
    for own in mesh.run(fit, True, 2, tmp_path, None):
        assert_close(own, alone)
    saved = [read(tmp_path / f"{devices} devices, 2 epochs.ckpt")["callbacks"] for devices in (1, 4)]
    [one], [four] = ([state for state in each.values() if "average_model_state" in state] for each in saved)
    assert_close(four, one)
    # Each goes on from the other's file.
    [alone] = one_rank.run(fit, False, 3, tmp_path, str(tmp_path / "4 devices, 2 epochs.ckpt"))
    for own in mesh.run(fit, True, 3, tmp_path, str(tmp_path / "1 devices, 2 epochs.ckpt")):
        assert_close(own, alone)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match="configure_model") as raised:
        fit(True, 3, folder, None, MadeLate)
    torch.distributed.destroy_process_group()
    return str(raised.value)


def test_layers_that_the_copy_lacks_are_refused(mesh: Ranks, tmp_path: Path) -> None:
    """Lightning would average nothing, and say nothing."""
    for text in mesh.run(refusal, tmp_path):
        assert text.startswith("StochasticWeightAveraging copies the module before configure_model(), when it has 0 ")
        assert "build the layers in __init__()" in text
