"""Memory that every rank puts on GPU 0 before it has chosen its own is counted there, and named with its remedy."""

from __future__ import annotations

import pytest

from tests.command.running import Project

GIB = 1 << 30
SCRIPT = """
    import os, sys, torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    if "early" in sys.argv:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    held = torch.zeros(1 << 28, device="cuda")
    torch.cuda.set_device(rank)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(f"cuda:{rank}"), device_ids=[rank])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        net(torch.randn(8, 64, device=f"cuda:{rank}")).sum().backward()
        optimizer.step()
"""
LAUNCH = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py")


@pytest.mark.slow
def test_other_ranks_on_gpu_0_are_counted_and_named(project: Project) -> None:
    project.write("train.py", SCRIPT)
    late = project.predict(*LAUNCH, gpu="v100-16gb").json["traced"]
    early = project.predict(*LAUNCH, "early", gpu="v100-16gb").json["traced"]
    (note,) = [note for note in late["notes"] if "other ranks" in note]
    assert note.startswith("train.py:9: each of 3 other ranks opens a CUDA context and 1.00 GiB of tensors on GPU 0")
    assert note.endswith("remedy: torch.cuda.set_device(local_rank) before the first CUDA call")
    assert not any("other ranks" in note for note in early["notes"])
    assert late["context_bytes"] > early["context_bytes"] + 3 * GIB
    assert late["peak_allocated_bytes"] == early["peak_allocated_bytes"]
