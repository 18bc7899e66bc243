"""The configuration: every option once, validated at construction, never changed afterwards."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, Literal, TypedDict, TypeVar

_T = TypeVar("_T")

_NARROW_STATE = "optimizer state and main params are fp32; grad_buffer='pooled' saves more memory"
REMOVED = {
    "optimizer_state_dtype": _NARROW_STATE,
    "store_param_remainders": _NARROW_STATE,
    "param_wire_dtype": "weights are sent in their own dtype; grad_wire_dtype='bf16' halves the bytes of gradients",
    "average_in_collective": "each rank divides its gradients before the sum, as torch DDP does",
    "pad_buckets_for_high_nccl_busbw": "buckets are aligned to 128 elements",
    "check_replicas_every_n_steps": "call model.check_replicas() between steps",
}
"""Options of earlier versions, and what there is instead."""
OTHER_NAMES = {
    "bucket_cap_mb": "pass bucket_size, in elements (25 MiB of fp32 gradients are bucket_size=6_553_600)",
    "gradient_as_bucket_view": "leave it out: it has no effect here, since grad_buffer says where gradients are",
}
"""Arguments of torch DDP that the strategies and plugins accept, and what a configuration has for them."""
REMOVED_VALUES = {
    ("grad_wire_dtype", "int8"): "'bf16' or 'fp16'",
    ("overlap_param_gather", "step"): "False, the default: step() gathers the new weights",
    ("overlap_param_gather", "forward"): "True",
}
"""Values of earlier versions, and what to write instead."""


def refuse_unknown_option(name: str, known: Iterable[str]) -> None:
    """Raises ValueError for a name that is no option, with the nearest of ``known``, or what to write instead."""
    if name in REMOVED:
        raise ValueError(f"the option {name!r} was removed: leave it out; {REMOVED[name]}")
    if name in OTHER_NAMES:
        raise ValueError(f"unknown argument {name!r}: {OTHER_NAMES[name]}")
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=1)
    # The whole list after one near name would hide it.
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    raise ValueError(f"unknown argument {name!r}: {hint}")


def refuses_unknown_options(cls: type[_T]) -> type[_T]:
    """Decorates a dataclass of options, whose own error for an unknown name would not say what to write."""
    initialise: Any = cls.__init__
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(initialise)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: N807 - it becomes the method
        for name in options:
            if name not in names:
                refuse_unknown_option(name, names)
        initialise(self, *arguments, **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@refuses_unknown_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Options of :class:`~megastrategy.DistributedDataParallel`, under Megatron-LM's names.

    Raises:
        ValueError: for an unknown name, and for a value of the wrong type, out of range, or in contradiction to another
            field; the message names the field, the value and the remedy.
    """

    bucket_size: int | None = None
    """Soft minimum of a bucket, in elements: the parameter that reaches it closes the bucket. ``None`` means an eighth
    of the model, at least 2**18 elements and at most Megatron-LM's ``max(40_000_000, 1_000_000 * dp_size)``; the first
    three buckets have an eighth, a quarter and a half of that. Why these: build's [Note: default bucket size].
    On more than two ranks the order of sums follows the buckets, so runs with different sizes are not equal to the bit.
    Megatron-core's ``bucket_size``."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce the gradients of 16-bit parameters in fp32 (4 bytes a parameter); off: in the parameter's
    dtype (2 bytes). On by default: sums in bf16 lose small gradients, the more so with more ranks and microbatches.
    Megatron-core's ``grad_reduce_in_fp32``."""

    overlap_grad_reduce: bool = True
    """Launch a bucket's reduction as soon as its last gradient has arrived, while backward continues; off: all of them
    at the end of backward, in the same order and with the same result. Buckets follow the order in which the gradients
    of the first synchronised backward arrive, which therefore has no overlap itself. Megatron-core's
    ``overlap_grad_reduce``."""

    use_distributed_optimizer: bool = True
    """Reduce-scatter the gradients and shard the optimizer over the ranks; off: all-reduce, and every rank steps the
    whole model, as torch DDP does (for optimizers that cannot be sharded, and for code that reads ``.grad``).
    Megatron-core's ``use_distributed_optimizer``."""

    num_distributed_optimizer_instances: int = 1
    """The number of complete copies of the sharded optimizer, each over consecutive ranks (a node's, for example); it
    divides the number of ranks d. Gradients are reduce-scattered inside an instance and the shards all-reduced between
    instances; new weights are gathered inside an instance. An instance of s = d/n ranks keeps 8/s bytes of Adam's state
    a parameter on a rank instead of 8/d (12/s with main params), and the links between nodes carry 8(n - 1)/d bytes a
    parameter a step and no gather. As many instances as ranks shard nothing: that is an all-reduce. With
    ``reduce_scatter_with_fp32_accumulation`` gradients have 16 bits inside an instance, and are fp32 sums between.
    Megatron-core's ``num_distributed_optimizer_instances``."""

    overlap_param_gather: bool = False
    """Gather updated parameters under the next forward (only with ``use_distributed_optimizer``): ``step()`` returns at
    once, and the first read of a parameter, by its module's forward or other code, waits for it.
    ``DistributedDataParallel.finish_param_gather`` says which reads cannot wait by themselves. Off: ``step()`` gathers
    them after its one call of the optimizer, and returns when all have arrived. Megatron-core's
    ``overlap_param_gather``."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients and sum them in fp32, in the order of the ranks, into an fp32 tensor for this rank's shard:
    half the bytes of ``grad_reduce_in_fp32`` on the wire, and the same sum for gradients that come in 16 bits (one
    microbatch a step). Costs 4/d bytes a parameter. Needs ``grad_reduce_in_fp32=False`` and the distributed optimizer;
    fp32 gradients are sent as always. Megatron-core's ``reduce_scatter_with_fp32_accumulation``."""

    grad_wire_dtype: Literal["bf16", "fp16"] | None = None
    """The dtype in which gradients of more than 16 bits are sent. Each rank rounds its gradients once, when their
    bucket is sent, and a shard's owner sums them in the gradients' own dtype, in the order of the ranks: half the bytes
    of fp32, for slow links. ``"fp16"`` keeps three bits more than ``"bf16"``, overflows above 65,504 and rounds values
    below 3e-8 to zero. Costs 4/d bytes a parameter for the sums. Gradients of 16 bits are sent as they are. Needs
    ``use_distributed_optimizer``; of no effect on one rank. torch DDP's ``fp16_compress_hook`` and
    ``bf16_compress_hook``."""

    offload_optimizer_states: bool = False
    """Step the optimizer on the host of an accelerator, where main params and state are. Saves 12/d bytes a parameter
    on the device for Adam and 16-bit weights, 8/d for 32-bit ones, and takes 16/d on the host, where the reduced
    gradients are copied to. The step runs there on all cores, and the new weights are copied back. Needs
    ``use_distributed_optimizer``; of no effect on one rank and where training runs on the host. DeepSpeed's
    ZeRO-Offload, and FSDP2's ``CPUOffloadPolicy``, with the user's optimizer."""

    use_contiguous_buffers: bool = True
    """Keep gradients in persistent contiguous buffers; off: Megatron-LM's fallback, which leaves ``.grad`` to autograd
    and flattens one bucket at a time after backward (needs ``use_distributed_optimizer=False`` and
    ``overlap_grad_reduce=False``). Saves no memory while training; for code that needs autograd's own ``.grad``.
    Megatron-LM's ``use_contiguous_buffers_in_local_ddp``."""

    grad_buffer: Literal["contiguous", "pooled"] = "contiguous"
    """The memory of gradients. ``"contiguous"``: persistent buffers as large as the model, where they accumulate on
    each rank until they are sent, once a step. ``"pooled"``: autograd's own ``.grad`` until their bucket is complete,
    which is sent from one of a few staging buffers and freed; the reduced gradients accumulate in fp32 in this rank's
    shard. With 16-bit weights 2 + 16/d bytes a parameter instead of 6 + 12/d, and a few buckets while backward runs.
    The price: every backward is reduced, under ``no_sync`` too, so n microbatches a step send n times the bytes, and a
    rank's own gradient is never available. Needs ``use_distributed_optimizer`` and ``use_contiguous_buffers``; on one
    rank, where nothing is scattered, it is ``"contiguous"``. The bucket pool of the Megatron-LLaMA study."""

    broadcast_buffers: bool = True
    """Broadcast rank 0's module buffers (BatchNorm statistics) before each synchronised forward, as torch DDP does.
    torch DDP's ``broadcast_buffers``."""

    find_unused_parameters: bool = True
    """Agree after each synchronised backward on the parameters that any rank used, one byte a parameter, so that
    parameters unused on some or all ranks get the same gradients as in torch DDP. The graph is not searched, so the
    cost does not depend on it. Off: every parameter must receive a gradient in every synchronised backward, or an error
    names it. torch DDP's ``find_unused_parameters``."""

    static_graph: bool = False
    """Declare that every synchronised backward uses the same parameters: ranks agree once, on the first. torch DDP's
    ``static_graph``."""

    check_for_nan_in_grad: bool = False
    """Check every bucket before it is sent: if it contains an infinite or NaN gradient on any rank, all ranks raise an
    error that names rank, parameter and bucket. Costs one pass over the gradients and, on CUDA, one read of the device
    at the end of backward. Not with a GradScaler, which causes infinite gradients on purpose. Megatron-core's
    ``check_for_nan_in_grad``."""

    def __post_init__(self) -> None:
        # Types first: the later checks compare and add, and would fail with Python's message instead of the field's.
        _check_values(self)
        _check_numbers(self)
        _check_contradictions(self)


