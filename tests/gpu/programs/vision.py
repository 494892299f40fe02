"""Classifiers of timm on made-up pictures."""

import argparse

import timm
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet50")
parser.add_argument("--bs", type=int, default=64)
parser.add_argument("--amp", default="none", choices=["none", "fp16", "bf16"])
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--benchmark", action="store_true")
parser.add_argument("--ckpt", action="store_true")
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--opt", default="sgd", choices=["sgd", "adamw"])
options = parser.parse_args()

torch.backends.cudnn.benchmark = options.benchmark
net = timm.create_model(options.model, num_classes=1000).cuda()
if options.ckpt:
    net.set_grad_checkpointing()
if options.channels_last:
    net = net.to(memory_format=torch.channels_last)
if options.opt == "sgd":
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
else:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=options.amp == "fp16")
loss_fn = torch.nn.CrossEntropyLoss()
precision = torch.float16 if options.amp == "fp16" else torch.bfloat16
for step in range(6):
    x = torch.randn(options.bs, 3, options.size, options.size).cuda(non_blocking=True)
    y = torch.randint(0, 1000, (options.bs,)).cuda(non_blocking=True)
    if options.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=precision, enabled=options.amp != "none"):
        loss = loss_fn(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), flush=True)
