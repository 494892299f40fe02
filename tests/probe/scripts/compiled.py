"""A compiled model that sets a buffer in each forward, and the optimizer's step compiled too."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layers(x) + self.mean


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
forward = torch.compile(model, backend="eager", fullgraph=True)
update = torch.compile(optimizer.step, backend="eager")
for _ in range(10):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    (forward(x) - x).pow(2).mean().backward()
    update()
