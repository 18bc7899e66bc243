"""A plain loop on two processes: torchrun --standalone --nproc-per-node 2 examples/templates/plain_loop.py"""

import torch
import torch.distributed as dist

from megastrategy import DistributedDataParallel, DistributedOptimizer

dist.init_process_group("gloo")  # or "nccl", with the module on torch.device("cuda", local_rank)
module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(module)
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
for step in range(200):
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())  # each rank has its own samples
    inputs = torch.randn(16, 8, generator=generator)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
state = optimizer.state_dict()  # on all ranks; rank 0 gets it
if dist.get_rank() == 0:
    torch.save({"model": module.state_dict(), "optimizer": state}, "last.pt")
    print(f"loss {loss:.4f}")
model.close()
dist.destroy_process_group()
