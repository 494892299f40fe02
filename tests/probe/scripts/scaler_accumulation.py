"""Mixed precision with a gradient scaler, four micro-batches for each step of the optimizer, a scheduler."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
scaler = torch.amp.GradScaler("cpu")
for _ in range(40):
    optimizer.zero_grad(set_to_none=False)
    for _ in range(4):
        x = torch.randn(8, 32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x).pow(2).mean() / 4
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
