"""A small GPT under one optimizer after another: --opt muon, adamw8bit, lion, sgd, adamw-for-loop, capturable, …"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt", default="adamw")
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--ema", action="store_true")
parser.add_argument("--offload", action="store_true", help="keep activations in the host's memory")
options = parser.parse_args()

WORDS, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 32000, 1024, 8, 16, 512, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 8 * WIDTH // 3, bias=False)
        self.up = nn.Linear(WIDTH, 8 * WIDTH // 3, bias=False)
        self.down = nn.Linear(8 * WIDTH // 3, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.words(tokens))))


class Lion(torch.optim.Optimizer):
    """https://arxiv.org/abs/2302.06675"""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = momentum.mul(0.9).add_(p.grad, alpha=0.1).sign_()
                p.add_(update, alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


class MuonAndAdamW:
    """Muon for matrices within blocks, AdamW for all else."""

    def __init__(self, net):
        matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in net.parameters() if id(p) not in chosen]
        self.parts = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, 3e-4)]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def make(name, net):
    parameters = list(net.parameters())
    if name == "muon":
        return MuonAndAdamW(net)
    if name == "lion":
        return Lion(parameters, 1e-4)
    if name in ("adamw8bit", "lion8bit", "paged_adamw8bit"):
        import bitsandbytes.optim

        classes = {"adamw8bit": "AdamW8bit", "lion8bit": "Lion8bit", "paged_adamw8bit": "PagedAdamW8bit"}
        return getattr(bitsandbytes.optim, classes[name])(parameters, 3e-4)
    if name == "adamw-torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, 3e-4)
    made = {
        "adamw": lambda: torch.optim.AdamW(parameters, 3e-4),
        "adamw-for-loop": lambda: torch.optim.AdamW(parameters, 3e-4, foreach=False),
        "capturable": lambda: torch.optim.AdamW(parameters, 3e-4, capturable=True),
        "amsgrad": lambda: torch.optim.Adam(parameters, 3e-4, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(parameters),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, 1e-4, momentum=0.9, centered=True),
        "nadam": lambda: torch.optim.NAdam(parameters, 1e-4),
    }
    return made[name]()


net = GPT().cuda()
average = copy.deepcopy(net).requires_grad_(False) if options.ema else None
optimizer = make(options.opt, net)
for step in range(6):
    for _ in range(options.accum):
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1)).cuda()
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if options.offload else torch.enable_grad():
            logits = net(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / options.accum
        loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if average is not None:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.001)
    print(step, loss.item(), flush=True)
