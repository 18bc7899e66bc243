"""One rank that writes or loads checkpoints: a program, run with the package of either commit on its path.

It imports no helper of the tests: those of the other commit are different ones.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import host_collectives, names_elsewhere
from megastrategy.pipeline import Pipeline, load_whole_state_dict, whole_state_dict

VOCAB, WIDTH = 31, 12
BEFORE, AFTER = range(3), range(3, 5)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Biases before matrices, and an empty group."""
    every = list(params)
    biases, matrices = [p for p in every if p.dim() < 2], [p for p in every if p.dim() > 1]
    groups = [{"params": biases, "lr": 3e-3}, {"params": matrices}, {"params": []}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adafactor(params: Any) -> torch.optim.Optimizer:
    """Steps whole parameters."""
    return torch.optim.Adafactor(params, lr=1e-2)


BF16 = torch.bfloat16

KINDS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "Adam": (adamw, torch.float32, {}),
    "SGD": (sgd, torch.float32, {}),
    "Adam, all-reduce": (adamw, torch.float32, {"use_distributed_optimizer": False}),
    "Adam, pooled": (adamw, torch.float32, {"grad_buffer": "pooled"}),
    "Adam, bf16": (adamw, BF16, {}),
    "SGD, bf16": (sgd, BF16, {}),
    "Adam, bf16, all-reduce": (adamw, BF16, {"use_distributed_optimizer": False}),
    "Adam, state offloaded": (adamw, torch.float32, {"offload_optimizer_states": True}),
    "Adafactor": (adafactor, torch.float32, {}),
    "Adafactor, bf16": (adafactor, BF16, {}),
}
"""By name: optimizer, dtype of the weights, options."""

WRITERS = {2: [("plain", 1), ("tensor", 2), ("pipeline", 2)], 4: [("tensor", 2), ("pipeline", 2)]}
"""By number of ranks: the families, and how many ranks have parts of the model; the others are data-parallel."""


def kinds_of(family: str, dp_size: int) -> list[str]:
    """Adafactor needs whole parameters, and tensor ranks have parts."""
    return [name for name in KINDS if family != "tensor" or not name.startswith("Adafactor")]


class Block(nn.Module):
    """A norm and a residual layer of a width of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_layers(dtype: torch.dtype, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    layers = [nn.Embedding(VOCAB, WIDTH), Block(18), Block(24), Block(30), head]
    layers[2].norm.requires_grad_(False)  # type: ignore[operator] # a module
    return [layer.to(dtype) for layer in layers]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def full(value: Any) -> Any:
    """Copies a nested state, each DTensor as its full tensor. Collective."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return [full(item) for item in value] if isinstance(value, list) else value


@dataclasses.dataclass
class Training:
    """A model of one kind on all ranks: ``parts`` of them have parts of it, the others are data-parallel."""

    family: str
    name: str
    parts: int
    seed: int = 7

    def __post_init__(self) -> None:
        make_optimizer, dtype, options = KINDS[self.name]
        layers = make_layers(dtype, self.seed)
        dims = {"plain": ("dp", "parts"), "tensor": ("dp", "parts"), "pipeline": ("parts", "dp")}[self.family]
        sizes = {"parts": self.parts, "dp": dist.get_world_size() // self.parts}
        mesh = init_device_mesh("cpu", tuple(sizes[name] for name in dims), mesh_dim_names=dims)
        self.dp_rank = mesh.get_local_rank("dp")
        self.module: nn.Module = nn.Sequential(*layers)
        if self.family == "tensor":
            plan = {"0": RowwiseParallel(input_layouts=Replicate()), "4": ColwiseParallel(output_layouts=Replicate())}
            plan |= {f"{place}.up": ColwiseParallel() for place in (1, 2, 3)}
            plan |= {f"{place}.down": RowwiseParallel() for place in (1, 2, 3)}
            parallelize_module(self.module, mesh["parts"], plan)
        elif self.family == "pipeline":
            split = {1: (5,), 2: (2, 3), 3: (2, 1, 2)}[self.parts]
            self.module = Pipeline(layers, split, loss=loss_of, microbatches=2, mesh=mesh["parts"])
        config = DistributedDataParallelConfig(bucket_size=500, **options)
        self.model = DistributedDataParallel(self.module, config, process_group=mesh.get_group("dp"))
        self.optimizer = DistributedOptimizer(make_optimizer(self.module.parameters()), self.model)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * self.dp_rank + step)
            tokens = torch.randint(VOCAB, (4, 6), generator=generator)
            targets = tokens.roll(-1, 1)
            if isinstance(self.module, Pipeline):
                loss = self.model(tokens, target=targets)
            else:
                loss = loss_of(self.model(tokens), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.model.finish_param_gather()

    def state(self) -> dict[str, Any]:
        """The full state; on rank 0 all of it."""
        module = self.module
        weights = whole_state_dict(module) if isinstance(module, Pipeline) else dict(module.state_dict())
        main_params = full(self.optimizer.main_params())
        return {"weights": full(weights), "optimizer": full(self.optimizer.state_dict()), "main_params": main_params}

    def load_file(self, saved: dict[str, Any]) -> None:
        if isinstance(self.module, Pipeline):
            load_whole_state_dict(self.module, saved["weights"])
        elif self.family == "tensor":
            weights = dict(saved["weights"])  # in which torch puts DTensors
            set_model_state_dict(self.module, weights, options=StateDictOptions(full_state_dict=True))
        else:
            self.module.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.load_main_params(saved["main_params"])

    def save_directory(self, path: Path) -> None:
        try:
            from megastrategy._checkpoints.directory_writer import save_directory
        except ImportError:  # where it was before core had folders
            from megastrategy.core import save_directory  # type: ignore[attr-defined, no-redef]
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.sharded_state_dict()}
        save_directory(state, {}, path, host_collectives())

    def load_directory(self, path: Path) -> None:
        from megastrategy.core import OpenDirectory

        opened = OpenDirectory(path)
        elsewhere = names_elsewhere(self.module)
        self.module.load_state_dict(opened.read_weights("model", self.module, elsewhere))
        self.optimizer.load_sharded(path)


