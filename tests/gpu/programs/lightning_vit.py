"""timm's ViT-L/16 by Lightning's Trainer, bf16-mixed, gradients clipped."""

import lightning
import timm
import torch


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = timm.create_model("vit_large_patch16_224", num_classes=1000)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-4)


data = torch.utils.data.TensorDataset(torch.randn(192, 3, 224, 224), torch.randint(0, 1000, (192,)))
trainer = lightning.Trainer(
    max_steps=6,
    precision="bf16-mixed",
    accelerator="gpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    gradient_clip_val=1.0,
)
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=32))
