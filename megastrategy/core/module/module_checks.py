"""Describes a module's parameters to the layout, and raises errors for those that cannot be laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..collectives import Collectives, descriptions_if_different, first_difference_error
from ..config import DistributedDataParallelConfig
from ..layout import CHUNKS_HEADING, SIXTEEN_BIT_DTYPES, BufferLayout, ChunkPlace, ParamSpec, build_layout, dense_stride
from .local_parts import LocalParts
from .module_params import IGNORED, named_buffers, named_params


def check_module(module: nn.Module, own: type[nn.Module]) -> None:
    """Raises ValueError for a submodule that is a wrapper: torch DDP's, or one of class ``own`` that is not closed."""
    for name, child in module.named_modules():
        what = f"the submodule {name!r}" if name else "the module"
        if isinstance(child, own) and not getattr(child, "is_closed", True):
            raise ValueError(
                f"{what} is wrapped already, and one wrapper reduces a parameter: put the module that it wraps (its "
                ".module) in its place"
            )
        # A wrapper of ours is an instance of both classes, and torch's reducer is not in it.
        if isinstance(child, TorchDDP) and not isinstance(child, own):
            raise ValueError(
                f"{what} is a DistributedDataParallel of torch's, which would reduce the gradients of its parameters "
                "too. Put the module that it wraps (its .module) in its place, or train with torch's alone"
            )


def check_not_inside_torch_ddp(model: nn.Module) -> None:
    """Raises ValueError if ``model`` is called inside of a module that torch DDP wraps: both would reduce.

    To be called in a forward: when the model is wrapped, that module does not exist yet.
    """
    outer = TorchDDP._active_ddp_module  # the torch DDP whose forward is running, or a GraphSplits
    if isinstance(outer, nn.Module) and any(child is model for child in outer.modules()):
        raise ValueError(
            f"this model is inside a DistributedDataParallel of torch's (around a {type(outer.module).__name__}), and "
            "both would reduce its gradients. Leave one out: train with this one alone, around the whole module, or "
            "give torch's the plain module (model.close(), then model.module)"
        )


_MARKS_OF_EXPERTS = {
    "allreduce": False,
    "is_expert": True,
    "expert": True,
    "skip_allreduce": True,
    "expert_model_parallel": True,
}
"""The attributes by which Megatron-LM and DeepSpeed, Megatron-LM's layers, fairscale and Tutel mark the parameters of
experts, which differ between ranks. DeepSpeed reads ``not param.allreduce``, so that a 0 is a mark."""


def check_no_experts(named: Mapping[str, Parameter], parts: LocalParts) -> None:
    """Raises ValueError for a parameter that is marked as an expert's and is no DTensor.

    Rank 0's would replace it on all ranks, and gradients of different experts would be averaged.
    """
    for name, param in named.items():
        given = {mark: getattr(param, mark, None) for mark in _MARKS_OF_EXPERTS}
        found = [
            f"{mark} = {value}"
            for mark, value in given.items()
            if isinstance(value, int) and bool(value) is _MARKS_OF_EXPERTS[mark]
        ]
        if not found or parts.local_view(param) is not param:
            continue
        group = getattr(param, "group_name", None)
        if group is not None:
            found.append(f"group_name = {group!r}")
        holder, _, key = name.rpartition(".")
        place = f"module.{holder}" if holder else "module"
        raise ValueError(
            f"parameter {name!r} is marked as an expert's ({', '.join(found)}), which differ between ranks: it would "
            "become rank 0's on all ranks, and be averaged. Make it a part of one tensor of all experts, "
            "on a mesh beside the data-parallel ranks:\n"
            '    mesh = init_device_mesh(device_type, (dp, ep), mesh_dim_names=("dp", "ep"))\n'
            f'    {place}.{key} = nn.Parameter(DTensor.from_local({place}.{key}.data, mesh["ep"], [Shard(0)]))\n'
            'and pass process_group=mesh.get_group("dp"). Or leave it to its rank, which then reduces it by itself: '
            f"module.{IGNORED} = [{name!r}, ...]. If all ranks have the same, remove the mark"
        )


def check_no_renormed_rows(module: nn.Module, params: Sequence[Parameter], all_reduce_option: str) -> None:
    """Raises ValueError for an embedding whose forward writes rows of a weight among ``params``, on this rank only.

    ``all_reduce_option`` is the remedy in the message.
    """
    joining = {id(param) for param in params}
    for name, child in module.named_modules():
        if (
            isinstance(child, nn.Embedding | nn.EmbeddingBag)
            and id(child.weight) in joining
            and child.max_norm is not None
        ):
            raise ValueError(
                f"the embedding {name!r} has max_norm={child.max_norm}: its forward writes the rows that this rank "
                "looks up, and a shard keeps its owner's. Leave max_norm out, and call "
                f"torch.renorm(weight, {child.norm_type}, 0, {child.max_norm}) on all ranks after each step; or pass "
                f"{all_reduce_option}: ranks then keep their own rows, as under torch DDP"
            )


NOT_IN_BUFFER = (
    "where other processes may read it (share_memory(), or the module was passed to a process): parameters of a "
    "sharded optimizer move into a buffer, and readers would see old values. Give other processes a copy of the module"
)


def is_in_shared_memory(part: Tensor) -> bool:
    """Whether other processes may have a tensor's memory. torch says so of all memory of an accelerator."""
    return part.device.type == "cpu" and part.layout == torch.strided and part.untyped_storage().is_shared()


