"""Options: each one checked at construction, with the field, the value and the remedy in the error."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.config import REMOVED, REMOVED_VALUES, field_names
from megastrategy.core.torch_ddp_surface import config_from_arguments

NUMBERS = ("bucket_size", "num_distributed_optimizer_instances")


def test_frozen_and_by_keyword_only() -> None:
    config = DistributedDataParallelConfig(bucket_size=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_size = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        DistributedDataParallelConfig(7)  # type: ignore[misc]


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^unknown argument 'bucket_sze': did you mean 'bucket_size'\?$"):
        DistributedDataParallelConfig(bucket_sze=1)  # type: ignore[call-arg]
    signature = inspect.signature(DistributedDataParallelConfig)
    assert tuple(signature.parameters) == field_names(), "as help() and editors show it"
    with pytest.raises(ValueError, match=r"^unknown argument 'bucket_cap_mb': pass bucket_size, in elements"):
        DistributedDataParallelConfig(bucket_cap_mb=25)  # type: ignore[call-arg]


def make_config(options: dict[str, object]) -> object:
    return DistributedDataParallelConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [make_config, config_from_arguments])
def test_removed_options_name_their_replacement(make: Callable[[dict[str, object]], object]) -> None:
    for name, instead in REMOVED.items():
        assert name not in field_names()
        with pytest.raises(ValueError, match=f"^the option '{name}' was removed: leave it out; {re.escape(instead)}$"):
            make({name: True})
    for (name, value), instead in REMOVED_VALUES.items():
        with pytest.raises(ValueError, match=f"^{name}='{value}' was removed: write {re.escape(instead)}$"):
            make({name: value})


WRONG: list[tuple[str, object, str]] = [
    *(("bucket_size", value, ".*positive number of elements") for value in (0, -1, 1.5, "auto", True)),
    *(("num_distributed_optimizer_instances", value, ": .*divides the number") for value in (0, 2.0, "2", True, None)),
    *(("grad_buffer", value, ": expected 'contiguous' or 'pooled'") for value in ("Pooled", True, None)),
    *((name, "yes", "") for name in field_names() if name not in (*NUMBERS, "grad_buffer")),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_wrong_values_are_refused_by_name(name: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}{text}"):
        DistributedDataParallelConfig(**{name: value})  # type: ignore[arg-type]


def test_contradictions_name_both_fields() -> None:
    with pytest.raises(ValueError, match=r"grad_buffer='pooled' contradicts use_distributed_optimizer=False.*Pass one"):
        DistributedDataParallelConfig(grad_buffer="pooled", use_distributed_optimizer=False)
    with pytest.raises(ValueError, match=r"use_contiguous_buffers=False contradicts use_distributed_optimizer=True"):
        DistributedDataParallelConfig(grad_buffer="pooled", use_contiguous_buffers=False)
    with pytest.raises(ValueError, match=r"use_contiguous_buffers=False.*use_distributed_optimizer=False"):
        DistributedDataParallelConfig(use_contiguous_buffers=False)
    with pytest.raises(ValueError, match=r"use_contiguous_buffers=False.*overlap_grad_reduce=False"):
        DistributedDataParallelConfig(use_contiguous_buffers=False, use_distributed_optimizer=False)
    with pytest.raises(ValueError, match=r"fp32_accumulation=True contradicts grad_reduce_in_fp32=True"):
        DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    with pytest.raises(ValueError, match=r"fp32_accumulation=True contradicts use_distributed_optimizer=False"):
        DistributedDataParallelConfig(
            reduce_scatter_with_fp32_accumulation=True, grad_reduce_in_fp32=False, use_distributed_optimizer=False
        )
    with pytest.raises(ValueError, match=r"optimizer_instances=2 contradicts use_distributed_optimizer=False"):
        DistributedDataParallelConfig(num_distributed_optimizer_instances=2, use_distributed_optimizer=False)


def test_torch_ddp_arguments_have_a_meaning_here() -> None:
    config = config_from_arguments(
        {
            "bucket_cap_mb": 25,
            "gradient_as_bucket_view": True,
            "batched_grad_copy": True,
            "broadcast_buffers": False,
            "find_unused_parameters": True,
        }
    )
    assert config == DistributedDataParallelConfig(bucket_size=25 * 2**20 // 4, broadcast_buffers=False)
    assert config_from_arguments({"bucket_cap_mb": None}) == DistributedDataParallelConfig()
    assert not config_from_arguments({"broadcast_buffers": True, "forward_sync_buffers": False}).broadcast_buffers
    assert config_from_arguments({"forward_sync_buffers": None}) == DistributedDataParallelConfig()
    static = config_from_arguments({"static_graph": True, "find_unused_parameters": False})
    assert static == DistributedDataParallelConfig(static_graph=True, find_unused_parameters=False)


def test_every_default_of_torch_ddp_may_be_spelled_out() -> None:
    """The defaults of the installed torch: an argument that a newer one has is not unknown here."""
    parameters = inspect.signature(TorchDDP.__init__).parameters.values()
    defaults = {item.name: item.default for item in parameters if item.name not in ("self", "module", "process_group")}
    del defaults["bucket_cap_mb"]  # its default is None, and where the signature says 25, that is a size like another
    assert config_from_arguments(defaults) == DistributedDataParallelConfig(find_unused_parameters=False)


@pytest.mark.parametrize(
    ("ours", "ddps", "size"), [(100, None, 100), (None, 1, 2**18), (None, None, None)], ids=["ours", "ddps", "neither"]
)
def test_none_leaves_bucket_size_to_the_other_name(ours: int | None, ddps: float | None, size: int | None) -> None:
    """Code that follows a signature passes defaults too, in any order."""
    by_name = {"bucket_size": ours, "bucket_cap_mb": ddps}
    for names in (["bucket_size", "bucket_cap_mb"], ["bucket_cap_mb", "bucket_size"]):
        assert config_from_arguments({name: by_name[name] for name in names}).bucket_size == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_sise": 1}, r"unknown argument 'bucket_sise': did you mean 'bucket_size'\?$"),
        ({"zzz": 1}, "unknown argument 'zzz': known are bucket_size"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook=.*strategy='ddp'.*grad_wire_dtype='bf16'"),
        ({"ddp_comm_hook": powerSGD_hook.powerSGD_hook}, "ddp_comm_hook=.*strategy='ddp'.*grad_wire_dtype='bf16'"),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook, "ddp_comm_state": 1}, "ddp_comm_state="),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook, "ddp_comm_wrapper": print}, "ddp_comm_wrapper="),
        ({"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "ddp_comm_wrapper="),
        (
            {"ddp_comm_hook": default_hooks.fp16_compress_hook, "use_distributed_optimizer": False},
            "ddp_comm_hook=fp16_compress_hook contradicts use_distributed_optimizer=False",
        ),
        (
            {"ddp_comm_hook": default_hooks.fp16_compress_hook, "grad_wire_dtype": "bf16"},
            "ddp_comm_hook=fp16_compress_hook contradicts grad_wire_dtype='bf16'",
        ),
        ({"lazy_bucket_allocation": True}, "lazy_bucket_allocation=True .*grad_buffer='pooled'"),
        ({"init_sync": False}, "init_sync=False .*broadcast"),
        ({"mixed_precision": 1}, "mixed_precision=1 .*precision"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan"),
        ({"bucket_cap_mb": 1, "bucket_size": 1}, "pass one of the two"),
        ({"gradient_as_bucket_view": 3}, "gradient_as_bucket_view=3"),
    ],
)
def test_other_arguments_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_arguments(arguments)


HOOKS = [
    ({"ddp_comm_hook": default_hooks.allreduce_hook}, None),
    ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, "fp16"),
    ({"ddp_comm_hook": default_hooks.bf16_compress_hook, "ddp_comm_state": None}, "bf16"),
    ({"ddp_comm_hook": default_hooks.fp16_compress_hook, "grad_wire_dtype": "fp16"}, "fp16"),
    ({"ddp_comm_hook": None, "ddp_comm_wrapper": None, "ddp_comm_state": None}, None),
]


@pytest.mark.parametrize(("arguments", "dtype"), HOOKS)
def test_torchs_16_bit_hooks_become_an_option(arguments: dict[str, object], dtype: str | None) -> None:
    assert config_from_arguments(arguments) == DistributedDataParallelConfig(grad_wire_dtype=dtype)


def test_all_reduce_rounds_nothing() -> None:
    with pytest.raises(ValueError, match="grad_wire_dtype='bf16' contradicts use_distributed_optimizer=False"):
        DistributedDataParallelConfig(grad_wire_dtype="bf16", use_distributed_optimizer=False)
    with pytest.raises(ValueError, match=r"grad_wire_dtype='int3': expected None.* or '"):
        DistributedDataParallelConfig(grad_wire_dtype="int3")  # type: ignore[arg-type]