SHARD_OPTIONS = (
    "reduce_scatter_with_fp32_accumulation",
    "grad_buffer",
    "grad_wire_dtype",
    "offload_optimizer_states",
)
"""The options without a meaning where nothing is sharded: with an all-reduce, and in an instance of one rank."""


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Options that exclude another: each of ``options`` with a value other than its default, and ``other`` with
    ``value``."""

    options: tuple[str, ...]
    other: str
    value: bool
    why: str
    """The reason, and the value to pass instead."""


_FLATTENED = "without persistent buffers gradients are flattened and all-reduced after backward"
CONTRADICTIONS = (
    Contradiction(
        ("num_distributed_optimizer_instances", *SHARD_OPTIONS),
        "use_distributed_optimizer",
        False,
        "it needs the shards of the distributed optimizer, and with an all-reduce every rank has whole gradients and "
        "state. Pass one of the two",
    ),
    Contradiction(
        ("use_contiguous_buffers",),
        "use_distributed_optimizer",
        True,
        f"{_FLATTENED}. Pass use_distributed_optimizer=False as well, or leave use_contiguous_buffers on",
    ),
    Contradiction(
        ("use_contiguous_buffers",),
        "overlap_grad_reduce",
        True,
        f"{_FLATTENED}. Pass overlap_grad_reduce=False as well, or leave use_contiguous_buffers on",
    ),
    Contradiction(
        ("reduce_scatter_with_fp32_accumulation",),
        "grad_reduce_in_fp32",
        True,
        "gradients are sent as fp32 already. Pass grad_reduce_in_fp32=False as well",
    ),
)
"""Options that exclude each other. The first violated row is reported."""

_NUMBERS = ("bucket_size", "num_distributed_optimizer_instances")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "grad_buffer": ("contiguous", "pooled"),
    "grad_wire_dtype": (None, "bf16", "fp16"),
}
"""The values of fields that are no switches."""


class ConfigOptions(TypedDict, total=False):
    """The fields of :class:`DistributedDataParallelConfig` as keyword arguments, for type checkers and editors."""

    bucket_size: int | None
    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    use_distributed_optimizer: bool
    num_distributed_optimizer_instances: int
    overlap_param_gather: bool
    reduce_scatter_with_fp32_accumulation: bool
    grad_wire_dtype: Literal["bf16", "fp16"] | None
    offload_optimizer_states: bool
    use_contiguous_buffers: bool
    grad_buffer: Literal["contiguous", "pooled"]
    broadcast_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    check_for_nan_in_grad: bool


def _check_values(config: DistributedDataParallelConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, str) and (field.name, value) in REMOVED_VALUES:
            raise ValueError(f"{field.name}={value!r} was removed: write {REMOVED_VALUES[field.name, value]}")
        if field.name in _CHOICES:
            if value not in _CHOICES[field.name]:
                *others, last = map(repr, _CHOICES[field.name])
                raise ValueError(f"{field.name}={value!r}: expected {', '.join(others)} or {last}")
        # All others are switches. Any string is true to Python, including the "false" of a YAML file.
        elif field.name not in _NUMBERS and not isinstance(value, bool):
            raise ValueError(f"{field.name}={value!r}: expected True or False")


def _check_numbers(config: DistributedDataParallelConfig) -> None:
    size: object = config.bucket_size
    instances = config.num_distributed_optimizer_instances
    if size is not None and not _is_positive_number(size):
        raise ValueError(
            f"bucket_size={size!r}: expected a positive number of elements, or None for the default (an eighth of the "
            f"model, between 2**18 and 40 million elements)"
        )
    if not _is_positive_number(instances):
        raise ValueError(
            f"num_distributed_optimizer_instances={instances!r}: expected a positive number that divides the "
            "number of ranks, or 1 for one optimizer sharded over all of them"
        )


def _is_positive_number(value: object) -> bool:
    # True is an int in Python, so bucket_size=True would mean buckets of one element.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_contradictions(config: DistributedDataParallelConfig) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for row in CONTRADICTIONS:
        for option in row.options:
            value = getattr(config, option)
            if value != defaults[option] and getattr(config, row.other) == row.value:
                raise ValueError(f"{option}={value!r} contradicts {row.other}={row.value}: {row.why}")


def check_expert_options(config: DistributedDataParallelConfig, option: str) -> None:
    """Raises ValueError for options that do not work with experts that data-parallel ranks divide by ``option``."""
    if not config.find_unused_parameters or config.static_graph:
        raise ValueError(
            "find_unused_parameters=False and static_graph promise that every rank uses every parameter, and which "
            f"experts get tokens depends on the batch. Leave both out with {option}"
        )
    if not config.use_contiguous_buffers:
        raise ValueError(f"use_contiguous_buffers=False is not supported with {option}: leave it out")


def field_names() -> tuple[str, ...]:
    """Returns the names of all configuration fields, in their order of declaration."""
    return tuple(field.name for field in dataclasses.fields(DistributedDataParallelConfig))
