"""Lightning's Trainer on two processes: python examples/templates/with_trainer.py"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Sum(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    inputs = torch.randn(1024, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = Trainer(strategy="megatron_ddp", accelerator="cpu", devices=2, max_epochs=4, logger=False)  # or "gpu"
    trainer.fit(Sum(), data)
    trainer.print(f"loss {trainer.callback_metrics['loss']:.4f}")
