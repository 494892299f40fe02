"""FSDP2: every parameter a DTensor, of which each rank holds a shard; and FSDP1: a flat one. Run by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
flat = FullyShardedDataParallel(nn.Linear(16, 33), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
flat_optimizer = torch.optim.AdamW(flat.parameters(), lr=1e-3)
for _ in range(10):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    flat_optimizer.zero_grad()
    ((model(x) - x).pow(2).mean() + flat(x).pow(2).mean()).backward()
    optimizer.step()
    flat_optimizer.step()
