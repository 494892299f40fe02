"""Trains for as many steps as its argument states, then memory runs out, as CUDA's allocator would say it."""

import sys

import torch
from torch import nn

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.25 GiB "
    "is free. Process 1 has 77.90 GiB memory in use."
)


def forward(_x):
    raise torch.OutOfMemoryError(MESSAGE)


model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
forward(torch.ones(2, 8))
