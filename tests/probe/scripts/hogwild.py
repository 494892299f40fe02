"""Processes that train one model in shared memory without locks; each shows what it has."""

import json

import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for _ in range(20):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
    sizes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        "counted " + json.dumps({"rank": rank, "parameters": sizes, "gradients": sizes, "optimizer": sizes}), flush=True
    )


if __name__ == "__main__":
    mp.set_start_method("spawn")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
