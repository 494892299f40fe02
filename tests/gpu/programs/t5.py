"""T5 base's shape, fp32, its dropout on, transformers' Adafactor."""

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

config = T5Config(
    vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
)
net = T5ForConditionalGeneration(config).cuda()
optimizer = Adafactor(net.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
for step in range(6):
    x = torch.randint(0, 32000, (8, 512)).cuda()
    y = torch.randint(0, 32000, (8, 128)).cuda()
    loss = net(input_ids=x, labels=y).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
