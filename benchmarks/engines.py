"""The engines that are compared: each wraps the same model and the same optimizers, at its best settings for this
work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megastrategy
from megastrategy.core import Event

from .cases import Case, LanguageModel
from .peers import LR, Stepper, build_deepspeed, build_dion, build_megatron_core, build_megatron_core_layer_wise
from .recipes import RECIPES, Part

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"adamw": {}, "adamw-foreach": {"foreach": True}, "adamw-fused": {"fused": True}}
)
"""Arguments of torch.optim.AdamW. The first is torch's default, which on CPU steps one tensor at a time."""


@dataclasses.dataclass(kw_only=True)
class Engine:
    """A model that is ready to train.

    Attributes:
        model: what is called.
        optimizer: what steps.
        not_synced: a context for forward and backward of a microbatch whose gradients are only accumulated.
        settle: returns when nothing of this engine is in flight.
        close: ends its threads and groups.
        in_step_ns: time spent in the optimizer's ``step()`` so far.
        in_step_cpu_ns: of it, processor time of the thread that called it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Stepper
    not_synced: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    settle: Callable[[Tensor], None] = lambda tokens: None
    close: Callable[[], None] = lambda: None
    in_step_ns: int = 0
    in_step_cpu_ns: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine and its settings; can be sent to another process.

    Attributes:
        name: as on the command line.
        about: what it is, for the report.
        kind: which of the builders makes it.
        options: the builder's.
        dtype: of the weights, if not the case's.
        only_dtype: the dtype of the cases that it is for, if not all.
        only_recipe: their recipe, if not all.
        rounds: it sends less than it has computed, or computes otherwise, so that its losses are its own.
    """

    name: str
    about: str
    kind: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    only_dtype: str | None = None
    only_recipe: str | None = None
    rounds: bool = False

    @property
    def communicates(self) -> bool:
        """Whether the ranks train one model together."""
        return self.kind not in ("bound", "bound-sharded")

    @property
    def is_exact(self) -> bool:
        """Whether its losses have to be those of torch DDP."""
        return self.communicates and not self.rounds

    def is_for(self, case: Case) -> bool:
        """Whether anybody would expect it in this case."""
        return self.only_dtype in (None, case.dtype) and self.only_recipe in (None, case.recipe)

    def why_skipped(self, case: Case) -> str | None:
        """Why it cannot run this case here."""
        if not self.is_for(case):
            return f"is for {self.only_dtype or self.only_recipe} cases"
        if case.recipe != "adamw" and self.kind in _ONLY_ADAMW:
            return _ONLY_ADAMW[self.kind]
        if self.kind in _PACKAGES and not _is_installed(_PACKAGES[self.kind]):
            return f"{_PACKAGES[self.kind]} is not installed"
        if self.kind == "ours":
            known = {field.name for field in dataclasses.fields(megastrategy.DistributedDataParallelConfig)}
            if missing := self.options.keys() - known:
                return f"DistributedDataParallelConfig has no {', '.join(sorted(missing))}"
            try:
                megastrategy.DistributedDataParallelConfig(**self.options)
            except ValueError as error:
                return str(error)
        return None

    def build(self, case: Case, optimizer: str, listener: Callable[[Event], None] | None = None) -> Engine:
        """Makes it; all ranks together. Engines that report events report them to the listener."""
        module = case.build_model(self.dtype)
        return _BUILDERS[self.kind](module, case, OPTIMIZERS[optimizer], self.options, listener)


def _parts(module: LanguageModel, case: Case, adamw: Mapping[str, Any]) -> list[Part]:
    return RECIPES[case.recipe](module, adamw)


