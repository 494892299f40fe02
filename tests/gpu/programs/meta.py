"""Model-agnostic meta-learning by torch.func: gradients through inner steps, tasks by vmap."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

WIDTH, TASKS, SHOTS = 256, 32, 64


def stage(i):
    return nn.Sequential(nn.Conv2d(i, WIDTH, 3, padding=1), nn.GroupNorm(8, WIDTH), nn.ReLU(), nn.MaxPool2d(2))


net = nn.Sequential(stage(3), stage(WIDTH), stage(WIDTH), nn.Flatten(), nn.Linear(WIDTH * 16, 5)).cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)


def loss_of(weights, x, y):
    return nn.functional.cross_entropy(functional_call(net, weights, (x,)), y)


def adapted_loss(weights, x, y, query_x, query_y):
    slopes = grad(loss_of)(weights, x, y)
    return loss_of({name: w - 0.01 * slopes[name] for name, w in weights.items()}, query_x, query_y)


for step in range(6):
    x, query_x = (torch.randn(TASKS, SHOTS // 4, 3, 32, 32).cuda() for _ in range(2))
    y, query_y = (torch.randint(0, 5, (TASKS, SHOTS // 4)).cuda() for _ in range(2))
    weights = dict(net.named_parameters())
    loss = vmap(adapted_loss, in_dims=(None, 0, 0, 0, 0))(weights, x, y, query_x, query_y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
