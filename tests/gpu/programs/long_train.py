"""Trains for SECONDS with pauses and writes to FILE what it truly holds: python long_train.py SECONDS FILE.

--leak keeps the logits of every step; --oom does so under a limit of 8 GiB, and dies of it. --small is for a machine
without a GPU.
"""

import json
import os
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

until = time.time() + float(sys.argv[1])
truth = sys.argv[2]
leaks = "--leak" in sys.argv or "--oom" in sys.argv
if "--oom" in sys.argv:
    torch.cuda.set_per_process_memory_fraction(8 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
device = "cuda" if torch.cuda.is_available() else "cpu"
small = "--small" in sys.argv
if small:
    torch.set_num_threads(1)
words = 1000 if small else 32000
config = LlamaConfig(
    vocab_size=words,
    hidden_size=128 if small else 1024,
    intermediate_size=256 if small else 2816,
    num_hidden_layers=2 if small else 8,
    num_attention_heads=16,
    num_key_value_heads=4,
)
batch = (1, 16) if small else (4, 512)
net = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(net.parameters(), 1e-4)


def held_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t) and t.device.type == device)


kept = []
step = 0
while time.time() < until:
    x = torch.randint(0, words, batch).to(device)
    with torch.autocast(device, torch.bfloat16):
        out = net(input_ids=x, labels=x)
        loss = out.loss
    loss.backward()
    optimizer.step()
    if leaks:
        kept.append(out.logits.detach().float())
    said = {
        "pid": os.getpid(),
        "step": step,
        "parameters": held_bytes(net.parameters()),
        "gradients": held_bytes(p.grad for p in net.parameters()),
        "optimizer": held_bytes(t for state in optimizer.state.values() for t in state.values()),
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }
    with open(truth + ".new", "w") as file:
        json.dump(said, file)
    os.replace(truth + ".new", truth)
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
    step += 1
    time.sleep(0.02)
