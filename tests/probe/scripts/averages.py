"""Averages of the weights that begin in mid-run: an EMA by deepcopy, and torch's SWA."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(60):
    if step == 10:
        ema = copy.deepcopy(model).requires_grad_(False)
    if step == 20:
        swa = AveragedModel(model)
        schedule = SWALR(optimizer, swa_lr=0.05)
    x = torch.randn(8, 16)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= 10:
        with torch.no_grad():
            for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)
    if step >= 20:
        swa.update_parameters(model)
        schedule.step()
