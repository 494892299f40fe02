"""BERT under DistributedDataParallel on one rank, fp16 autocast with a gradient scaler."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518", "RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("nccl")
torch.cuda.set_device(0)
net = BertForSequenceClassification(BertConfig()).cuda()
model = DistributedDataParallel(net, device_ids=[0], gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), 3e-5)
scaler = torch.amp.GradScaler("cuda")
for step in range(6):
    x = torch.randint(0, 30000, (16, 384)).cuda()
    y = torch.randint(0, 2, (16,)).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = model(input_ids=x, labels=y).loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), flush=True)
dist.destroy_process_group()
