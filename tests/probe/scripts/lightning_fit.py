"""Lightning, with its own loop."""

import logging
import tempfile

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16))

    def training_step(self, batch, _index):
        return (self.layers(batch[0]) - batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(0)
model = Autoencoder()
trainer = L.Trainer(
    max_steps=20,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(160, 16)), batch_size=8))
optimizer = model.optimizers().optimizer
