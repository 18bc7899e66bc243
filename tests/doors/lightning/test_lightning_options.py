"""Strategy arguments: every field of the config, torch DDP's with our meaning, and everything else refused by name."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from megastrategy import DistributedDataParallelConfig, MegatronDDPStrategy

FIELDS = [field.name for field in dataclasses.fields(DistributedDataParallelConfig)]


@pytest.mark.parametrize("name", FIELDS)
def test_every_config_field_is_a_strategy_argument(name: str) -> None:
    """A field is written once, in the config; the strategy must pass on each of them, also those that come later."""
    default = getattr(DistributedDataParallelConfig(), name)
    others = {
        "bucket_size": 12_345,
        "overlap_param_gather": True,
        "grad_buffer": "pooled",
        "num_distributed_optimizer_instances": 3,
        "grad_wire_dtype": "fp16",
    }
    value = others.get(name, not default)
    needed = {
        "use_contiguous_buffers": {"use_distributed_optimizer": False, "overlap_grad_reduce": False},
        "reduce_scatter_with_fp32_accumulation": {"grad_reduce_in_fp32": False},
    }
    config = MegatronDDPStrategy(**{name: value}, **needed.get(name, {})).config
    assert getattr(config, name) == value != default
    untouched = [other for other in FIELDS if other != name and other not in needed.get(name, {})]
    assert all(getattr(config, other) == getattr(DistributedDataParallelConfig(), other) for other in untouched)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"find_unused_parameters": True}, {"find_unused_parameters": True}),
        ({"find_unused_parameters": False}, {"find_unused_parameters": False}),
        ({"static_graph": True}, {"static_graph": True}),
        (
            {"static_graph": True, "find_unused_parameters": False},
            {"static_graph": True, "find_unused_parameters": False},
        ),
        ({"broadcast_buffers": False}, {"broadcast_buffers": False}),
        ({"gradient_as_bucket_view": True}, {}),
        ({"gradient_as_bucket_view": False}, {}),
        ({"bucket_cap_mb": 25}, {"bucket_size": 25 * 2**20 // 4}),
        ({"bucket_cap_mb": 0.5}, {"bucket_size": 2**17}),
    ],
)
def test_torch_ddps_arguments_are_accepted(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    """``MegatronDDPStrategy`` in place of ``DDPStrategy`` keeps the arguments; megabytes are those of fp32."""
    DDPStrategy(**arguments)
    assert MegatronDDPStrategy(**arguments).config == DistributedDataParallelConfig(**expected)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ddp_comm_hook", print, "need strategy='ddp'"),
        ("ddp_comm_state", object(), "need strategy='ddp'"),
        ("ddp_comm_wrapper", print, "need strategy='ddp'"),
        ("model_averaging_period", 4, "need strategy='ddp'"),
        ("mixed_precision", object(), "bf16-true"),
        ("delay_all_reduce_named_params", [], "freeze"),
        ("device_ids", [0], "device"),
        ("bucket_sise", 100, "did you mean 'bucket_size'?"),
        ("use_distributed_optimiser", True, "did you mean 'use_distributed_optimizer'?"),
        ("find_unused_params", True, "did you mean 'find_unused_parameters'?"),
        ("zero_stage", 2, "known are bucket_size, "),
    ],
)
def test_other_arguments_are_refused_by_name(name: str, value: Any, reason: str) -> None:
    """An option that is silently ignored is worse than an error."""
    with pytest.raises(ValueError, match=name) as caught:
        MegatronDDPStrategy(**{name: value})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"bucket_size": 0}, ["bucket_size=0"]),
        ({"bucket_size": 1e6}, ["bucket_size=1000000.0"]),
        ({"bucket_size": 10, "bucket_cap_mb": 25}, ["bucket_size", "bucket_cap_mb"]),
        ({"bucket_cap_mb": -1}, ["bucket_cap_mb=-1"]),
        ({"num_distributed_optimizer_instances": 0}, ["num_distributed_optimizer_instances=0"]),
        ({"overlap_grad_reduce": "yes"}, ["overlap_grad_reduce='yes'"]),
        ({"use_contiguous_buffers": False}, ["use_contiguous_buffers=False", "use_distributed_optimizer=False"]),
        ({"gradient_as_bucket_view": 1}, ["gradient_as_bucket_view=1"]),
    ],
)
def test_wrong_values_fail_at_construction(arguments: dict[str, Any], named: list[str]) -> None:
    """Before any process is started, with the field, the value and the remedy."""
    with pytest.raises(ValueError, match=named[0]) as caught:
        MegatronDDPStrategy(**arguments)
    assert all(part in str(caught.value) for part in named)


def test_lightnings_own_arguments_reach_ddp_strategy() -> None:
    """They are not options of the engine."""
    strategy = MegatronDDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=7), start_method="spawn")
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=7)
    assert strategy._start_method == "spawn"
    assert strategy.config == DistributedDataParallelConfig()
