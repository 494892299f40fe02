"""Accelerate's launcher and its training loop, on the simulated GPU."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("accelerate")]

SCRIPT = """
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1000, 256), torch.randint(0, 10, (1000,)))
    training = DataLoader(data, batch_size=32, shuffle=True)
    held_out = DataLoader(TensorDataset(torch.randn(70, 256), torch.arange(70)), batch_size=32)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model, optimizer, training, held_out, schedule = accelerator.prepare(model, optimizer, training, held_out, schedule)
    print(accelerator.num_processes, accelerator.device, accelerator.mixed_precision)

    seen = 0
    for inputs, targets in held_out:
        with torch.no_grad():
            found = model(inputs).argmax(-1)
        found, wanted = accelerator.gather_for_metrics((found, targets))
        seen += len(wanted)
    print("seen", seen)
    for epoch in range(3):
        for inputs, targets in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state("state")
"""
PARAMETER_BYTES = 4 * (256 * 1024 + 1024 + 1024 * 10) + 512
"""The bias of 10 numbers takes a block of 512 bytes."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "1 cuda no"),
        (("--mixed_precision", "bf16"), "1 cuda bf16"),
        (("--multi_gpu", "--num_processes", "4", "--mixed_precision", "bf16"), "4 cuda:0 bf16"),
    ],
    ids=["one process", "bf16", "rank 0 of 4"],
)
def test_buckets_of_a_launched_loop(project: Project, options: tuple[str, ...], said: str) -> None:
    project.write("train.py", SCRIPT)
    done = project.predict("python", "-m", "accelerate.commands.launch", *options, "train.py")
    buckets = done.json["traced"]["buckets"]
    assert buckets["parameters"] == buckets["gradients"] == PARAMETER_BYTES
    assert buckets["optimizer"] == 2 * PARAMETER_BYTES
    assert f"| {said}" in done.stderr
    assert "| seen 70" in done.stderr
