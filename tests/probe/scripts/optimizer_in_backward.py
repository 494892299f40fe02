"""Each parameter has its optimizer, which steps inside of backward as soon as the gradient is there, and drops it."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_now)


def train(steps):
    for _ in range(steps):
        x = torch.randn(4096, 16)
        (model(x) - x).pow(2).mean().backward()


train(40)
