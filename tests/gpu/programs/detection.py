"""Detectors of torchvision on made-up boxes: --model maskrcnn_resnet50_fpn, retinanet_resnet50_fpn, …"""

import argparse

import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="maskrcnn_resnet50_fpn")
options = parser.parse_args()

build = getattr(torchvision.models.detection, options.model)
net = build(weights=None, weights_backbone=None, num_classes=21).cuda().train()
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.005, momentum=0.9)
g = torch.Generator().manual_seed(0)
for step in range(6):
    images = [torch.rand(3, 480, 640, generator=g).cuda() for _ in range(4)]
    targets = []
    for _ in images:
        corner = torch.rand(5, 2, generator=g) * 200
        size = torch.rand(5, 2, generator=g) * 150 + 20
        targets.append(
            {
                "boxes": torch.cat([corner, corner + size], 1).cuda(),
                "labels": torch.randint(1, 21, (5,), generator=g).cuda(),
                "masks": (torch.rand(5, 480, 640, generator=g) > 0.5).to(torch.uint8).cuda(),
            }
        )
    loss = sum(net(images, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
