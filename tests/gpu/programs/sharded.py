"""A stack of transformer layers on one rank: --by fsdp2, fsdp1 or ddp."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--by", default="fsdp2", choices=["fsdp2", "fsdp1", "ddp"])
parser.add_argument("--ckpt", action="store_true")
options = parser.parse_args()

for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519", "RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("nccl")
torch.cuda.set_device(0)
WIDTH, LAYERS = 1024, 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30000, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 30000)

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if options.ckpt else layer(x)
        return self.head(x)


net = Net().cuda()
if options.by == "fsdp2":
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.layers:
        fully_shard(layer, mp_policy=policy)
    model = fully_shard(net, mp_policy=policy)
elif options.by == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        net, auto_wrap_policy=policy, mixed_precision=precision, device_id=0, use_orig_params=True
    )
else:
    model = nn.parallel.DistributedDataParallel(net, device_ids=[0], static_graph=True)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(6):
    x = torch.randint(0, 30000, (16, 257)).cuda()
    loss = nn.functional.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
dist.destroy_process_group()
