"""A mixture of experts: --model own (each expert takes what is routed to it) or mixtral (transformers)."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="own", choices=["own", "mixtral"])
options = parser.parse_args()

WORDS, WIDTH, INNER, LAYERS, EXPERTS, CHOSEN = 32000, 768, 2048, 6, 8, 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 12, batch_first=True)
        self.experts = Experts()

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.experts(self.norm2(x).flatten(0, 1)).view_as(x)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.blocks(self.words(x)))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


torch.manual_seed(0)
net = (Own() if options.model == "own" else mixtral()).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
for step in range(6):
    x = torch.randint(0, WORDS, (8, 513)).cuda()
    if options.model == "own":
        loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    else:
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(input_ids=x, labels=x).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
