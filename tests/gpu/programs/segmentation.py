"""Segmentation of torchvision: --model deeplabv3_resnet50, fcn_resnet50, lraspp_mobilenet_v3_large."""

import argparse

import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="deeplabv3_resnet50")
parser.add_argument("--bs", type=int, default=8)
options = parser.parse_args()

build = getattr(torchvision.models.segmentation, options.model)
net = build(weights=None, weights_backbone=None, num_classes=21, aux_loss=True).cuda().train()
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
for step in range(6):
    x = torch.randn(options.bs, 3, 384, 384).cuda()
    y = torch.randint(0, 21, (options.bs, 384, 384)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        found = net(x)
        loss = sum(
            weight * torch.nn.functional.cross_entropy(found[name], y, ignore_index=255)
            for name, weight in (("out", 1.0), ("aux", 0.5))
        )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
