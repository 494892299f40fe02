"""CUDA graphs by hand: --by graph (the whole step) or callables (make_graphed_callables of the network)."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--by", default="graph", choices=["graph", "callables"])
options = parser.parse_args()

WIDTH = 2048
net = nn.Sequential(
    *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-4, capturable=True)
x = torch.randn(4096, WIDTH, device="cuda")
y = torch.randn(4096, WIDTH, device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    return loss


if options.by == "graph":
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    for number in range(6):
        x.copy_(torch.randn(4096, WIDTH))
        y.copy_(torch.randn(4096, WIDTH))
        graph.replay()
        print(number, loss.item(), flush=True)
else:
    net = torch.cuda.make_graphed_callables(net, (torch.randn(4096, WIDTH, device="cuda"),))
    for number in range(6):
        x.copy_(torch.randn(4096, WIDTH))
        loss = step()
        print(number, loss.item(), flush=True)
