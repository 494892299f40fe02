"""Packages that are compiled for CUDA, in programs that are followed on the simulated GPU: stood in for, or refused."""

from __future__ import annotations

from tests.command.running import Project

FLASH = """
    import importlib.util, sys
    import torch
    from flash_attn import flash_attn_func
    print("found", importlib.util.find_spec("flash_attn_2_cuda") is not None, flash_attn_func.__module__)

    projection = torch.nn.Linear(256, 768, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(projection.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16)
        query, key, value = projection(x).view(8, 512, 3, 4, 64).unbind(2)
        out = flash_attn_func(query, key, value, causal=True)
        optimizer.zero_grad()
        out.float().square().mean().backward()
        optimizer.step()
"""


def test_a_package_that_is_not_installed_is_stood_in_for(project: Project) -> None:
    project.write("train.py", FLASH)
    body = project.predict("python", "train.py").json
    assert any(
        "flash-attn is not run: its kernels are stood in for by shape" in note for note in body["traced"]["notes"]
    )
    refused = project.predict("python", "train.py", gpu="t4-16gb")
    assert refused.code != 0
    assert "train.py:12: RuntimeError: FlashAttention only supports Ampere GPUs or newer" in refused.complaint
