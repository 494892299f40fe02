"""DistributedDataParallel, the optimizer's state shared out over the ranks. Run by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
for _ in range(40):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    (model(x) - x).pow(2).mean().backward()
    optimizer.step()
