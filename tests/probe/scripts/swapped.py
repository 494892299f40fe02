"""Models that take turns: each is made, trained and dropped before the next, and the first one's weights come back."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
best = None
for width in (8, 256, 64):
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        x = torch.randn(8, 16)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if best is None:
        best = copy.deepcopy(model)