def check_memory_is_own(
    module: nn.Module, params: Sequence[Parameter], parts: LocalParts, all_reduce_option: str
) -> None:
    """Raises ValueError if other tensors, processes or a CUDA graph use the memory of ``params``, which move into a
    buffer.

    ``all_reduce_option`` is the remedy in the message.
    """
    joining = {id(param) for param in params}
    spans: list[tuple[int, int, str, bool]] = []
    for name, whole in (*named_params(module).items(), *named_buffers(module).items()):
        tensor = parts.local_view(whole)
        if id(whole) in joining and is_in_shared_memory(tensor):
            raise ValueError(f"parameter {name!r} is in shared memory, {NOT_IN_BUFFER}, or pass {all_reduce_option}")
        if tensor.numel() > 0 and tensor.layout == torch.strided:
            # The last element by strides: an expanded tensor has less memory than elements.
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name, id(whole) in joining))
    captured = captured_modules(module, params)
    if captured:
        which = repr(captured[0]) if captured[0] else "the module itself"
        raise ValueError(
            f"{which} was captured by make_graphed_callables: its CUDA graph reads the parameters at their present "
            "addresses, and they move into a buffer. Wrap first, train on a stream of your own (with "
            "torch.cuda.stream(torch.cuda.Stream()):), and capture there after the first optimizer step, or pass "
            f"{all_reduce_option}"
        )
    furthest: dict[bool, tuple[int, str]] = {}  # where memory of tensors that move, and that stay, ends
    # Sorted by address, one pass: comparing every pair would take seconds for thousands of parameters.
    for start, end, name, moves in sorted(spans):
        for other_moves, (reach, other) in furthest.items():
            # Two tensors that stay may share memory; if either moves, they would be separated.
            if start < reach and (moves or other_moves):
                raise ValueError(
                    f"{other!r} and {name!r} share memory without being the same Parameter, and would part when "
                    "parameters move into the buffer. Tie them by assigning the Parameter itself (b.weight = "
                    f"a.weight), give each its own memory, or pass {all_reduce_option}"
                )
        furthest[moves] = max(furthest.get(moves, (0, "")), (end, name))


def captured_modules(module: nn.Module, params: Sequence[Parameter]) -> list[str]:
    """Returns the names of submodules with any of ``params`` that ``torch.cuda.make_graphed_callables`` has captured.

    Transformer Engine's function of that name is found too. A graph that user code captures itself leaves no trace.
    """
    wanted = {id(param) for param in params}
    return [
        name
        for name, child in module.named_modules()
        # Its only trace is a closure on the instance.
        if ".make_graphed_forward." in getattr(vars(child).get("forward"), "__qualname__", "")
        and any(id(param) in wanted for param in child.parameters())
    ]


def param_spec(
    name: str, part: Tensor, config: DistributedDataParallelConfig, chunk: ChunkPlace | None = None
) -> ParamSpec:
    """Returns the layout's description of a parameter, or of this rank's part of it."""
    grad_dtype = torch.float32 if part.dtype in SIXTEEN_BIT_DTYPES and config.grad_reduce_in_fp32 else part.dtype
    stride = dense_stride(part.shape, part.stride())
    return ParamSpec(name, tuple(part.shape), stride, part.dtype, grad_dtype, chunk)


def common_device(named: Mapping[str, Parameter]) -> torch.device:
    """Returns the device of all these parameters, the CPU if there are none.

    Raises:
        ValueError: if they are on several devices, on meta, or not initialised.
    """
    device: torch.device | None = None
    first = ""
    for name, param in named.items():
        # Without a shape it has no offset, and on meta it has no memory to move.
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is uninitialised: run one forward (dry run) before wrapping")
        if param.device.type == "meta":
            raise ValueError(f"parameter {name!r} is on the meta device: materialise the module before wrapping")
        if device is None:
            device = param.device
            first = name
        # A buffer is one allocation, and a group's collectives run on one device.
        if param.device != device:
            raise ValueError(
                f"parameters are on several devices ({first!r} on {device}, {name!r} on {param.device}): one device "
                "a rank is expected; move the module to one before wrapping"
            )
    return device or torch.device("cpu")


def agree_on_layout(
    layout: BufferLayout,
    config: DistributedDataParallelConfig,
    collectives: Collectives,
    buffers: Mapping[str, Tensor],
) -> BufferLayout:
    """Returns the layout; one without chunks of weights if only some ranks have chunks. Collective.

    ``buffers``: those of the module that are to become rank 0's.

    Raises:
        LayoutMismatchError: on all ranks, if their layouts, options or buffers differ otherwise.
    """
    # A buffer with an entry for each expert of this rank has another size where ranks have other numbers of experts.
    rows: list[list[object]] = [[name, list(buffer.shape), str(buffer.dtype)] for name, buffer in buffers.items()]
    options = {"option (name, value)": option_rows(config), "buffer (name, shape, dtype)": rows}
    description = {**layout.describe(), **options}
    descriptions = descriptions_if_different(description, collectives)
    if descriptions is None:
        return layout
    # Chunks depend on the addresses of weights: a rank that has loaded each into memory of its own has no chunks.
    if any(theirs[CHUNKS_HEADING] != description[CHUNKS_HEADING] for theirs in descriptions):
        specs = [dataclasses.replace(spec, chunk=None) for spec in layout.params]
        return agree_on_layout(build_layout(specs, config, layout.dp_size), config, collectives, buffers)
    raise first_difference_error(descriptions)


def option_rows(config: DistributedDataParallelConfig) -> list[list[object]]:
    """Returns the names and values of all options, for the comparison between ranks."""
    return [[field.name, getattr(config, field.name)] for field in dataclasses.fields(config)]
