"""Optimizers that need whole parameters: each is stepped by the rank that owns it, and all is as under torch DDP."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import LayoutMismatchError, OptimizerNotShardableError
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import BufferLayout, ParamSpec
from megastrategy.core.layout.memory import memory_use
from megastrategy.core.layout.owners import Owners
from megastrategy.core.optimizer.state import local_state
from tests.support import optimizers
from tests.support.data_path import main_params_of, owners_of, state_bytes_of
from tests.support.doubles import RecordingCollectives
from tests.support.models import two_layers
from tests.support.ranks import run_ranks, try_ranks
from tests.support.training import assert_close, start_ours, train_with_ddp, train_with_ours
from tests.support.whole_params import KINDS, SOME, WholeRun, assert_same, batch, by_dimensions, model_on, same, train


@pytest.mark.parametrize(
    ("kind", "grad_buffer", "accumulate", "gather"),
    [
        ("muon", "contiguous", 1, False),
        ("lamb", "contiguous", 1, False),
        ("muon_and_adamw", "contiguous", 1, False),
        ("counts_calls", "contiguous", 1, False),
        ("replicated_and_flat", "contiguous", 1, False),
        ("replicated_and_flat", "contiguous", 2, True),
        ("replicated_and_flat", "pooled", 2, False),
    ],
)
def test_equal_to_torch_ddp_to_the_bit_on_two_ranks(kind: str, grad_buffer: Any, accumulate: int, gather: Any) -> None:
    run = WholeRun(kind=kind, accumulate=accumulate)
    config = DistributedDataParallelConfig(bucket_size=SOME, grad_buffer=grad_buffer, overlap_param_gather=gather)
    if grad_buffer == "pooled" and accumulate > 1:  # sums of each microbatch's mean, in another order than torch DDP's
        assert_close(train_with_ours(run, 2, config), train_with_ddp(run, 2), 1e-4)
    else:
        assert_same(train_with_ours(run, 2, config), train_with_ddp(run, 2))


# --- owners ----------------------------------------------------------------------------------------------------------


@st.composite
def owned_layouts(draw: st.DrawFn) -> tuple[BufferLayout, set[int]]:
    shapes = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=12))
    specs = [
        ParamSpec(f"p{number}", shape, (shape[1], 1), torch.float32, torch.float32)
        for number, shape in enumerate(shapes)
    ]
    size = draw(st.sampled_from([2, 3, 4, 8, 64]))
    config = DistributedDataParallelConfig(bucket_size=draw(st.sampled_from([1, 500, 10**9])))
    whole = draw(st.sets(st.integers(0, len(specs) - 1)))
    return build_layout(specs, config, size), whole


@settings(max_examples=50, deadline=None)
@given(owned_layouts())
def test_owners_have_everything_once_and_are_even(drawn: tuple[BufferLayout, set[int]]) -> None:
    layout, whole = drawn
    owners = Owners(layout, {}).extended_by(whole)
    assert owners.rank_of.keys() == whole
    numels = [layout.params[param].numel for param in whole]
    assert sum(owners.owned_numels()) == sum(numels)
    assert max(owners.owned_numels()) <= sum(numels) / layout.num_shards + max(numels, default=0)
    for bucket in layout.buckets:
        stepped = [0] * bucket.numel
        for rank, spans in enumerate(owners.stepped_spans(bucket, bucket.params)):
            for start, end in spans:
                for element in range(start, end):
                    assert stepped[element] == 0, "two ranks step it"
                    stepped[element] = rank + 1
        for param in bucket.params:
            slot = layout.slots[param]
            ranks = set(stepped[slot.start - bucket.start : slot.end - bucket.start])
            assert 0 not in ranks, "no rank steps it"
            if param in whole and slot.start < slot.end:
                assert ranks == {owners.rank_of[param] + 1}
        here = [param for param in bucket.params if param in whole]
        for param in here:
            held = [part for _, part in owners.layout.holders(param)]
            slot = layout.slots[param]
            assert [part.start for part in held] == [slot.start, *(part.end for part in held[:-1])][: len(held)]
            assert sum(part.numel for part in held) == layout.params[param].numel
            assert [rank for rank, part in owners.layout.holders(param)] == [
                rank
                for rank in range(layout.num_shards)
                if layout.owned_range(param, rank) and layout.params[param].numel
            ]


def test_owners_stay_when_others_join() -> None:
    specs = [ParamSpec(f"p{n}", (10 + n, 7), (7, 1), torch.float32, torch.float32) for n in range(9)]
    layout = build_layout(specs, DistributedDataParallelConfig(bucket_size=SOME), 4)
    first = Owners(layout, {}).extended_by({0, 3, 5})
    later = first.extended_by({1, 2, 8})
    assert {param: later.rank_of[param] for param in (0, 3, 5)} == first.rank_of
    assert first == Owners(layout, {}).extended_by([5, 3, 0]), "whatever the order in which they are named"


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (4, torch.float32), (3, torch.bfloat16)])
def test_owner_keeps_state_of_its_params_only(size: int, dtype: torch.dtype) -> None:
    """Two matrices: on four ranks two of them own none."""

    def run(rank: int, group: ProcessGroup) -> int:
        module, model = model_on(group, dtype)
        matrices, rest = by_dimensions(list(module.parameters()))
        muon = DistributedOptimizer(torch.optim.Muon(matrices, lr=0.02), model)
        adamw = DistributedOptimizer(torch.optim.AdamW(rest, lr=0.01), model)
        for step in range(2):
            model(batch(rank, step, dtype)).square().mean().backward()
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
        own = [index for index, owner in owners_of(model).rank_of.items() if owner == rank]
        expected = sum(model.layout.params[index].numel for index in own)
        assert len(own) <= math.ceil(len(matrices) / size)
        kept = [value for values in muon.state.values() for value in values.values() if isinstance(value, Tensor)]
        assert sum(value.nbytes for value in kept) == 4 * expected, "momentum is in fp32, as of main params"
        mains = main_params_of(muon)
        assert sum(main.nbytes for main in mains.values()) == (4 * expected if dtype == torch.bfloat16 else 0)
        counts = (adamw._impl.num_kept() or {}) | (muon._impl.num_kept() or {})
        assert sorted(counts.values()) == [1, 1, 2, 2]
        use = memory_use(model.layout, rank, counts, owners_of(model).rank_of)
        assert use.state_bytes == state_bytes_of(adamw) + state_bytes_of(muon)
        return expected

    owned = run_ranks(size, run)
    assert sum(owned) == 33 * 10 + 7 * 33


@pytest.mark.parametrize(("size", "kind"), [(2, "muon"), (3, "lamb"), (4, "muon_and_adamw")])
def test_step_sends_parts_to_owners_once(size: int, kind: str) -> None:
    """Counted call by call: one exchange for the buffer, one gather for each bucket, and no element is sent that its
    owner holds already."""

    def run(rank: int, group: ProcessGroup) -> tuple[int, int]:
        doubles: list[RecordingCollectives] = []

        def record(real: Any) -> Any:
            doubles.append(RecordingCollectives(group, real))
            return doubles[0]

        training = start_ours(WholeRun(kind=kind), rank, group, DistributedDataParallelConfig(bucket_size=SOME), record)
        training.step(0)
        calls, model = doubles[0], training.model
        calls.calls.clear()
        training.step(1)
        owners, layout = owners_of(model), model.layout
        whole = {layout.slots[param].bucket for param in owners.rank_of}
        holders = {(rank, owner) for param, owner in owners.rank_of.items() for rank, _ in layout.holders(param)}
        num_exchanges = int(any(rank != owner for rank, owner in holders))  # there is one buffer
        assert len(calls.named("all_to_all")) == num_exchanges
        assert len(calls.named("gather_spans")) == len(whole)
        exchanges = {"all_to_all", "gather_spans", "all_gather"}
        names = [call.name for call in calls.calls if call.name in exchanges]
        assert names[:num_exchanges] == num_exchanges * ["all_to_all"], "before anything is stepped and gathered"
        groups = training.optimizer.param_groups
        indices = [model.engine.index_by_id[id(param)] for group in groups for param in group["params"]]
        stepped = {layout.slots[param].bucket for param in indices}
        assert len(calls.named("all_gather")) == len(stepped - whole)
        sent = sum(call.numel for call in calls.named("all_to_all"))
        expected = sum(
            part.numel
            for param, owner in owners.rank_of.items()
            for holder, part in owners.layout.holders(param)
            if holder == rank != owner
        )
        assert sent == expected
        return sent, sum(layout.params[param].numel for param in owners.rank_of)

    by_rank = run_ranks(size, run)
    assert sum(sent for sent, _ in by_rank) <= by_rank[0][1] * (size - 1) / size * 1.5


# --- 16-bit weights, and everything else of the engine ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "accumulate"),
    [
        ("muon", {}, 1),
        ("counts_calls", {}, 1),
        ("lamb", {"grad_buffer": "pooled"}, 1),
        ("replicated_and_flat", {}, 2),
    ],
    ids=str,
)
def test_bf16_whole_params_step_as_with_all_reduce(kind: str, options: dict[str, Any], accumulate: int) -> None:
    """To the bit on two ranks, where a sum has one order; main params too."""

    def run(rank: int, group: ProcessGroup) -> tuple[list[Tensor], Any, Any]:
        results = []
        for ways in (options, {"use_distributed_optimizer": False}):
            module, model = model_on(group, torch.bfloat16, **ways)
            optimizer = DistributedOptimizer(KINDS[kind](list(module.parameters())), model)
            train(model, optimizer, rank, range(5), accumulate)
            weights = [param.detach().clone() for param in module.parameters()]
            results.append((weights, optimizer.state_dict(), optimizer.main_params()))
        return results  # type: ignore[return-value]

    for rank, (sharded, whole) in enumerate(run_ranks(2, run)):  # type: ignore[misc]
        assert same(sharded[0], whole[0])
        if rank == 0:
            assert same(sharded[1]["state"], whole[1]["state"])
            assert same(sharded[2], whole[2])


@pytest.mark.parametrize("kind", ["muon", "replicated_and_flat"])
def test_instances_have_owners_each(kind: str) -> None:
    """Two instances of two ranks: as one of four, except for the order of sums."""
    run = WholeRun(kind=kind, steps=5)
    config = DistributedDataParallelConfig(bucket_size=SOME, num_distributed_optimizer_instances=2)
    assert_close(train_with_ours(run, 4, config), train_with_ddp(run, 4), 1e-4)


@pytest.mark.parametrize("kind", ["muon", "replicated_and_flat"])
def test_clipping(kind: str) -> None:
    run = WholeRun(kind=kind, clip_norm=0.05)
    config = DistributedDataParallelConfig(bucket_size=SOME)
    ours, reference = train_with_ours(run, 2, config), train_with_ddp(run, 2)
    assert_close(ours, reference, 1e-4)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(torch.stack(mine.norms), torch.stack(theirs.norms), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_joins_later_gets_an_owner(dtype: torch.dtype) -> None:
    """Unfrozen in the groups, and added with a group of its own; as with all-reduce, to the bit."""

    def run(rank: int, group: ProcessGroup) -> None:
        ends = []
        for sharded in (True, False):
            module = two_layers().to(dtype)
            module[0].requires_grad_(False)
            config = DistributedDataParallelConfig(bucket_size=SOME, use_distributed_optimizer=sharded)
            model = DistributedDataParallel(module, config, group)
            first = [module[2].weight, module[0].weight]
            optimizer = DistributedOptimizer(optimizers.LambWithMoments(first, lr=0.02), model)
            train(model, optimizer, rank, range(2))
            module[0].weight.requires_grad_(True)
            train(model, optimizer, rank, range(2, 4))
            module[0].bias.requires_grad_(True)
            optimizer.add_param_group({"params": [module[0].bias, module[2].bias], "lr": 0.01})
            train(model, optimizer, rank, range(4, 6))
            ends.append(([param.detach().clone() for param in module.parameters()], optimizer.state_dict()))
            assert len(owners_of(model).rank_of) == (4 if sharded else 0)
        assert same(ends[0][0], ends[1][0])
        assert rank or same(ends[0][1], ends[1][1])

    run_ranks(2, run)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_whole_param_in_two_optimizers_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module, model = model_on(group)
        adamw = DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.01), model)
        muon = DistributedOptimizer(torch.optim.Muon([module[0].weight], lr=0.02), model)
        model(batch(rank, 0)).square().mean().backward()
        muon.step()
        with pytest.raises(ValueError, match=r"'0.weight' is in two optimizers"):
            adamw.step()

    run_ranks(2, run)


def test_divided_param_in_whole_group_is_named() -> None:
    """One that is owned goes on being stepped whole, in a group of shards too."""

    def run(rank: int, group: ProcessGroup) -> None:
        module, model = model_on(group)
        optimizer = DistributedOptimizer(KINDS["muon_and_adamw"](list(module.parameters())), model)
        train(model, optimizer, rank, range(1))
        whole, flat = (group["params"] for group in optimizer.param_groups)
        flat.append(whole.pop())
        train(model, optimizer, rank, range(1, 2))
        whole.append(flat.pop(0))
        before = [param.detach().clone() for param in module.parameters()]
        for _ in range(2):
            with pytest.raises(OptimizerNotShardableError, match=r"'0.bias' is divided .* group 0 now"):
                train(model, optimizer, rank, range(2, 3))
        assert all(map(torch.equal, before, module.parameters()))
        flat.append(whole.pop())
        train(model, optimizer, rank, range(2, 3))

    run_ranks(2, run)


def test_ranks_with_other_groups_are_told() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module, model = model_on(group)
        matrices = by_dimensions(list(module.parameters()))[0]
        DistributedOptimizer(torch.optim.Muon(matrices[rank:], lr=0.02), model)

    for error in try_ranks(2, run):
        assert isinstance(error, LayoutMismatchError), error
        assert "by rank" in str(error).lower()


# Whole parameters on three and four ranks, where torch DDP adds gradients in another order.  Muon rounds what it
# orthogonalises to bf16, and Shampoo takes roots of near-singular factors: either makes thousands of the last bit of
# a sum. So equality is shown where that bit does not matter, in fp64, and where it is the same, against plain torch
# that adds in the same order.


@pytest.mark.parametrize(
    ("kind", "size", "run", "options"),
    [
        ("muon", 1, {}, {}),
        ("muon_and_adamw", 1, {}, {}),
        ("adafactor", 3, {"accumulate": 3}, {"grad_buffer": "pooled"}),
        ("replicated_and_flat", 3, {}, {}),
    ],
    ids=str,
)
def test_equal_to_torch_ddp_in_fp64(kind: str, size: int, run: dict[str, Any], options: dict[str, Any]) -> None:
    """Clipped too. More ranks than there are matrices, too."""
    made = WholeRun(kind=kind, dtype=torch.float64, **run)
    ours = train_with_ours(made, size, DistributedDataParallelConfig(bucket_size=SOME, **options))
    reference = train_with_ddp(made, size)
    assert_close(ours, reference, 1e-10)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.norms, theirs.norms, rtol=1e-12, atol=0)


def test_every_rank_has_the_state_of_replicated_params() -> None:
    """The first saves it."""

    def run(rank: int, group: ProcessGroup) -> tuple[set[int], int]:
        module, model = model_on(group, torch.bfloat16)
        optimizer = DistributedOptimizer(KINDS["replicated_and_flat"](list(module.parameters())), model)
        train(model, optimizer, rank, range(2))
        rank_of = owners_of(model).rank_of
        use = memory_use(model.layout, rank, dict.fromkeys(range(4), 1), rank_of)
        assert use.state_bytes == state_bytes_of(optimizer), "main params and momentum"
        return local_state(optimizer._impl, is_saved=True).keys() & rank_of.keys(), use.state_bytes

    by_rank = run_ranks(3, run)
    assert [len(saved) for saved, _ in by_rank] == [3, 0, 0]
    assert min(num_bytes for _, num_bytes in by_rank) >= 8 * (33 * 10 + 7 * 33 + 7)
