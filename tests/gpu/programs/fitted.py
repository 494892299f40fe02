"""A small GPT for `fit`: python fitted.py --bs N [--accum N]; with --grow its samples are longer from step 9."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=4)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--grow", action="store_true")
options = parser.parse_args()
WIDTH, WORDS, LENGTH = 1024, 32000, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 16, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


device = "cuda"
net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(8)), nn.Linear(WIDTH, WORDS)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
for step in range(12):
    length = 2 * LENGTH if options.grow and step >= 9 else LENGTH
    for _ in range(options.accum):
        words = torch.randint(0, WORDS, (options.bs, length), device=device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(net(words).flatten(0, 1), words.flatten())
        (loss / options.accum).backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {step + 1} steps of {options.accum} x {options.bs}")
