"""Ranks of which one stops in its 20th forward: asleep, in a loop, or at a lock; the others wait for it."""

import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from gpumem_tui.probe import stall

stall.EVERY_S, stall.STOPPED_S = 0.2, 1.0  # so that nobody waits for long

how, stopper, wrapped = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "ddp"
dist.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if dist.get_rank() == stopper and self.calls == 20:
            stop()
        return self.layer(x)


def stop() -> None:
    if how == "sleep":
        time.sleep(1000)  # asleep
    while how == "loop":
        pass  # in a loop
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # at a lock


model: nn.Module = Net()
model = nn.parallel.DistributedDataParallel(model) if wrapped else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 16)).sum().backward()
    if not wrapped:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
