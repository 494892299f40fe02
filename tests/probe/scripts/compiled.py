"""A compiled model, and the optimizer's step compiled too."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
forward = torch.compile(model, backend="eager")
update = torch.compile(optimizer.step, backend="eager")
for _ in range(10):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    (forward(x) - x).pow(2).mean().backward()
    update()
