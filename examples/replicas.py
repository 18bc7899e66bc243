"""Trains a small network on scikit-learn's digits in replicas that may fail and come back.

    OF=2 RANKS=2 HEARTBEAT_MS=2000 examples/replicas.sh examples/replicas.py
    OF=2 RANKS=2 HEARTBEAT_MS=2000 examples/replicas.sh examples/replicas.py --kill 1:30 0:200

The second command kills a process of replica 1 in step 30, as a machine that breaks would, and of replica 0 in step
200; kill -9 is the same. The other replica repeats that batch by itself and goes on, and the killed one comes back.
Each replica writes the checksum of its weights at the end, and all are equal. OUT/steps-SLOT.csv has the time, loss and
number of replicas of each step, which examples/replicas_picture.py draws.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from megastrategy import DistributedDataParallel, DistributedOptimizer, Replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between steps: such steps take milliseconds")
    parser.add_argument("--kill", nargs="*", default=[], metavar="SLOT:STEP", help="kill this replica in this step")
    parser.add_argument("--out", type=Path, default=Path("runs/replicas"), help="a folder that is new for each run")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()  # of this replica
    options.out.mkdir(parents=True, exist_ok=True)

    replicas = Replicas()  # slot and lighthouse from the environment
    torch.manual_seed(0)  # all replicas begin with the same weights
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(module, replicas=replicas)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)
    replicas.register("schedule", schedule.state_dict, schedule.load_state_dict)

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    # Every rank of every replica has a part of the data.
    sampler: DistributedSampler[object] = DistributedSampler(data, replicas.of * size, replicas.slot * size + rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in replicas.epochs(options.epochs):
        sampler.set_epoch(epoch)
        for pixels, digit in replicas.batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels), digit)
            kill_once(options.kill, replicas.slot, schedule.last_epoch, rank, options.out)
            loss.backward()
            optimizer.step()
            schedule.step()
            if rank == 0:
                log(options.out / f"steps-{replicas.slot}.csv", schedule.last_epoch, loss, replicas.members)
            time.sleep(options.pause)
            if replicas.is_leader and rank == 0 and schedule.last_epoch % 10 == 0:
                print(f"step {schedule.last_epoch}: loss {loss.item():.3f}, replicas {replicas.members}", flush=True)

    if rank == 0:
        weights = torch.cat([param.detach().flatten() for param in module.parameters()])
        checksum = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        accuracy = (module(images).argmax(1) == labels).float().mean().item()
        (options.out / f"weights-{replicas.slot}").write_text(checksum)
        print(f"replica {replicas.slot}: accuracy {accuracy:.3f}, weights {checksum}", flush=True)
    dist.destroy_process_group()


def log(path: Path, step: int, loss: torch.Tensor, members: tuple[int, ...]) -> None:
    """Adds a line to what this replica wrote before it was killed."""
    with path.open("a") as file:
        file.write(f"{step},{time.time()},{loss.item()},{len(members)}\n")


def kill_once(where: list[str], slot: int, step: int, rank: int, folder: Path) -> None:
    """Ends this process as a broken machine does, if this step is among those, and it has not done so before."""
    mark = folder / f"killed-{slot}-{step}"
    if f"{slot}:{step}" in where and rank == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