def _together(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | Stepper:
    """Steps all of them, one after the other."""
    if len(optimizers) == 1:
        return optimizers[0]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def zero_grad() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    return Stepper(step, zero_grad)


def _optimizers(module: LanguageModel, case: Case, adamw: Mapping[str, Any]) -> torch.optim.Optimizer | Stepper:
    return _together([part.make() for part in _parts(module, case, adamw)])


def _bound(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    return Engine(model=module, optimizer=_optimizers(module, case, adamw))


def _bound_sharded(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    """Steps what one rank of a sharded optimizer steps: whole parameters, about 1/d of the elements of each part."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shares = [part.share(rank, size) for part in _parts(module, case, adamw)]
    stepper = _together([share.make() for share in shares if share.params])
    return Engine(model=module, optimizer=Stepper(stepper.step, module.zero_grad))  # of all, not only of its share


def _ddp(module: LanguageModel, case: Case, adamw: Mapping[str, Any], options: Mapping[str, Any], *_: Any) -> Engine:
    model = TorchDDP(module, **options)
    return Engine(model=model, optimizer=_optimizers(module, case, adamw), not_synced=model.no_sync)


def _ddp_hook(
    module: LanguageModel, case: Case, adamw: Mapping[str, Any], options: Mapping[str, Any], *_: Any
) -> Engine:
    """With one of torch's communication hooks, as its documentation registers it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # PowerSGD waits for a reduction in another one's callback, so two buckets occupy both of gloo's threads for good.
    engine = _ddp(module, case, adamw, {} if options["hook"] == "fp16" else {"bucket_cap_mb": 2**16})
    assert isinstance(engine.model, TorchDDP)
    if options["hook"] == "fp16":
        engine.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        # From the second step on, the earliest that it takes: by default it begins after a thousand.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=options["rank"], start_powerSGD_iter=2)
        engine.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return engine


def _ddp_dion(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    model = TorchDDP(module)
    parts = _parts(module, case, adamw)
    optimizer = _together([build_dion(part.params) if part.kind is torch.optim.Muon else part.make() for part in parts])
    return Engine(model=model, optimizer=optimizer, not_synced=model.no_sync)


def _replicate(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    """torch's data parallelism out of FSDP2's parts, of each block and of the whole."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in module.blocks:
        replicate(block, mesh=mesh)
    root: Any = replicate(module, mesh=mesh)

    @contextlib.contextmanager
    def not_synced() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)

    return Engine(model=module, optimizer=_optimizers(module, case, adamw), not_synced=not_synced)


def _zero(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own use of torch.jit when imported

    model = TorchDDP(module, gradient_as_bucket_view=True)
    optimizers = [
        ZeroRedundancyOptimizer(part.params, part.kind, parameters_as_bucket_view=True, **part.options)
        for part in _parts(module, case, adamw)
    ]
    return Engine(model=model, optimizer=_together(optimizers), not_synced=model.no_sync)


def _fsdp2(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    """ZeRO-2-like: weights are gathered once a step. 16-bit weights have fp32 shards, as they have with us."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
        "reshard_after_forward": False,
    }
    if case.dtype == "bf16":
        module = module.float()
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in module.blocks:
        fully_shard(block, **options)
    root = fully_shard(module, **options)

    @contextlib.contextmanager
    def not_synced() -> Iterator[None]:
        def set_last(is_last: bool) -> None:
            root.set_requires_gradient_sync(is_last)
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last)

        set_last(False)
        try:
            yield
        finally:
            set_last(True)

    return Engine(model=module, optimizer=_optimizers(module, case, adamw), not_synced=not_synced)


def _read_params(model: nn.Module, tokens: Tensor) -> None:
    """A forward reads every parameter, and so waits for what is still being gathered."""
    with torch.no_grad():
        model(tokens)


def _ours(
    module: LanguageModel,
    case: Case,
    adamw: Mapping[str, Any],
    options: Mapping[str, Any],
    listener: Callable[[Event], None] | None,
) -> Engine:
    config = megastrategy.DistributedDataParallelConfig(**options)
    model = megastrategy.DistributedDataParallel(module, config, listener=listener)
    optimizers = [megastrategy.DistributedOptimizer(part.make(), model) for part in _parts(module, case, adamw)]

    def settle(tokens: Tensor) -> None:
        if config.overlap_param_gather:
            _read_params(model, tokens)

    optimizer = _together(optimizers)
    return Engine(model=model, optimizer=optimizer, not_synced=model.no_sync, settle=settle, close=model.close)


def _ours_as_registered(*arguments: Any) -> Engine:
    """Without the planner, which would move buckets to the order seen in the first backward."""
    engine = _ours(*arguments)
    assert isinstance(engine.model, megastrategy.DistributedDataParallel)
    engine.model.engine.reducer._planner = None
    return engine


def _deepspeed(
    module: LanguageModel, case: Case, adamw: Mapping[str, Any], options: Mapping[str, Any], *_: Any
) -> Engine:
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, **adamw)
    stage = options["stage"]
    model, stepper, not_last = build_deepspeed(module, stage, case.microbatch, case.accumulate, case.dtype, optimizer)
    return Engine(model=model, optimizer=stepper, not_synced=not_last)


def _megatron_core(module: LanguageModel, case: Case, *_: Any) -> Engine:
    """Its own Adam, as it is without Apex and Transformer Engine: torch's."""
    model, stepper, not_synced = build_megatron_core(module, case.dtype)
    return Engine(model=model, optimizer=stepper, not_synced=not_synced, settle=functools.partial(_read_params, model))


def _megatron_core_layer_wise(module: LanguageModel, case: Case, adamw: Mapping[str, Any], *_: Any) -> Engine:
    optimizers = [part.make() for part in _parts(module, case, adamw)]
    model, stepper, not_synced = build_megatron_core_layer_wise(module, optimizers)
    return Engine(model=model, optimizer=stepper, not_synced=not_synced)


_BUILDERS: Mapping[str, Callable[..., Engine]] = MappingProxyType(
    {
        "bound": _bound,
        "bound-sharded": _bound_sharded,
        "ddp": _ddp,
        "ddp-hook": _ddp_hook,
        "ddp-dion": _ddp_dion,
        "replicate": _replicate,
        "zero": _zero,
        "fsdp2": _fsdp2,
        "deepspeed": _deepspeed,
        "megatron-core": _megatron_core,
        "megatron-core-layer-wise": _megatron_core_layer_wise,
        "ours": _ours,
        "ours-as-registered": _ours_as_registered,
    }
)
_PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed": "deepspeed",
        "megatron-core": "megatron.core",
        "megatron-core-layer-wise": "megatron.core",
        "ddp-dion": "dion",
    }
)
"""Names what has to be installed, by kind."""
_ONLY_ADAMW: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed": "its ZeRO hands an optimizer flat parts of parameters, and torch.optim.Muon takes matrices",
        "megatron-core": "it refuses Muon with its distributed optimizer, and cannot be given torch's",
    }
)
"""Says why an engine trains with AdamW alone, by kind."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in is missing
        return False


def ours(name: str, about: str, **options: Any) -> EngineSpec:
    """This engine with other options than the default ones."""
    only, rounds = options.pop("only_dtype", None), options.pop("rounds", False)
    about = f"megastrategy, {about}"
    return EngineSpec(name=name, about=about, kind="ours", options=options, only_dtype=only, rounds=rounds)


BASELINE = "ddp"
_SPECS = (
    EngineSpec(name="bound", about="no communication: the plain module", kind="bound"),
    EngineSpec(name="bound-sharded", about="no communication, and 1/d of the optimizer step", kind="bound-sharded"),
    EngineSpec(
        name="bound-fp32", about="no communication, fp32 weights", kind="bound", dtype="fp32", only_dtype="bf16"
    ),
    EngineSpec(name="ddp", about="torch DDP", kind="ddp"),
    EngineSpec(
        name="ddp-view",
        about="torch DDP, gradient_as_bucket_view=True",
        kind="ddp",
        options={"gradient_as_bucket_view": True},
    ),
    EngineSpec(name="ddp-fp32", about="torch DDP, fp32 weights", kind="ddp", dtype="fp32", only_dtype="bf16"),
    EngineSpec(
        name="ddp-static",
        about="torch DDP, static graph, bucket views",
        kind="ddp",
        options={"static_graph": True, "gradient_as_bucket_view": True},
    ),
    EngineSpec(
        name="ddp-batched-copy",
        about="torch DDP, batched_grad_copy=True",
        kind="ddp",
        options={"batched_grad_copy": True},
    ),
    EngineSpec(
        name="ddp-fp16-hook",
        about="torch DDP, fp16_compress_hook",
        kind="ddp-hook",
        options={"hook": "fp16"},
        only_dtype="fp32",
        rounds=True,
    ),
    EngineSpec(
        name="ddp-powersgd",
        about="torch DDP, powerSGD_hook of rank 1",
        kind="ddp-hook",
        options={"hook": "powersgd", "rank": 1},
        only_dtype="fp32",
        rounds=True,
    ),
    EngineSpec(name="ddp-dion", about="torch DDP + Dion's Muon", kind="ddp-dion", only_recipe="muon", rounds=True),
    EngineSpec(name="replicate", about="replicate of FSDP2's parts", kind="replicate"),
    EngineSpec(name="zero", about="torch DDP + ZeroRedundancyOptimizer", kind="zero"),
    EngineSpec(name="fsdp2", about="FSDP2, reshard_after_forward=False", kind="fsdp2"),
    EngineSpec(name="deepspeed-1", about="DeepSpeed ZeRO-1", kind="deepspeed", options={"stage": 1}),
    EngineSpec(name="deepspeed-2", about="DeepSpeed ZeRO-2", kind="deepspeed", options={"stage": 2}),
    EngineSpec(name="megatron-core", about="Megatron-core DDP + distributed optimizer", kind="megatron-core"),
    EngineSpec(
        name="megatron-core-layer-wise",
        about="Megatron-core DDP + layer-wise optimizer",
        kind="megatron-core-layer-wise",
        only_dtype="fp32",
        only_recipe="muon",
    ),
    ours("ours", "default"),
    ours("ours-all-reduce", "not sharded", use_distributed_optimizer=False),
    ours("ours-gather-forward", "gather under the forward", overlap_param_gather=True),
    ours("ours-pooled", "pooled gradient buffers", grad_buffer="pooled"),
    ours("ours-16-bit-grads", "gradients sent in bf16", grad_wire_dtype="bf16", only_dtype="fp32", rounds=True),
    ours(
        "ours-16-bit-grads-forward",
        "gradients sent in bf16, gather under the forward",
        grad_wire_dtype="bf16",
        overlap_param_gather=True,
        only_dtype="fp32",
        rounds=True,
    ),
    EngineSpec(
        name="ours-as-registered",
        about="megastrategy, buckets in the order of registration",
        kind="ours-as-registered",
    ),
    ours("ours-bf16-wire", "gradients in bf16", grad_reduce_in_fp32=False, only_dtype="bf16"),
    ours(
        "ours-bf16-wire-fp32-sum",
        "bf16 on the wire, summed in fp32",
        grad_reduce_in_fp32=False,
        reduce_scatter_with_fp32_accumulation=True,
        only_dtype="bf16",
    ),
)
ENGINES: Mapping[str, EngineSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
