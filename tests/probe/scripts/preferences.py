"""A frozen base that gets adapters after some steps, then a reference model that no optimizer knows."""

import torch
from torch import nn
from torch.nn import functional as F


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def train(steps, reference=None):
    for _ in range(steps):
        x = torch.randn(8, 32)
        loss = (model(x) - x).pow(2).mean()
        if reference is not None:
            with torch.no_grad():
                target = reference(x)
            loss = loss + F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
train(15)
model.requires_grad_(False)
model[0], model[2] = Adapted(model[0]), Adapted(model[2])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
train(15)
reference = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
train(30, reference)
