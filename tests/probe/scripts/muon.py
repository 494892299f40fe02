"""Muon for the matrices, each rank with a share of them, and AdamW for the rest."""

import os

import torch
import torch.distributed as dist
from torch import nn


def orthogonalized(update, steps=5):
    x = update / (update.norm() + 1e-7)
    transposed = x.size(0) > x.size(1)
    x = x.T if transposed else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if transposed else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(sorted(params, key=lambda p: p.numel(), reverse=True), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"] + [torch.empty_like(group["params"][-1])] * (-len(group["params"]) % world)
            for first in range(0, len(group["params"]), world):
                if first + rank < len(group["params"]):
                    p = params[first + rank]
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                    p.add_(orthogonalized(state["momentum_buffer"]), alpha=-group["lr"])
                for owner, p in enumerate(params[first : first + world]):
                    dist.broadcast(p.data, owner)


dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
for p in model.parameters():
    dist.broadcast(p.data, 0)
muon = Muon([p for p in model.parameters() if p.dim() == 2])
adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-3)
for _ in range(20):
    x = torch.randn(8, 16)
    (model(x) - x).pow(2).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    muon.step()
    adam.step()
    model.zero_grad(set_to_none=False)
