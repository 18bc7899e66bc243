"""A loop with Accelerate, which accumulates, and saves after each epoch."""

import os
import signal

import torch
from journal import BATCH_SIZE, EPOCHS, FOLDER, Journal, make_data, make_module, write_end
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from megastrategy import Replicas
from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

WAS_KILLED = FOLDER / "was-killed"  # within the last window of an epoch, whose first microbatch is behind it
replicas = Replicas()
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, megatron_ddp_plugin=MegatronDDPPlugin(replicas=replicas)
)
module = make_module()
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95)
ranks = replicas.sampler_ranks(accelerator.num_processes, accelerator.process_index)
data = make_data()
loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, **ranks))
model, optimizer = accelerator.prepare(module, optimizer)
accelerator.register_for_checkpointing(schedule)
journal = Journal(replicas.slot, 0)
for _ in replicas.epochs(EPOCHS):
    for x, y, numbers in replicas.batches(loader):
        if (replicas.slot, replicas.epoch, replicas.batch) == (1, 1, 11) and not WAS_KILLED.exists():
            WAS_KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        journal.write(replicas, replicas.step, replicas.epoch, numbers)
    accelerator.save_state(FOLDER / f"state-{replicas.epoch}")
write_end(replicas.slot, 0, module, steps=replicas.step, schedule=schedule.last_epoch)
