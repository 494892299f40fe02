"""Rejection sampling of a small GPT-2: 32 tokens sampled for each prompt, then a step on the better half of them."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

net = GPT2LMHeadModel(GPT2Config(n_layer=8, n_positions=512)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 5e-5)
for step in range(4):
    net.eval()
    prompts = torch.randint(0, 50000, (32, 128)).cuda()
    mask = torch.ones_like(prompts)
    samples = net.generate(
        prompts, attention_mask=mask, do_sample=True, max_new_tokens=32, min_new_tokens=32, pad_token_id=50256
    )
    better = samples[torch.rand(len(samples)).topk(16).indices.cuda()]
    net.train()
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(input_ids=better, labels=better).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
