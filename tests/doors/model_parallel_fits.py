"""Data, references and comparisons for loops whose experts, layers or sequences are divided over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader, TensorDataset

from tests.support import sequences
from tests.support.ragged_tokens import IGNORED

RANKS = 4
LENGTH, NUM_SEQUENCES = 8, 8


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)  # AdamW would hide wrong factors


def token_loader(batch_size: int) -> DataLoader[Any]:
    """Sixteen sequences of tokens."""
    tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


def expert_loader() -> DataLoader[Any]:
    """Three batches for each of four ranks, which take them in turn."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (len(x),), generator=generator)), batch_size=4)


def sequence_data() -> TensorDataset:
    """One sequence a sample, each with another number of labels: some have none in their second half."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(11, (2, NUM_SEQUENCES, LENGTH), generator=generator)
    for sample in range(NUM_SEQUENCES):
        labels[sample, 1 : 1 + sample % 4] = IGNORED
        labels[sample, LENGTH // (1 + sample % 2) :] = IGNORED
    return TensorDataset(ids, labels)


def part_of_loss(model: Any, batch: list[Tensor], mesh: Any) -> tuple[Tensor, int]:
    """The summed loss of this rank's part of a sequence, and how many labels are in that part."""
    ids, labels = (both[0].chunk(mesh.size())[mesh.get_local_rank()] for both in batch)
    logits = model(ids, lambda part: sequences.Gathered.apply(part, mesh.get_group()))
    return sequences.summed_loss(logits, labels)


def train_on_whole_sequences(dp: int) -> dict[str, Tensor]:
    """The weights that one process has after the sequences of ``dp`` data-parallel ranks, with torch only."""
    module = sequences.Attention()
    data = sequence_data()
    steps = [[data[number] for number in range(first, first + dp)] for first in range(0, NUM_SEQUENCES, dp)]
    return sequences.train_on_whole_sequences(module, sgd(module), steps)


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def num_chunks(directory: Path, name: str) -> int:
    """In how many pieces a directory has a tensor."""
    return len(FileSystemReader(directory).read_metadata().state_dict_metadata[name].chunks)


def assert_close(actual: Any, expected: Any, where: str = "") -> None:
    """Nested values: tensors of one shape and dtype, within 2e-6; anything else equal."""
    if isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), where
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=2e-6, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(actual[key], value, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for number, value in enumerate(expected):
            assert_close(actual[number], value, f"{where} {number}")
    else:
        assert actual == expected, where
