"""The configuration: every option once, checked at construction, never changed afterwards."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Options of :class:`~megastrategy.DistributedDataParallel`, under Megatron-LM's names.

    Raises:
        ValueError: for a value of the wrong type, out of range, or contradicting another field; the message
            names the field, the value and the remedy.
    """

    bucket_size: int | None = None
    """Soft minimum of a bucket, in elements: the parameter that reaches it closes the bucket. ``None`` takes an eighth
    of the model, at least 2**18 elements and at most Megatron-LM's ``max(40_000_000, 1_000_000 * dp_size)``; the first
    three buckets have an eighth, a quarter and a half of that. Why these: ``layout_build``'s [Note: default bucket
    size]. ``megastrategy tune`` times whole steps with several sizes, and says which number is worth writing down. On
    more than two ranks the order of sums follows the buckets, so runs with different sizes are not equal to the bit."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce the gradients of 16-bit parameters in fp32 (4 bytes a parameter); off: in the parameter's
    dtype (2 bytes). On by default: sums in bf16 lose small gradients, the more so the more ranks and microbatches."""

    overlap_grad_reduce: bool = True
    """Launch a bucket's reduction as soon as its last gradient is there, while backward goes on; off: all of
    them at the end of backward, in the same order and with the same result. Where a model runs in another order than it
    is registered, the first synchronised backward ends with a move to buckets in the order that was seen, once."""

    use_distributed_optimizer: bool = True
    """Reduce-scatter the gradients and shard the optimizer over the ranks; off: all-reduce, and every rank steps the
    whole model, as torch DDP does (for optimizers that cannot be sharded, and for code that reads ``.grad``)."""

    num_distributed_optimizer_instances: int = 1
    """The number of whole copies of the sharded optimizer, each over as many consecutive ranks (a node's, say); it
    divides the number of ranks d. Gradients are reduce-scattered inside an instance and the shards all-reduced between
    instances; new weights are gathered inside an instance. An instance of s = d/n ranks keeps 8/s bytes of Adam's state
    a parameter on a rank instead of 8/d (12/s with main params), and the links between nodes carry 8(n - 1)/d bytes a
    parameter a step and no gather. As many instances as ranks shard nothing: that is an all-reduce. With
    ``reduce_scatter_with_fp32_accumulation`` gradients have 16 bits inside an instance, and are fp32 sums between."""

    overlap_param_gather: bool | Literal["step", "forward"] = "step"
    """The moment when updated parameters are gathered (only with ``use_distributed_optimizer``). ``"step"``: each
    bucket as soon as this rank has stepped its part, while the next is stepped; all are there when ``step()`` returns.
    ``"forward"`` (or True, as Megatron-LM means it): ``step()`` returns at once, and a parameter is waited for when it
    is first read, by its module's forward or by anybody else; ``DistributedDataParallel.finish_param_gather`` says what
    cannot wait by itself. False: after the step, and waited for. ``"step"`` is the default since nobody can tell it
    from False."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients and sum them in fp32, in the order of the ranks, into an fp32 tensor for this rank's shard:
    half the bytes of ``grad_reduce_in_fp32`` on the wire, and the same sum for gradients that come in 16 bits (one
    microbatch a step). Costs 4/d bytes a parameter. Needs ``grad_reduce_in_fp32=False`` and the distributed optimizer;
    fp32 gradients are sent as they always are."""

    grad_wire_dtype: Literal["bf16", "fp16", "int8"] | None = None
    """The dtype in which gradients of more than 16 bits are sent. Each rank rounds its gradients once, when their
    bucket is sent, and a shard's owner sums them in the gradients' own dtype, in the order of the ranks: half the bytes
    of fp32, for slow links. ``"fp16"`` keeps three bits more than ``"bf16"``, overflows above 65,504 and makes zeros of
    what is below 3e-8. ``"int8"`` sends a quarter, 8 bits each with a scale for 64. Costs 4/d bytes a parameter for the
    sums. Gradients of 16 bits are sent as they are. Needs ``use_distributed_optimizer``; of no effect on one rank."""

    param_wire_dtype: Literal["bf16", "int8"] | None = None
    """The dtype in which new fp32 weights are sent: each owner sends what its weights have changed by, rounded, and
    adds it to its own weights as the others do, so all ranks hold the same ones. What rounding left out stays with the
    owner, and is sent with the next change. ``"bf16"`` is half the bytes of fp32; ``"int8"``, with a scale for 64, a
    quarter. Costs 4/d bytes a parameter for what was left out, and 2 or 1 for what is on its way. Weights of 16 bits
    are sent as they are. Needs ``use_distributed_optimizer``; of no effect on one rank."""

    optimizer_state_dtype: Literal["bf16"] | None = None
    """The dtype in which the numbers that an optimizer keeps for each element are held between steps. ``"bf16"``: 4/d
    bytes a parameter for Adam's two instead of 8/d. In a step the optimizer has fp32, a piece of the shards at a time,
    and what it leaves is rounded at random, so that it is right on the mean; the same way in every run, resumed or not,
    on any number of ranks. Checkpoints have fp32. It is not torch DDP's training to the bit. Parameters that are
    stepped whole (Muon, LAMB) keep what they have. Needs ``use_distributed_optimizer``; of no effect on one rank."""

    store_param_remainders: bool = False
    """Keep of bf16 weights' fp32 main params what the weights lack: 2 + 1/8 bytes an element instead of 4, so 1.875/d
    bytes a parameter less. Nothing is rounded: weights and main params are those of the fp32 ones to the bit. A weight
    that is changed from outside keeps what it lacked, less than half a unit in its last place. In a step the optimizer
    has fp32, a piece of the shards at a time. fp16 weights, and parameters that are stepped whole (Muon, LAMB), keep
    fp32 main params. Needs ``use_distributed_optimizer``; of no effect on one rank."""

    offload_optimizer_states: bool = False
    """Keep the numbers that an optimizer keeps for each element in pinned memory of the host between steps: 8/d bytes a
    parameter less on the device for Adam, and the same training to the bit. In a step they are brought to the device a
    piece of the shards at a time, while the piece before is stepped and the one before that goes back. A step then
    takes the time that the link to the host takes for these bytes. Parameters that are stepped whole (Muon, LAMB) keep
    theirs on the device. Needs ``use_distributed_optimizer``; of no effect on one rank."""

    average_in_collective: bool = False
    """Divide the sum over ranks by their number, not what each rank adds (on NCCL: the collective averages). Saves a
    pass over the gradients. Off by default: it is not what torch DDP computes, in the last bit where the number of
    ranks is no power of two, and sums of 16-bit gradients overflow earlier."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to a multiple of 2**16 elements (and of the number of ranks), which NCCL's ring and tree algorithms
    take at full bandwidth when there are many ranks. Costs up to 2**16 elements of gradients, parameters and traffic a
    bucket."""

    use_contiguous_buffers: bool = True
    """Keep gradients in persistent contiguous buffers; off: Megatron-LM's fallback, which leaves ``.grad`` to
    autograd and flattens one bucket at a time after backward (needs ``use_distributed_optimizer=False`` and
    ``overlap_grad_reduce=False``). Saves no memory while training; for code that insists on owning ``.grad``."""

    grad_buffer: Literal["contiguous", "pooled"] = "contiguous"
    """The memory that gradients have. ``"contiguous"``: in persistent buffers as large as the model, where they
    accumulate on each rank until they are sent, once a step. ``"pooled"``: in autograd's own ``.grad`` until their
    bucket is complete, which is sent from one of a few staging buffers and freed; what all ranks sent accumulates in
    fp32 in this rank's shard. With 16-bit weights 2 + 16/d bytes a parameter instead of 6 + 12/d, and a few buckets
    while backward runs. The price: every backward is reduced, under ``no_sync`` too, so n microbatches a step send n
    times the bytes, and no gradient is ever a rank's own. Needs ``use_distributed_optimizer`` and
    ``use_contiguous_buffers``; on one rank, where nothing is scattered, it is ``"contiguous"``."""

    broadcast_buffers: bool = True
    """Broadcast rank 0's module buffers (BatchNorm statistics) before each synchronised forward, as torch DDP does."""

    find_unused_parameters: bool = True
    """Agree after each synchronised backward on the parameters that any rank used, one byte a parameter, so that
    parameters unused on some or all ranks get what torch DDP gives them. Nothing is searched, so the cost does not
    depend on the graph. Off: every parameter must receive a gradient in every synchronised backward, or an error
    names it."""

    static_graph: bool = False
    """The same parameters are used in every synchronised backward: agree once, on the first."""

    check_for_nan_in_grad: bool = False
    """Look at every bucket before it is sent: if it holds an infinite or NaN gradient on any rank, all ranks raise an
    error that names rank, parameter and bucket. Costs one pass over the gradients and, on CUDA, one read of the device
    at the end of backward. Not with a GradScaler, which meets infinite gradients on purpose."""

    check_replicas_every_n_steps: int = 0
    """Compare the weights that ranks should have alike before every so many synchronised forwards that train; 0 for
    never. Where some have parted, because a rank alone has written one, all ranks raise ``ReplicaMismatchError`` with
    the first. Costs a pass over the weights on the host each time."""

    def __post_init__(self) -> None:
        # Types first: what follows compares and adds, and would fail with Python's words, not the field's.
        _check_values(self)
        if self.overlap_param_gather is True:
            # Megatron-LM's spelling becomes ours here, once; the digest that ranks compare then has one value for one
            # meaning.
            object.__setattr__(self, "overlap_param_gather", "forward")
        _check_numbers(self)
        _check_contradictions(self)


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Two options that exclude each other: ``option`` at another value than its default, and ``other`` at ``value``."""

    option: str
    other: str
    value: bool
    why: str
    """The reason, and what to pass instead."""


_NO_SHARDS = "use_distributed_optimizer", False
_NO_OWNER = (
    "an all-reduce has no owner that sums what was rounded once, or that keeps exact weights. Pass one of the two"
)
_SHARDED_SUMS = "pooled gradients are summed in the shards of the distributed optimizer"
_FLATTENED = "without persistent buffers gradients are flattened and all-reduced after backward"
CONTRADICTIONS = (
    Contradiction(
        "num_distributed_optimizer_instances",
        *_NO_SHARDS,
        "with an all-reduce every rank has a whole optimizer already. Pass one of the two",
    ),
    Contradiction(
        "grad_buffer",
        *_NO_SHARDS,
        f"{_SHARDED_SUMS}. Leave use_distributed_optimizer on, or grad_buffer='contiguous'",
    ),
    Contradiction(
        "grad_buffer",
        "use_contiguous_buffers",
        False,
        f"{_SHARDED_SUMS}. Leave use_contiguous_buffers on, or grad_buffer='contiguous'",
    ),
    Contradiction(
        "use_contiguous_buffers",
        "use_distributed_optimizer",
        True,
        f"{_FLATTENED}. Pass use_distributed_optimizer=False as well, or leave use_contiguous_buffers on",
    ),
    Contradiction(
        "use_contiguous_buffers",
        "overlap_grad_reduce",
        True,
        f"{_FLATTENED}. Pass overlap_grad_reduce=False as well, or leave use_contiguous_buffers on",
    ),
    Contradiction(
        "reduce_scatter_with_fp32_accumulation",
        "grad_reduce_in_fp32",
        True,
        "gradients are sent as fp32 already. Pass grad_reduce_in_fp32=False as well",
    ),
    Contradiction(
        "reduce_scatter_with_fp32_accumulation",
        *_NO_SHARDS,
        "an all-reduce has no shard to sum into. Pass one of the two",
    ),
    Contradiction("grad_wire_dtype", *_NO_SHARDS, _NO_OWNER),
    Contradiction("param_wire_dtype", *_NO_SHARDS, _NO_OWNER),
    Contradiction(
        "optimizer_state_dtype",
        *_NO_SHARDS,
        "the optimizer steps whole parameters then, with the state that it makes for them. Pass one of the two",
    ),
    Contradiction(
        "offload_optimizer_states",
        *_NO_SHARDS,
        "the optimizer steps whole parameters then, with the state that it makes for them. Pass one of the two",
    ),
    Contradiction(
        "store_param_remainders",
        *_NO_SHARDS,
        "every rank has whole fp32 main params then. Pass one of the two",
    ),
    Contradiction(
        "static_graph",
        "find_unused_parameters",
        False,
        "a static graph agrees once on the used parameters, the other promises that there is nothing to agree on. Pass "
        "one of the two",
    ),
)
"""All pairs of options of which an object can have one alone; the first that is found is told."""


SHARD_OPTIONS = (
    "reduce_scatter_with_fp32_accumulation",
    "grad_buffer",
    "grad_wire_dtype",
    "param_wire_dtype",
    "optimizer_state_dtype",
    "store_param_remainders",
    "offload_optimizer_states",
)
"""The options that mean nothing where an instance is one rank, which shards nothing."""

_NUMBERS = ("bucket_size", "num_distributed_optimizer_instances", "check_replicas_every_n_steps")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "grad_buffer": ("contiguous", "pooled"),
    "grad_wire_dtype": (None, "bf16", "fp16", "int8"),
    "param_wire_dtype": (None, "bf16", "int8"),
    "optimizer_state_dtype": (None, "bf16"),
}
"""The fields that are no switches."""


def _check_values(config: DistributedDataParallelConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "overlap_param_gather":
            if not isinstance(value, bool) and value not in ("step", "forward"):
                raise ValueError(f"{field.name}={value!r}: expected 'step', 'forward' or False")
        elif field.name in _CHOICES:
            if value not in _CHOICES[field.name]:
                *others, last = map(repr, _CHOICES[field.name])
                raise ValueError(f"{field.name}={value!r}: expected {', '.join(others)} or {last}")
        # All others are switches. Any string is true to Python, also the "false" of a YAML file.
        elif field.name not in _NUMBERS and not isinstance(value, bool):
            raise ValueError(f"{field.name}={value!r}: expected True or False")


def _check_numbers(config: DistributedDataParallelConfig) -> None:
    size: object = config.bucket_size
    instances = config.num_distributed_optimizer_instances
    if size is not None and not _is_positive_number(size):
        measured = ". A size is measured in runs of their own: megastrategy tune SCRIPT" if size == "auto" else ""
        raise ValueError(
            f"bucket_size={size!r}: expected a positive number of elements, or None for the default (an eighth of the "
            f"model, between 2**18 and 40 million elements){measured}"
        )
    if not _is_positive_number(instances):
        raise ValueError(
            f"num_distributed_optimizer_instances={instances!r}: expected a positive number that divides the "
            "number of ranks, or 1 for one optimizer sharded over all of them"
        )
    steps: object = config.check_replicas_every_n_steps
    if not _is_positive_number(steps) and (isinstance(steps, bool) or steps != 0):
        raise ValueError(f"check_replicas_every_n_steps={steps!r}: expected a number of steps, or 0 for never")


def _is_positive_number(value: object) -> bool:
    # To Python True is an int, so bucket_size=True would be buckets of one element.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_contradictions(config: DistributedDataParallelConfig) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for found in CONTRADICTIONS:
        value = getattr(config, found.option)
        if value != defaults[found.option] and getattr(config, found.other) == found.value:
            raise ValueError(f"{found.option}={value!r} contradicts {found.other}={found.value}: {found.why}")


def field_names() -> tuple[str, ...]:
    """The names of all configuration fields, in their order of declaration."""
    return tuple(field.name for field in dataclasses.fields(DistributedDataParallelConfig))
