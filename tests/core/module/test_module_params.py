"""The parameters and buffers that are reduced and broadcast are torch DDP's, whatever a module says of itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import engines
from tests.support.ranks import run_ranks

ENGINES = {
    **engines("reduce-scatter", bucket_size=1),
    **engines("pooled"),
    **engines("all-reduce", bucket_size=1),
    **engines("forward"),
}


# It works still, and so do modules that were saved so.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")


def every_param(module: nn.Module) -> list[nn.Parameter]:
    return [param for _, param in nn.Module.named_parameters(module)]


def filled(module: nn.Module, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in every_param(module):
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.body(x)))) * self.scale
        return out


class OldSignature(Net):
    """As a LightningModule that leaves its callbacks' parameters out."""

    def named_parameters(  # type: ignore[override]
        self, with_callbacks: bool = True, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix=prefix, recurse=recurse)

    def parameters(self, with_callbacks: bool = True, recurse: bool = True) -> Iterator[nn.Parameter]:  # type: ignore[override]
        yield from (param for _, param in self.named_parameters(with_callbacks, recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        yield from super().named_buffers(prefix=prefix, recurse=recurse)


class HidesItsHead(Net):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from (pair for pair in super().named_parameters(*args, **kwargs) if not pair[0].startswith("head"))


class ScriptsItsBody(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(Net())
    return made


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(
    module: Any, rank: int, group: ProcessGroup, options: Mapping[str, Any] | None, steps: int = 3, lr: float = 0.1
) -> tuple[Any, Any]:
    """The module after some steps of SGD on all of its parameters: the wrapped model and its optimizer."""
    inner = torch.optim.SGD(every_param(module), lr=lr, momentum=0.9)
    if options is None:
        model: Any = TorchDDP(module, process_group=group)
        optimizer: Any = inner
    else:
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(inner, model)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def weights(module: nn.Module) -> list[Tensor]:
    return [
        tensor.detach().clone() for tensor in (*every_param(module), *dict(nn.Module.named_buffers(module)).values())
    ]


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        (OldSignature, 2, ENGINES["reduce-scatter"]),
        (scripted, 2, ENGINES["reduce-scatter"]),
        (ScriptsItsBody, 2, ENGINES["forward"]),
        (HidesItsHead, 2, ENGINES["pooled"]),
    ],
)
def test_modules_hide_no_params(kind: Callable[[], nn.Module], size: int, options: Mapping[str, Any]) -> None:
    made = [[filled(kind()) for _ in range(size)] for _ in range(2)]  # scripting is not for threads

    def run(rank: int, group: ProcessGroup, options: Mapping[str, Any] | None) -> list[Tensor]:
        module = made[options is None][rank]
        model, optimizer = trained(module, rank, group, options)
        if options is not None:
            optimizer.state_dict()
            model.close()
        return weights(module)

    theirs = run_ranks(size, lambda rank, group: run(rank, group, None))
    ours = run_ranks(size, lambda rank, group: run(rank, group, options))
    for mine, reference in zip(ours, theirs, strict=True):
        # torch.jit fuses a function after a few calls, and rounds otherwise then.
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5 if kind is scripted else 0.0)


# --- _ddp_params_and_buffers_to_ignore -------------------------------------------------------------------------------


class Own(nn.Module):
    """A table of each rank's own length, a tensor that two names share, and a buffer."""

    seen: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((3 + rank,), 1.0 + rank))
        self.register_buffer("seen", torch.zeros(2) + rank)


class HasItsOwn(Net):
    def __init__(self, rank: int, *ignored: str) -> None:
        super().__init__()
        self.own = Own(rank)
        self._ddp_params_and_buffers_to_ignore = ["own.table", "own.seen", *ignored]

    def forward(self, x: Tensor) -> Tensor:
        self.own.seen += x.detach().mean()
        return super().forward(x) + self.own.table.square().sum()


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(2, ENGINES["reduce-scatter"], id="2-reduce-scatter"),
        pytest.param(2, ENGINES["all-reduce"], id="2-all-reduce"),
        pytest.param(2, ENGINES["forward"], id="2-forward"),
        pytest.param(1, ENGINES["pooled"], id="1-pooled"),
    ],
)
def test_ignored_params_stay_local(size: int, options: Mapping[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup, options: Mapping[str, Any] | None) -> list[Tensor]:
        module = HasItsOwn(rank)
        filled(module.body)
        filled(module.head)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, _ = trained(module, rank, group, options)
        if options is not None:
            model.check_replicas()
            module.own.table.requires_grad_(False)
            model(batch(rank, 7)).sum().backward()
            module.own.table.requires_grad_(True)
            model(batch(rank, 8)).sum().backward()
            assert len(model.layout.params) == len(list(module.parameters())) - 1
            model.close()
        else:
            model(batch(rank, 7))
            model(batch(rank, 8))
        return weights(module)

    theirs = run_ranks(size, lambda rank, group: run(rank, group, None))
    ours = run_ranks(size, lambda rank, group: run(rank, group, options))
    for mine, reference in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, reference))
    assert size == 1 or (ours[0][1].shape != () and not torch.equal(ours[0][-1], ours[1][-1]))


