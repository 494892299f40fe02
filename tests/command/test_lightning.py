"""Lightning's Trainer, as its documentation uses it."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("lightning")]

SCRIPT = """
    import sys
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))

        def training_step(self, batch, index):
            images, labels = batch
            loss = nn.functional.cross_entropy(self.net(images), labels)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, index):
            images, labels = batch
            out = self.net(images)
            self.log("val_loss", nn.functional.cross_entropy(out, labels))
            self.log("accuracy", (out.argmax(1) == labels).float().mean(), prog_bar=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    data = TensorDataset(torch.randn(256, 512), torch.randint(0, 10, (256,)))
    trainer = L.Trainer(
        accelerator="gpu", devices=1, precision=sys.argv[1], max_epochs=2, gradient_clip_val=1.0,
        logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss"), LearningRateMonitor()],
    )
    trainer.fit(Classifier(), DataLoader(data, 64, shuffle=True, num_workers=2), DataLoader(data, 64))
"""
PARAMETERS = 512 * 2048 + 2048 + 2048 * 10 + 10


@pytest.mark.parametrize(("precision", "value_bytes"), [("bf16-mixed", 4), ("16-mixed", 4), ("bf16-true", 2)])
def test_a_trainer_with_validation_callbacks_and_a_logger(project: Project, precision: str, value_bytes: int) -> None:
    project.write("train.py", SCRIPT)
    buckets = project.predict("python", "train.py", precision).json["traced"]["buckets"]
    assert buckets["parameters"] == pytest.approx(PARAMETERS * value_bytes, abs=2048)
    assert buckets["optimizer"] == pytest.approx(2 * PARAMETERS * value_bytes, abs=4096)


def test_manual_optimization_of_two_models(project: Project) -> None:
    project.write(
        "train.py",
        """
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Gan(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(64, 4096), nn.Linear(4096, 1)

        def training_step(self, batch, index):
            (images,) = batch
            first, second = self.optimizers()
            fake = self.generator(torch.randn(len(images), 64).type_as(images))
            for optimizer, loss in ((first, -self.critic(fake).mean()), (second, None)):
                self.toggle_optimizer(optimizer)
                if loss is None:
                    loss = (self.critic(fake.detach()) - self.critic(images)).mean()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())], []

    data = DataLoader(TensorDataset(torch.randn(256, 4096)), 32)
    trainer = L.Trainer(accelerator="auto", devices="auto", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Gan(), data)
""",
    )
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    parameters = 4 * (64 * 4096 + 4096 + 4096 + 1)
    assert buckets["parameters"] == pytest.approx(parameters, abs=2048)
    assert buckets["optimizer"] == pytest.approx(2 * parameters, abs=4096)
