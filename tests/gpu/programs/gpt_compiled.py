"""A plain GPT: --mode none, default, reduce-overhead, max-autotune-no-cudagraphs or flex."""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="default")
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--vocab", type=int, default=50304)
parser.add_argument("--ckpt", action="store_true")
options = parser.parse_args()

WIDTH, LAYERS, HEADS, LENGTH = 768, 12, 12, 1024
if options.mode == "flex":
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    MASK = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cuda")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        n = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(n, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if options.mode == "flex":
            y = flex_attention(q, k, v, block_mask=MASK)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(options.vocab, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, options.vocab, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if options.ckpt else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


net = GPT().cuda()
optimizer = torch.optim.AdamW(net.parameters(), 3e-4, fused=True)
compilers = {
    "none": lambda model: model,
    "default": torch.compile,
    "flex": torch.compile,
    "dynamic": partial(torch.compile, dynamic=True),
}
model = compilers.get(options.mode, partial(torch.compile, mode=options.mode))(net)
for step in range(8):
    tokens = torch.randint(0, options.vocab, (options.bs, LENGTH + 1)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item(), flush=True)
