"""The page of pipelines lists the groups of 16 ranks: those that torch makes of the mesh it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
SHAPE = (4, 2, 2)


def rows(title: str) -> dict[str, list[str]]:
    """The cells of the table whose heading begins with ``title``, by the first of their row."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {title} |")) + 2
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found[first.split(",")[0]] = others
    return found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    try:
        yield DeviceMesh("cpu", torch.arange(16).view(SHAPE), mesh_dim_names=("pp", "dp", "tp"))
    finally:
        dist.destroy_process_group()


def listed(text: str) -> list[list[int]]:
    return [[int(rank) for rank in group.split(",")] for group in text.removesuffix("; ...").split(";")]


def test_the_groups_are_those_of_the_mesh(mesh: DeviceMesh) -> None:
    ranks = mesh.mesh
    for stage, cells in rows("stage").items():
        assert [[int(rank) for rank in cell.split(",")] for cell in cells] == ranks[int(stage)].tolist()
    tables = {name: listed(cells[0]) for name, cells in rows("group").items()}
    along = {
        "tensor parallel": ranks.flatten(0, 1),
        "data parallel": ranks.transpose(1, 2).flatten(0, 1),
        "pipeline parallel": ranks.flatten(1).T,
        "model parallel": ranks.transpose(0, 1).flatten(1),
        "embedding": ranks[[0, -1]].flatten(1).T,
    }
    assert tables.keys() == along.keys()
    for name, groups in tables.items():
        assert groups == along[name].tolist()[: len(groups)], name
    # and torch's own, of this rank
    for name, dim in (("tensor parallel", "tp"), ("data parallel", "dp"), ("pipeline parallel", "pp")):
        assert dist.get_process_group_ranks(mesh.get_group(dim)) == tables[name][0]