def save_torch(value: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
    dist.barrier()


def write(folder: Path) -> None:
    """Writes the checkpoints of every kind, and the state after two more steps."""
    size = dist.get_world_size()
    for family, parts in WRITERS[size]:
        for name in kinds_of(family, size // parts):
            path = folder / f"{family} {size} {parts}" / name
            training = Training(family, name, parts)
            training.train(BEFORE)
            save_torch(training.state(), path / "file")
            training.save_directory(path / "directory")
            training.train(AFTER)
            save_torch(training.state(), path / "trained")
            training.model.close()


def load(folder: Path) -> None:
    """Loads each with these ranks, as parts and as data-parallel ranks, and compares on rank 0; writes a line each."""
    size = dist.get_world_size()
    for written_by, writers in WRITERS.items():
        for family, written_parts in writers:
            numbers_of_parts = {1} if family == "plain" else {written_parts} if size == 4 else {1, size}
            for parts in sorted(numbers_of_parts):
                for name in kinds_of(family, written_by // written_parts):
                    path = folder / f"{family} {written_by} {written_parts}" / name
                    is_same = (size, parts) == (written_by, written_parts)
                    differences = load_one(path, family, name, parts, is_same=is_same)
                    if dist.get_rank() == 0:
                        said = "; ".join(differences[:3]) or "equal"
                        ranks = f"dp {written_by // written_parts} x {written_parts} -> {size // parts} x {parts}"
                        sys.stdout.write(f"{family}, {ranks}, {name}: {said}\n")


def load_one(path: Path, family: str, name: str, parts: int, *, is_same: bool) -> list[str]:
    """Loads the file and the directory; trains on if the ranks are the same. Returns the differences."""
    differences = list[str]()
    for kind in ("file", "directory"):
        # read for each: torch's optimizers go on with the tensors that they are given
        saved, expected = (torch.load(path / "file", weights_only=True) for _ in range(2))
        training = Training(family, name, parts, seed=8)
        training.load_file(saved) if kind == "file" else training.load_directory(path / kind)
        differences += compare(training.state(), expected, kind)
        if is_same:
            training.train(AFTER)
            trained = torch.load(path / "trained", weights_only=True)
            differences += compare(training.state(), trained, f"{kind}, trained on")
        training.model.close()
    return differences


def compare(actual: Any, expected: Any, where: str) -> list[str]:
    """The differences in structure, in dtypes, or in any bit; none on ranks other than 0."""
    if dist.get_rank() != 0:
        return []
    if isinstance(expected, dict) and isinstance(actual, dict):
        if set(actual) != set(expected):
            return [f"{where}: keys {sorted(map(str, set(actual) ^ set(expected)))} are in one of the two"]
        return [text for key in expected for text in compare(actual[key], expected[key], f"{where}/{key}")]
    if isinstance(expected, list | tuple) and type(actual) is type(expected) and len(actual) == len(expected):
        return [
            text
            for place, (a, b) in enumerate(zip(actual, expected, strict=True))
            for text in compare(a, b, f"{where}/{place}")
        ]
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        same = actual.dtype == expected.dtype and actual.shape == expected.shape
        bits = [value.contiguous().flatten().view(torch.uint8) for value in (actual, expected)]
        return [] if same and torch.equal(*bits) else [f"{where}: other values"]
    return [] if type(actual) is type(expected) and actual == expected else [f"{where}: {actual!r}, not {expected!r}"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # each wrap and close collects garbage, and would walk through all that is imported
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    {"write": write, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
