"""Pictures and texts held against each other as CLIP does, from configurations of transformers."""

import torch
from transformers import CLIPConfig, CLIPModel

net = CLIPModel(CLIPConfig(text_config={"num_hidden_layers": 6}, vision_config={"num_hidden_layers": 6})).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-5, betas=(0.9, 0.98))
scaler = torch.amp.GradScaler("cuda")
for step in range(6):
    texts = torch.randint(0, 49000, (128, 77)).cuda()
    pictures = torch.randn(128, 3, 224, 224).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = net(input_ids=texts, pixel_values=pictures, return_loss=True).loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), flush=True)
