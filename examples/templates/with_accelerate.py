"""A loop with Accelerate on two processes, with no word of megastrategy:

megastrategy launch --config_file examples/accelerate.yaml examples/templates/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
inputs = torch.randn(1024, 8)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, data = accelerator.prepare(module, optimizer, data)
for _ in range(4):
    for batch, targets in data:
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("last")  # on all processes
accelerator.print(f"loss {loss:.4f}")
accelerator.end_training()
