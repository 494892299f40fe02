"""DeepSpeed's ZeRO on the simulated GPU: every stage, with the optimizer on the host as well, each part by its name."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("deepspeed")]

WIDTH, LAYERS, RANKS, BUCKET = 512, 6, 4, 1_000_000
SCRIPT = f"""
    import json, resource, sys
    import deepspeed
    import torch
    from torch import nn

    stage, device = int(sys.argv[1]), sys.argv[2]
    model = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})])
    zero = {{
        "stage": stage, "reduce_bucket_size": {BUCKET}, "offload_optimizer": {{"device": device}},
        "stage3_param_persistence_threshold": 0,
    }}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={{
            "train_micro_batch_size_per_gpu": 2, "bf16": {{"enabled": True}}, "zero_optimization": zero,
            "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
        }},
    )
    for step in range(5):
        loss = engine(torch.randn(2, {WIDTH}, device=engine.device, dtype=torch.bfloat16)).float().sum()
        engine.backward(loss)
        engine.step()
        kept = [one for state in engine.optimizer.optimizer.state.values() for one in state.values()]
        kept = [one for one in kept if torch.is_tensor(one) and one.numel() > 1]
        print(step, len(kept), {{str(one.device) for one in kept}}, flush=True)
"""
COUNT = LAYERS * WIDTH * WIDTH


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_zero_keeps_has_its_names(project: Project, stage: int) -> None:
    project.write("train.py", SCRIPT)
    done = project.predict("torchrun", "--nproc-per-node", str(RANKS), "train.py", str(stage), "none", gpu="h100-80gb")
    traced = done.json["traced"]
    found = {one["part"]: one["bytes"] for one in traced["parts"] if one["part"] != "the rest"}
    buckets = traced["buckets"]
    assert found["fp32 master weights"] == 4 * COUNT // RANKS
    assert buckets["optimizer"] == 3 * 4 * COUNT // RANKS
    assert buckets["parameters"] == (2 * COUNT // RANKS if stage == 3 else 2 * COUNT)
    assert found["reduce buckets"] >= 2 * BUCKET
    assert ("gathered parameters" in found) == (stage == 3)
    if stage == 3:
        assert found["gradient partitions"] == 2 * COUNT // RANKS
        assert found["gathered parameters"] >= 2 * WIDTH * WIDTH
    assert buckets["other"] < 1 << 20
    assert not any("frozen" in part for part in found)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_on_the_host_takes_no_memory_there(project: Project, stage: int) -> None:
    wide = SCRIPT.replace(f"nn.Linear({WIDTH}, {WIDTH}, bias=False)", "nn.Linear(4096, 4096, bias=False)")
    most = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    project.write(
        "train.py",
        wide.replace(f"range({LAYERS})", "range(16)")
        .replace(f"torch.randn(2, {WIDTH}", "torch.randn(2, 4096")
        .replace("model = nn", f"before = {most}\n    model = nn")
        .replace("print(step, len(kept)", f"print('grown KiB', {most} - before, len(kept)"),
    )
    done = project.predict("torchrun", "--nproc-per-node", str(RANKS), "train.py", str(stage), "cpu", gpu="h100-80gb")
    traced = done.json["traced"]
    assert traced["buckets"]["optimizer"] == 0
    steps = [phase["buckets"] for phase in traced["phases"] if phase["step"]]
    assert steps
    assert all(buckets["other"] < 1 << 20 for buckets in steps), "the buffer through which gradients go has its name"
    printed = [
        line.partition("grown KiB ")[2].split(" ", 1) for line in done.stderr.splitlines() if "grown KiB" in line
    ]
    assert printed
    assert {kept for _, kept in printed[1:]} == {"2 {'cpu'}"}
    partition_kib = 16 * 4096 * 4096 * 4 // RANKS // 1024
    assert max(int(grown) for grown, _ in printed) < partition_kib, "gradients and two moments would take three"


def test_gradients_whose_optimizer_is_on_the_host_are_gradients(project: Project) -> None:
    pytest.importorskip("torchao")
    project.write(
        "train.py",
        """
        import torch
        from torch import nn
        from torchao.optim import CPUOffloadOptimizer

        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
        optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)
        for step in range(5):
            model(torch.randn(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    traced = project.predict("python", "train.py").json["traced"]
    backward = [phase for phase in traced["phases"] if phase["phase"] == "backward"]
    assert len(backward) > 1
    assert {phase["buckets"]["gradients"] for phase in backward} == {4 * 4 * 1024 * 1024}
