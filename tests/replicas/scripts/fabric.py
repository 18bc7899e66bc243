"""A loop with Fabric, which saves after each epoch."""

import torch
from journal import BATCH_SIZE, EPOCHS, FOLDER, Journal, make_data, make_module, write_end
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from megastrategy import Replicas
from megastrategy.fabric import MegatronDDPStrategy

replicas = Replicas()
fabric = Fabric(accelerator="cpu", devices=1, strategy=MegatronDDPStrategy(replicas=replicas))
fabric.launch()
module = make_module()
model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
loader = fabric.setup_dataloaders(DataLoader(make_data(), BATCH_SIZE, shuffle=True))
journal = Journal(replicas.slot, 0)
for _ in replicas.epochs(EPOCHS):
    for x, y, numbers in replicas.batches(loader):
        optimizer.zero_grad()
        fabric.backward(cross_entropy(model(x), y))
        optimizer.step()
        journal.write(replicas, replicas.step, replicas.epoch, numbers)
    fabric.save(FOLDER / f"epoch={replicas.epoch}.ckpt", {"model": model, "optimizer": optimizer})
write_end(replicas.slot, 0, module, steps=replicas.step)
