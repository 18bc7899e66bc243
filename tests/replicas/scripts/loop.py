"""A plain loop with accumulation, clipping and a schedule."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from journal import BATCH_SIZE, EPOCHS, Journal, make_data, make_module, write_end
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from megastrategy import DistributedDataParallel, DistributedOptimizer, Replicas

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
replicas = Replicas()
module = make_module()
model = DistributedDataParallel(module, replicas=replicas)
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95)
replicas.register("schedule", schedule.state_dict, schedule.load_state_dict)
data = make_data()
sampler = DistributedSampler(data, **replicas.sampler_ranks(size, rank))
journal = Journal(replicas.slot, rank)
stops_at = int(sys.argv[4]) if len(sys.argv) > 4 else -1
for _ in replicas.epochs(EPOCHS):
    for x, y, numbers in replicas.batches(DataLoader(data, BATCH_SIZE, sampler=sampler)):
        optimizer.zero_grad()
        with model.no_sync():
            cross_entropy(model(x[:4]), y[:4]).backward()
        cross_entropy(model(x[4:]), y[4:]).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        journal.write(replicas, replicas.step, replicas.epoch, numbers)
        if replicas.step == stops_at and replicas.slot == 0 and rank == size - 1:
            replicas.stop()
state = optimizer.state_dict()
write_end(replicas.slot, rank, module, steps=replicas.step, schedule=schedule.last_epoch, place=replicas.batch)
dist.destroy_process_group()
