"""Lightning with manual optimization: two optimizers that the module steps itself."""

import logging
import tempfile

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, _index):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = F.softplus(-self.discriminator(self.generator(torch.randn(4, 8)))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.generator(torch.randn(4, 8)).detach()
        loss = F.softplus(self.discriminator(fake)).mean() + F.softplus(-self.discriminator(batch[0])).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.discriminator.parameters())


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(0)
model = GAN()
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(80, 16)), batch_size=4))
generator_optimizer, discriminator_optimizer = (optimizer.optimizer for optimizer in model.optimizers())
