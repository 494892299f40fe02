"""Trains in processes that it forks: one of multiprocessing's, and a daemon that leaves its parent and its session."""

import multiprocessing
import os
import time

import torch
from torch import nn

torch.set_num_threads(1)


def train(width, name):
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    print(f"{name} {os.getpid()} {4 * width * width}", flush=True)


def become_daemon():
    """As daemons do: a session of its own, no parent, no open file."""
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.closerange(3, 256)
    return True


if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=train, args=(32, "worker"))
    worker.start()
    worker.join()
    if become_daemon():
        train(64, "daemon")
    else:
        os.wait()
        time.sleep(0.1)
