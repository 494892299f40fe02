"""A network of dilated Conv1d layers over long signals, each with weight normalization."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 256


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.widen = weight_norm(nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=dilation, dilation=dilation))
        self.out = weight_norm(nn.Conv1d(WIDTH, WIDTH, 1))

    def forward(self, x):
        left, right = self.widen(x).chunk(2, 1)
        return x + self.out(left.tanh() * right.sigmoid())


net = nn.Sequential(
    nn.Conv1d(1, WIDTH, 1), *(Layer(2**power) for _ in range(2) for power in range(8)), nn.Conv1d(WIDTH, 256, 1)
).cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(6):
    x = torch.randn(8, 1, 16000).cuda()
    y = torch.randint(0, 256, (8, 16000)).cuda()
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
