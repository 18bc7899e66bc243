"""Trains a small byte-level GPT on a mesh of data-parallel and tensor ranks, in a plain loop.

    torchrun --nproc-per-node 4 examples/tensor_parallel_gpt.py                # 2 x 2
    torchrun --nproc-per-node 4 examples/tensor_parallel_gpt.py --tp 4         # 1 x 4
    torchrun --nproc-per-node 1 examples/tensor_parallel_gpt.py --tp 1         # the same losses, in one process

The embedding, the head and the loss are cut over the vocabulary, attention over its heads, and norms over the sequence.
All of that is torch's; megastrategy's are the three lines in ``main`` that wrap the model and the optimizer. Writes
OUT/losses.csv, and OUT/last.pt, whose weights and optimizer state are whole: any mesh resumes from it.
"""

from __future__ import annotations

import argparse
import csv
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

VOCABULARY, CONTEXT, WIDTH, HEAD_WIDTH, DEPTH = 256, 64, 64, 16, 2


class Attention(nn.Module):
    """Causal attention; it has as many heads as its layers' outputs are wide, so a tensor rank has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP over (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT with rotating positions left out: an embedding of positions does for a context of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes -> (batch, time, VOCABULARY) logits."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parallelize(module: GPT, mesh: DeviceMesh) -> None:
    """Cuts the model over the tensor ranks. Between layers each rank has a part of the sequence."""
    along = Shard(1)
    parallelize_module(
        module,
        mesh,
        {
            "bytes": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(input_layouts=along, desired_input_layouts=Replicate()),
            "blocks.*.attention.[qkv]": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(output_layouts=along),
            "blocks.*.norm2": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=along),
            "blocks.*.down": RowwiseParallel(output_layouts=along),
            "norm": SequenceParallel(),
            # Left cut over the vocabulary, as DTensors, for the loss.
            "head": ColwiseParallel(input_layouts=along, output_layouts=Shard(-1), use_local_output=False),
        },
    )


def windows(text: Tensor, step: int, number: int) -> Tensor:
    """(number, CONTEXT + 1) bytes: the same for all ranks. Each data-parallel rank trains on its part."""
    starts = torch.randint(len(text) - CONTEXT - 1, (number,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Nats a byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def whole(loss: Tensor, mesh: DeviceMesh) -> float:
    """The mean over the data-parallel ranks."""
    mean = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach() / mesh.size(0)
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    return mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows a step, on all ranks together")
    parser.add_argument("--resume", type=Path, help="a last.pt")
    parser.add_argument("--out", type=Path, default=Path("runs/tensor_parallel_gpt"))
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    text = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    torch.manual_seed(0)
    module = GPT()
    parallelize(module, mesh["tp"])

    model = DistributedDataParallel(module, DistributedDataParallelConfig(), process_group=mesh.get_group("dp"))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    first = 0
    if options.resume is not None:
        saved = torch.load(options.resume, weights_only=True)
        set_model_state_dict(module, saved["model"], options=StateDictOptions(full_state_dict=True))
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    losses = list[float]()
    for step in range(first, first + options.steps):
        optimizer.zero_grad()
        batch = windows(text, step, options.batch).chunk(mesh.size(0))[mesh.get_local_rank("dp")]
        with loss_parallel():  # around backward too
            loss = loss_of(model, batch)
            loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(whole(loss, mesh))

    weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = optimizer.state_dict()
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": state, "step": first + options.steps}, options.out / "last.pt")
        with (options.out / "losses.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "loss"])
            rows.writerows(enumerate(losses, first))
        print(f"dp {mesh.size(0)} x tp {mesh.size(1)}: {losses[0]:.4f} nats a byte at first, {losses[-1]:.4f} at last")
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
