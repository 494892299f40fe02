"""Products in float8: --by scaled (torch._scaled_mm in an autograd function) or torchao (its training)."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--by", default="scaled", choices=["scaled", "torchao"])
options = parser.parse_args()


def float8(x, precision):
    scale = torch.finfo(precision).max / x.abs().amax().float().clamp(min=1e-12)
    return (x * scale).to(precision), scale.reciprocal()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        left, left_scale = float8(x, torch.float8_e4m3fn)
        right, right_scale = float8(weight, torch.float8_e4m3fn)
        return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        left, left_scale = float8(gradient.contiguous(), torch.float8_e5m2)
        right, right_scale = float8(weight.t().contiguous(), torch.float8_e4m3fn)
        to_x = torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16)
        return to_x, gradient.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


WIDTH = 2048
linear = Linear8 if options.by == "scaled" else nn.Linear
net = nn.Sequential(
    *(
        nn.Sequential(
            nn.LayerNorm(WIDTH), linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), linear(4 * WIDTH, WIDTH, bias=False)
        )
        for _ in range(6)
    )
).to("cuda", torch.bfloat16)
if options.by == "torchao":
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(net)
optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
for step in range(6):
    x = torch.randn(8192, WIDTH).to("cuda", torch.bfloat16)
    loss = nn.functional.mse_loss(net(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
