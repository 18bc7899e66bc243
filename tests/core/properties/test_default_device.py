"""A default device (``torch.set_default_device("cuda")``) is the user's: what the host keeps and sends stays there.

Here the default is meta, so that whatever is made there by mistake cannot be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, to_host
from megastrategy.data import ResumableSampler
from tests.support.directories import saving_among_threads
from tests.support.given import Given, Ours, assert_same_file
from tests.support.ranks import run_ranks


class OnHost(Given):
    def __init__(self, dtype: torch.dtype) -> None:
        with torch.device("cpu"):
            super().__init__(dtype)

    def forward(self, step: int) -> Tensor:
        with torch.device("cpu"):
            return super().forward(step)


def momentum(params: Any) -> torch.optim.Optimizer:
    # Adam makes its counters on the default device itself.
    return torch.optim.SGD(params, lr=0.001, momentum=0.9)


@pytest.mark.parametrize("options", [{}, {"grad_buffer": "pooled", "overlap_param_gather": True}], ids=str)
@pytest.mark.real_collectives("the double's own tensors would be on the default device")
def test_nothing_of_the_hosts_is_made_on_it(options: dict[str, Any], tmp_path: Path) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with torch.device("meta"):
            ours = Ours(group, momentum, torch.float32, kind=OnHost, check_for_nan_in_grad=True, **options)
            ours.train(range(2))
            file = ours.file()
            state = {"model": dict(ours.module.state_dict()), "optimizer": ours.optimizer.sharded_state_dict()}
            save_directory(to_host(state), {}, tmp_path / "saved", ours.collectives)
            ours.train(range(2, 3))
            uncut = ours.file()
            ours.load(file)
            ours.module.load_state_dict(OpenDirectory(tmp_path / "saved").read("model"))
            ours.optimizer.load_sharded(tmp_path / "saved")
            ours.train(range(2, 3))
            assert_same_file(ours.file(), uncut)
            ours.model.close()

    with saving_among_threads():
        run_ranks(2, run)


def test_an_order_of_samples_is_made_on_the_host() -> None:
    expected = list(ResumableSampler(range(10), num_replicas=2, rank=1))
    with torch.device("meta"):
        assert list(ResumableSampler(range(10), num_replicas=2, rank=1)) == expected
