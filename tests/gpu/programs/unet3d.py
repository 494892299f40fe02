"""A UNet for volumes, fp16 autocast, with cuDNN's benchmark."""

from itertools import pairwise

import torch
from torch import nn

WIDTHS = [32, 64, 128, 256]


def stage(i, o):
    return nn.Sequential(
        nn.Conv3d(i, o, 3, padding=1),
        nn.InstanceNorm3d(o),
        nn.LeakyReLU(inplace=True),
        nn.Conv3d(o, o, 3, padding=1),
        nn.InstanceNorm3d(o),
        nn.LeakyReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(stage(i, o) for i, o in pairwise([1, *WIDTHS]))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(o, i, 2, 2) for i, o in pairwise(WIDTHS))
        self.up = nn.ModuleList(stage(2 * i, i) for i in WIDTHS[:-1])
        self.out = nn.Conv3d(WIDTHS[0], 4, 1)

    def forward(self, x):
        kept = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else nn.functional.max_pool3d(x, 2))
            kept.append(x)
        for level in range(2, -1, -1):
            x = self.up[level](torch.cat([self.grow[level](x), kept[level]], 1))
        return self.out(x)


torch.backends.cudnn.benchmark = True
net = UNet().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.99, nesterov=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(6):
    x = torch.randn(2, 1, 96, 96, 96).cuda()
    y = torch.randint(0, 4, (2, 96, 96, 96)).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), flush=True)
