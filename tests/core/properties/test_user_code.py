"""User code between wrap and close, row by row against torch DDP, in a plain loop."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.errors import MegastrategyError
from tests.support.engines import engines
from tests.support.ranks import run_ranks
from tests.support.user_code import ROWS, WHY_TORCH_DDP_REFUSES, UserCode
from tests.support.user_code_training import Ended, Net, compare, make_optimizer, play, site_of

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward", bucket_size=50)
SHARDED = [("reduce-scatter", 2), ("pooled", 2), ("forward", 2)]
WHOLE = [("all-reduce", 2), ("reduce-scatter", 1)]


@functools.cache
def with_torch_ddp(code: UserCode | None, size: int) -> list[Ended]:
    def run(rank: int, group: ProcessGroup) -> Ended:
        module = Net()
        wrap = functools.partial(TorchDDP, module, process_group=group)
        return play(site_of(module, wrap(), make_optimizer(module), rank), code, wrap_again=wrap)

    return run_ranks(size, run)


def with_ours(code: UserCode | None, size: int, mode: str, refusal: type[MegastrategyError] | None) -> list[Ended]:
    def run(rank: int, group: ProcessGroup) -> Ended:
        module = Net()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**MODES[mode]), group)
        optimizer = DistributedOptimizer(make_optimizer(module), model)
        ended = play(site_of(module, model, optimizer, rank), code, refusal)
        model.close()
        return ended

    return run_ranks(size, run)


def rows_in_turn() -> list[Any]:
    """Returns each row of the table in one mode, by turns among those in which it is refused, or can be played."""
    sharded = itertools.cycle(SHARDED)
    whole = itertools.cycle(WHOLE)
    any_mode = itertools.cycle([*SHARDED, *WHOLE])
    rows = []
    for code in ROWS:
        modes = any_mode
        if code.refused:
            modes = sharded
        elif code.needs_whole_grads:
            modes = whole
        mode, size = next(modes)
        rows.append(pytest.param(code, mode, size, id=f"{code.name}-{mode}-{size}"))
    return rows


@pytest.mark.parametrize(("code", "mode", "size"), rows_in_turn())
def test_equal_to_torch_ddp_or_refused_by_name(code: UserCode, mode: str, size: int) -> None:
    sharded = (mode, size) in SHARDED
    if code.torch_ddp_refuses:
        pytest.skip(WHY_TORCH_DDP_REFUSES)
    refusal = code.refused if sharded else None
    reference = with_torch_ddp(None if refusal else code, size)
    compare(with_ours(code, size, mode, refusal), reference, rtol=1e-5 if code.rounds and sharded else 0.0)


def test_two_weights_exchange_their_memory() -> None:
    """A row of the table, which has another mode there."""
    [code] = [code for code in ROWS if code.run.__name__ == "exchange_the_data_of_two_weights"]
    compare(with_ours(code, 2, "reduce-scatter", None), with_torch_ddp(code, 2))