def wrapped(
    module: nn.Module, params: list[nn.Parameter], group: ProcessGroup, options: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    inner = torch.optim.Adam(params, lr=0.1)
    if options is None:
        return TorchDDP(module, process_group=group), inner
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
    return model, DistributedOptimizer(inner, model)


@pytest.mark.parametrize(
    ("size", "options", "loaded"),
    [
        pytest.param(2, ENGINES["reduce-scatter"], "at once", id="2-reduce-scatter-at once"),
        pytest.param(2, ENGINES["forward"], "at once", id="2-forward-at once"),
        pytest.param(1, ENGINES["pooled"], "before a step", id="1-pooled-before a step"),
        pytest.param(2, ENGINES["all-reduce"], "anew", id="2-all-reduce-anew"),
    ],
)
def test_ignored_params_load_state_of_their_rank(size: int, options: Mapping[str, Any], loaded: str) -> None:
    """In tables of other lengths; of all ranks only the last steps the one that comes first."""

    def run(rank: int, group: ProcessGroup, options: Mapping[str, Any] | None) -> list[Tensor]:
        module = HasItsOwn(rank, "late", ".late")
        filled(module.body)
        filled(module.head)
        module.register_parameter("late", nn.Parameter(torch.ones(2)))
        params = [module.late, *(param for param in module.parameters() if param is not module.late)]
        [number] = [number for number, param in enumerate(params) if param is module.own.table]
        model, optimizer = wrapped(module, params, group, options)
        kept: list[Tensor] = []
        for step in range(4):
            if step == (0 if loaded == "before a step" else 2):
                saved = copy.deepcopy(optimizer.state_dict())
                if loaded == "anew":
                    getattr(model, "close", int)()
                    model, optimizer = wrapped(module, params, group, options)
                optimizer.load_state_dict(saved)
                kept += [value.clone() for value in saved["state"].get(number, {}).values()]
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean()
            (loss if rank < size - 1 else loss + module.late.sum()).backward()
            optimizer.step()
        getattr(model, "close", int)()  # torch's has none
        return [*weights(module), *kept]

    theirs = run_ranks(size, lambda rank, group: run(rank, group, None))
    ours = run_ranks(size, lambda rank, group: run(rank, group, options))
    for mine, reference in zip(ours, theirs, strict=True):
        assert len(mine) == len(reference)
        for found, expected in zip(mine, reference, strict=True):
            torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["scale", ".scale"])
def test_half_ignored_name_is_refused(name: str) -> None:
    module = Net()
    module._ddp_params_and_buffers_to_ignore = [name]

    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"has one of 'scale'.* and '\.scale'.*list both, or none"):
            DistributedDataParallel(module, process_group=group)

    run_ranks(1, run)


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "is_frozen", "size", "options"),
    [
        (("allreduce", False), False, 2, ENGINES["reduce-scatter"]),  # Megatron's, and DeepSpeed's
        (("allreduce", 0), True, 1, ENGINES["pooled"]),
        (("expert", True), False, 2, ENGINES["all-reduce"]),  # fairscale's
        (("skip_allreduce", True), True, 2, ENGINES["forward"]),  # Tutel's
        (("expert_model_parallel", True), False, 2, ENGINES["reduce-scatter"]),
    ],
)
def test_param_marked_as_expert_is_refused(
    mark: tuple[str, Any], is_frozen: bool, size: int, options: Mapping[str, Any]
) -> None:
    """With both ways out. On one rank it is neither replaced nor averaged; unmarked, or ignored, it is no expert's."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = filled(Net(), seed=rank)
        before = module.head.weight.detach().clone()
        setattr(module.head.weight, *mark)
        module.head.weight.requires_grad_(not is_frozen)
        config = DistributedDataParallelConfig(**options)
        if size > 1:
            lines = (
                r"(?s)'head\.weight' is marked as an expert's.*mesh = init_device_mesh\(device_type, \(dp, ep\).*"
                r"module\.head\.weight = nn\.Parameter\(DTensor\.from_local\(module\.head\.weight\.data, .*"
                r"_ddp_params_and_buffers_to_ignore = \['head\.weight', "
            )
            with pytest.raises(ValueError, match=lines):
                DistributedDataParallel(module, config, group)
            assert torch.equal(module.head.weight, before)
            module._ddp_params_and_buffers_to_ignore = ["head.weight"]
        model = DistributedDataParallel(module, config, group)
        model(batch(rank, 0)).sum().backward()
        model.close()
        assert torch.equal(module.head.weight, before)
        module.body.weight.allreduce = True  # what both set on all others
        DistributedDataParallel(module, config, group).close()

    run_ranks(size, run)


# gloo sends none of the first seven itself.
NARROW = (
    *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
)


@pytest.mark.parametrize(("options", "size"), [({}, 1), ({"use_distributed_optimizer": False}, 2)], ids=str)
def test_frozen_params_of_every_dtype_are_broadcast(options: dict[str, Any], size: int) -> None:
    """As a quantised model has them."""

    def run(rank: int, group: ProcessGroup) -> None:
        values = torch.tensor([[1.0 + rank, 0.0], [2.0, 4.0 * rank]])
        module = nn.Linear(3, 2)
        for number, dtype in enumerate(NARROW):
            module.register_parameter(f"param_{number}", nn.Parameter(values.to(dtype).T, requires_grad=False))
            module.register_buffer(f"buffer_{number}", values.to(dtype)[0, 0])
        config = DistributedDataParallelConfig(**options)
        model = DistributedDataParallel(module, config, process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        for number, dtype in enumerate(NARROW):
            expected = torch.tensor([[1.0, 0.0], [2.0, 0.0]]).to(dtype)
            assert module.get_parameter(f"param_{number}").tolist() == expected.T.tolist(), dtype
            assert module.get_buffer(f"buffer_{number}").tolist() == expected[0, 0].tolist(), dtype

    run_ranks(size, run)
