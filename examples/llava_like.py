"""Trains a small vision-language model in a pipeline of unequal stages, as LLaVA is trained, in a plain loop.

    torchrun --nproc-per-node 4 examples/llava_like.py              # four stages
    torchrun --nproc-per-node 4 examples/llava_like.py --stages 2   # two, times two data-parallel ranks
    torchrun --nproc-per-node 1 examples/llava_like.py --stages 1   # the same losses, in one process

A vision tower, which stays frozen, a projector and a language model are one chain of layers. First the projector alone
is trained, to align both, then the language model with it. The planner chooses how many layers each stage has, for
cards that differ in memory and speed (these processes only play them). Images show a few coloured squares, and captions
are the colours in order. Writes OUT/losses.csv, OUT/last.pt, whose weights are whole.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Pipeline
from megastrategy.pipeline import whole_state_dict
from megastrategy.tools.plan.cards import parse_cards

COLOURS, SQUARES, PATCH = 8, 6, 4
VISION_WIDTH, WIDTH, HEADS = 48, 64, 4
VISION_DEPTH, DEPTH = 4, 6
CARDS = "large=64MB@0.02TFLOPS:1,medium=32MB@0.016TFLOPS:2,small=16MB@0.012TFLOPS:1"


class Patches(nn.Module):
    """Images, (batch, 3, PATCH, SQUARES * PATCH), to a vector a square."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, VISION_WIDTH, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(images).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention, causal or not, and MLP."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Prompt(nn.Module):
    """Puts the caption's words behind the image's: (batch, 2 * SQUARES, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(COLOURS + 1, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(2 * SQUARES, WIDTH))

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        return torch.cat([image, self.words(words)], 1) + self.places


class Head(nn.Module):
    """Logits of the caption's words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, COLOURS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x[:, SQUARES:]))
        return logits


def make_layers() -> list[nn.Module]:
    vision = [Patches(), *(Block(VISION_WIDTH, causal=False) for _ in range(VISION_DEPTH))]
    projector = [nn.Linear(VISION_WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return [*vision, *projector, Prompt(), *(Block(WIDTH, causal=True) for _ in range(DEPTH)), Head()]


VISION = range(1 + VISION_DEPTH)
PROJECTOR = range(VISION.stop, VISION.stop + 3)
PROMPT = PROJECTOR.stop
PHASES = {"align": range(PROMPT, PROMPT + DEPTH + 2), "tune": range(0)}
"""Each phase's frozen layers, beside the vision tower's."""


def freeze(layers: nn.ModuleList | list[nn.Module], phase: str) -> list[int]:
    frozen = [*VISION, *PHASES[phase]]
    for number, layer in enumerate(layers):
        layer.requires_grad_(number not in frozen)
    return frozen


class WithWords(nn.Module):
    """The prompt as the planner runs it, whose layers pass one tensor on."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt

    def forward(self, image: Tensor) -> Tensor:
        words: Tensor = self.prompt(image, torch.zeros(len(image), SQUARES, dtype=torch.long, device=image.device))
        return words


def batch_of(step: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, the words before each word of the caption, and the captions."""
    generator = torch.Generator().manual_seed(step)
    captions = torch.randint(COLOURS, (number, SQUARES), generator=generator)
    corners = torch.stack([(captions >> bit & 1).float() for bit in range(3)], 1)  # a colour is a corner of RGB
    images = corners.repeat_interleave(PATCH, 2).unsqueeze(2).expand(-1, -1, PATCH, -1)
    images = images + 0.3 * torch.randn(images.shape, generator=generator)
    before = torch.cat([torch.full((number, 1), COLOURS), captions[:, :-1]], 1)
    return images, before, captions


def mesh_of(stage_order: Sequence[str], cards: Sequence[str]) -> DeviceMesh:
    """All ranks, as stages times data-parallel ranks: equal blocks of ranks have the cards, in their order."""
    blocks = torch.arange(dist.get_world_size()).view(len(cards), -1)
    left, order = list(enumerate(cards)), list[int]()
    for name in stage_order:
        order.append(left.pop([card for _, card in left].index(name))[0])
    return DeviceMesh("cpu", blocks[order], mesh_dim_names=("pp", "dp"))


def loss_of(logits: Tensor, captions: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), captions.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of each phase")
    parser.add_argument("--batch", type=int, default=32, help="pairs a step, on all ranks together")
    parser.add_argument("--out", type=Path, default=Path("runs/llava_like"))
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, dp = dist.get_rank(), dist.get_world_size() // options.stages
    options.out.mkdir(parents=True, exist_ok=True)
    losses = list[float]()
    weights: dict[str, Tensor] | None = None
    for number, phase in enumerate(PHASES):
        torch.manual_seed(0)
        layers = make_layers()
        frozen = freeze(layers, phase)
        cards = parse_cards(CARDS)[: options.stages]
        chain = [WithWords(layer) if isinstance(layer, Prompt) else layer for layer in layers]
        sample = batch_of(0, options.batch // dp // 4)[0]
        plan = megastrategy.plan(
            chain, sample, devices=cards, microbatches=4, frozen=frozen, keep_together=[(PROJECTOR[0], PROJECTOR[-1])]
        )
        if rank == 0:
            print(f"{phase}: {plan.split_spec} layers on {', '.join(plan.stage_order)}; {plan.why}")

        mesh = mesh_of(plan.stage_order, [card.name for card in cards])
        net = Pipeline(
            layers,
            plan.split_spec,
            loss=loss_of,
            microbatches=4,
            mesh=mesh["pp"],
            keep_together=[(PROJECTOR[0], PROJECTOR[-1])],
            inputs={PROMPT: "words"},
        )
        if weights is not None:
            net.load_state_dict(weights)
        model = DistributedDataParallel(net, DistributedDataParallelConfig(), process_group=mesh.get_group("dp"))
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
        for step in range(options.steps):
            images, before, captions = batch_of(1000 * number + step, options.batch)
            rows = slice(mesh.get_local_rank("dp") * options.batch // dp, None)
            rows = slice(rows.start, rows.start + options.batch // dp)
            optimizer.zero_grad()
            loss = model(images[rows], words=before[rows], target=captions[rows])
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            mean = loss.detach() / dp
            dist.all_reduce(mean, group=mesh.get_group("dp"))
            losses.append(mean.item())
        told = [whole_state_dict(net)]
        dist.broadcast_object_list(told)
        weights = told[0]
        model.close()

    if rank == 0:
        torch.save(weights, options.out / "last.pt")
        with (options.out / "losses.csv").open("w", newline="") as file:
            rows_of_file = csv.writer(file)
            rows_of_file.writerow(["step", "loss"])
            rows_of_file.writerows(enumerate(losses))
        print(f"{options.stages} stages x {dp}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
