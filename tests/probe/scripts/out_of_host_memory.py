"""Trains a step, then asks for more host memory than a process can address."""

import torch
from torch import nn

model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()

kept = torch.empty(1 << 46)
