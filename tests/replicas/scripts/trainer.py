"""A Trainer with validation, a schedule and checkpoints."""

import lightning.pytorch as pl
import torch
from journal import BATCH_SIZE, EPOCHS, FOLDER, Journal, make_data, make_module, write_end
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from megastrategy import Replicas
from megastrategy.lightning import MegatronDDPStrategy


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_module()

    def training_step(self, batch):
        x, y, self.numbers = batch
        return cross_entropy(self.net(x), y)

    def on_train_batch_end(self, *_):
        journal.write(replicas, self.trainer.global_step, self.trainer.current_epoch, self.numbers)

    def validation_step(self, batch):
        x, y, _ = batch
        self.log("val", cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95), "interval": "step"}]


pl.seed_everything(0)
replicas = Replicas()
journal = Journal(replicas.slot, 0)
model = Model()
saver = ModelCheckpoint(FOLDER / "checkpoints", monitor="val", save_top_k=-1, filename="{epoch}")
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    strategy=MegatronDDPStrategy(replicas=replicas),
    max_epochs=EPOCHS,
    callbacks=[saver, EarlyStopping("val", patience=1000)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(make_data(), BATCH_SIZE, shuffle=True), DataLoader(make_data(), 64))
write_end(
    replicas.slot,
    0,
    model,
    steps=trainer.global_step,
    epoch=trainer.current_epoch,
    val=float(trainer.callback_metrics["val"]),
    best=saver.best_model_score.item(),
)
