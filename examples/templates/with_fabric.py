"""A loop with Lightning Fabric on two processes: python examples/templates/with_fabric.py"""

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    fabric = Fabric(strategy="megatron_ddp", accelerator="cpu", devices=2)  # or "gpu"
    fabric.launch()
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    inputs = torch.randn(1024, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    for _ in range(4):
        for batch, targets in fabric.setup_dataloaders(data):
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save("last.ckpt", {"model": model, "optimizer": optimizer})
    fabric.print(f"loss {loss:.4f}")
