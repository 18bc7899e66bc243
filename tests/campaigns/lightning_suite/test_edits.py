"""The edits in a file that was written for Lightning's ModelParallelStrategy; the rest stays."""

from __future__ import annotations

import ast

from .edits import for_cpus, for_ours, for_tensor_ranks, ranks_of_tests

LOOP = """
import torch
from somewhere import fully_shard, MixedPrecisionPolicy
from lightning.fabric.strategies import ModelParallelStrategy

def parallelize(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
        block.cut()
    model = fully_shard(model, mesh=mesh["data_parallel"])
    return model

strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=2)
fabric = Fabric(accelerator="cuda", devices=4, strategy=strategy)
device = torch.device("cuda", 3)
"""
EDITED = """
import torch
from somewhere import MixedPrecisionPolicy
from ours import Strategy as ModelParallelStrategy

def parallelize(model, mesh):
    for block in model.blocks:
        block.cut()
    return model

strategy = ModelParallelStrategy(parallelize, tensor_parallel_size=2)
fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
device = torch.device("cpu")
"""
TESTS = """
@RunIf(min_cuda_gpus=2, standalone=True)
def test_one():
    strategy = ModelParallelStrategy(_parallelize_feed_forward_fsdp2, data_parallel_size=2, tensor_parallel_size=1)
    assert model.weight.device_mesh.ndim == 2
    assert isinstance(model.weight, DTensor)
"""
EDITED_TESTS = """
@RunIf(standalone=True)
def test_one():
    strategy = ModelParallelStrategy(_parallelize_feed_forward_tp, data_parallel_size=1, tensor_parallel_size=2)
    assert isinstance(model.weight, DTensor)
"""


def same(source: str, expected: str) -> bool:
    return source == ast.unparse(ast.parse(expected))


def test_sharding_goes_and_our_strategy_comes() -> None:
    assert same(for_ours(for_cpus(LOOP), "ours", "Strategy"), EDITED)


def test_tests_are_of_tensor_ranks_and_keep_their_number() -> None:
    assert ranks_of_tests(TESTS) == {"test_one": 2}
    assert same(for_tensor_ranks(for_cpus(TESTS)), EDITED_TESTS)
