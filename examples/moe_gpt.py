"""Trains a small byte-level GPT with 8 experts per layer, divided over some of the data-parallel ranks.

    torchrun --nproc-per-node 4 examples/moe_gpt.py              # 4 data-parallel ranks: ep 2 x edp 2
    torchrun --nproc-per-node 4 examples/moe_gpt.py --ep 4       # 2 experts per rank, and no copies
    torchrun --nproc-per-node 4 examples/moe_gpt.py --compare    # the losses of torch in one process beside these

A router sends each token to its best 2 experts, and a loss keeps the load of the experts balanced. Tokens travel in
an all-to-all; the lines of megastrategy are those in ``main`` that wrap the model and the optimizer. Writes
OUT/losses.csv, and OUT/last.pt with the weights and the optimizer state of the whole model: any --ep resumes from it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

VOCABULARY, CONTEXT, WIDTH, HEAD_WIDTH, DEPTH = 256, 64, 64, 16, 2
NUM_EXPERTS, TOP, BALANCE = 8, 2, 0.01
MICROBATCHES = 4
"""The number of microbatches in a step, on all ranks together. Each has a balance loss of its own."""


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ``sent[r]`` rows to rank r of a group and returns ``received[r]`` from it; backward returns gradients."""
    out = rows.new_empty(sum(received), rows.shape[1])
    result: Tensor = all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return result


class Attention(nn.Module):
    """Causal attention over (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Experts(nn.Module):
    """A router and 8 MLPs, whose weights are stacked: ``[NUM_EXPERTS, in, out]``.

    Attributes:
        balance_loss: of the last forward: 1 if all experts get as many tokens, NUM_EXPERTS / TOP if the same get all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) * 0.05)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) * 0.05)
        self.balance_loss = torch.zeros(())
        self.mesh: DeviceMesh | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        """Keeps this rank's experts: the stacks become DTensors over ``mesh``, the ranks with different experts."""
        self.mesh = mesh
        self.up = nn.Parameter(distribute_tensor(self.up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(self.down, mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        best, chosen = scores.topk(TOP, -1)
        weights = (best / best.sum(-1, keepdim=True)).flatten()
        counts = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        self.balance_loss = NUM_EXPERTS * (counts / chosen.numel() * scores.mean(0)).sum()
        by_expert = chosen.flatten().argsort(stable=True)
        token_of = by_expert // TOP
        rows = self._run(tokens[token_of], counts) if self.mesh is None else self._send(tokens[token_of], counts)
        out = torch.zeros_like(tokens).index_add(0, token_of, rows * weights[by_expert].unsqueeze(-1))
        return out.view_as(x)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Runs this rank's experts; ``rows`` are sorted by expert, ``counts`` of each."""
        up, down = (w.to_local() if self.mesh is not None else w for w in (self.up, self.down))  # type: ignore[operator]
        parts = zip(rows.split(counts.tolist()), up, down, strict=True)
        return torch.cat([F.gelu(part @ first) @ second for part, first, second in parts])

    def _send(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Sends rows to the ranks of their experts, and returns their outputs in the same order."""
        assert self.mesh is not None
        group, size = self.mesh.get_group(), self.mesh.size()
        arriving = torch.empty_like(counts)  # by rank, for each of this rank's experts
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (of_ranks.view(size, -1).sum(1).tolist() for of_ranks in (counts, arriving))
        # A rank without tokens sends and receives nothing, and takes part: its empty result stays in the graph.
        arrived = exchanged(rows, sent, received, group)
        experts = torch.arange(NUM_EXPERTS // size).repeat(size).repeat_interleave(arriving)
        by_expert = experts.argsort(stable=True)
        out = self._run(arrived[by_expert], arriving.view(size, -1).sum(0))
        out = torch.empty_like(out).index_copy(0, by_expert, out)
        returned: Tensor = exchanged(out, received, sent, group)
        return returned


class Block(nn.Module):
    """Pre-norm attention and experts over (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.experts = Attention(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.experts(self.norm2(x))
        return out


class GPT(nn.Module):
    """A byte-level GPT whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.05)

    def experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes -> (batch, time, VOCABULARY) logits."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_module() -> GPT:
    torch.manual_seed(0)  # the same weights on all ranks
    return GPT()


def microbatches(text: Tensor, step: int, number: int) -> list[Tensor]:
    """(number / MICROBATCHES, CONTEXT + 1) bytes each: the same list on all ranks."""
    starts = torch.randint(len(text) - CONTEXT - 1, (number,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return list(windows.chunk(MICROBATCHES))


def backward(module: GPT, call: Callable[[Tensor], Tensor], batch: Tensor, num_batches: int) -> Tensor:
    """Returns this microbatch's part of the loss, in nats a byte, without the loss that balances the load."""
    loss = F.cross_entropy(call(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    balance = torch.stack([layer.balance_loss for layer in module.experts()]).sum()
    ((loss + BALANCE * balance) / num_batches).backward()
    return loss.detach() / num_batches


def train_alone(text: Tensor, steps: int, number: int) -> list[float]:
    """Trains with torch only, in this process; the losses by step."""
    module = make_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [backward(module, module, batch, MICROBATCHES) for batch in microbatches(text, step, number)]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(torch.stack(parts).sum()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="ranks over which the experts are divided")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows per step, on all ranks together")
    parser.add_argument("--compare", action="store_true", help="train in one process too, and print both losses")
    parser.add_argument("--resume", type=Path, help="a last.pt")
    parser.add_argument("--out", type=Path, default=Path("runs/moe_gpt"))
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, dp = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    mesh = init_device_mesh("cpu", (dp // options.ep, options.ep), mesh_dim_names=("edp", "ep"))
    module = make_module()
    for layer in module.experts():
        layer.divide(mesh["ep"])

    model = DistributedDataParallel(module, DistributedDataParallelConfig(), expert_mesh=mesh)
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
        own = microbatches(text, step, options.batch)[rank::dp]
        loss = torch.zeros(())
        for number, batch in enumerate(own, 1):
            with contextlib.nullcontext() if number == len(own) else model.no_sync():
                loss += backward(module, model, batch, len(own))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / dp)

    weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = optimizer.state_dict()
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": state, "step": first + options.steps}, options.out / "last.pt")
        with (options.out / "losses.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "loss"])
            rows.writerows(enumerate(losses, first))
        print(f"dp {dp} = ep {options.ep} x edp {dp // options.ep}, {NUM_EXPERTS // options.ep} experts on a rank:")
        print(f"  {losses[0]:.4f} nats a byte at first, {losses[-1]:.4f} at last")
    model.close()
    dist.destroy_process_group()
    if rank == 0 and options.compare:
        alone = train_alone(text, options.steps, options.batch)
        print("  step  on ranks  one process")
        for step in range(0, options.steps, max(1, options.steps // 10)):
            print(f"  {step:>4}  {losses[step]:.6f}  {alone[step]:.6f}")
        difference = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
        print(f"  largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
