"""Compiled training over several GPUs that others measured: torchtitan's Llama 3.1 8B, each layer compiled.

`torchrun --nproc-per-node 8 tests/published/compiled_sharded.py --batch-size 2 --sequence 8192` is row titan-2.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from tests.published.sharded import Row, sharded, train

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--recompute", default="op")
    parser.add_argument("--float8", action="store_true")
    asked = parser.parse_args()
    dist.init_process_group("nccl")
    row = Row("", "", dist.get_world_size(), asked.batch_size, asked.sequence, asked.recompute, 0.0, "", 0.0)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    train(sharded(row, device, compiled=True, float8=asked.float8), row, device)
