"""A loop that accelerate prepares: accumulation, clipping, a schedule."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(TensorDataset(torch.randn(160, 16)), batch_size=4)
model, prepared, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for (x,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward((model(x) - x).pow(2).mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        schedule.step()
        prepared.zero_grad(set_to_none=False)
