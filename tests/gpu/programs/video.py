"""A classifier of videos by Conv3d (torchvision's R(2+1)D), fp16 autocast."""

import torch
import torchvision

net = torchvision.models.video.r2plus1d_18(num_classes=400).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for step in range(6):
    x = torch.randn(8, 3, 16, 112, 112).cuda()
    y = torch.randint(0, 400, (8,)).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), flush=True)
