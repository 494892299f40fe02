"""The commonest leak: losses are kept for a plot, each with its graph. And a model that unusual code made."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid())
        self.head = nn.Linear(64, 16)

    def forward(self, x):
        return self.head(self.body(x))


def train(steps):
    for _ in range(steps):
        x = torch.randn(4096, 16)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss)


torch.manual_seed(0)
losses = []
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
train(3)
copy = nn.Linear.__new__(nn.Linear)
copy.__dict__.update(nn.Linear(100, 100, bias=False).__dict__)
train(3)
