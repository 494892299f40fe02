"""Weights that a program loads onto the GPU: a checkpoint, until the program makes them its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.command.running import Project, needs

SCRIPT = """
    import sys, torch
    from torch import nn

    how, where = sys.argv[1:]
    net = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
    optimizer = torch.optim.AdamW(net.parameters())
    if how == "safetensors":
        from safetensors.torch import load_file, save_file
        save_file({name: torch.zeros(value.shape) for name, value in net.state_dict().items()}, "net.safetensors")
        kept = load_file("net.safetensors", device=where)
        net.load_state_dict(kept)
    elif how == "data":
        kept = torch.load("data.pt", map_location=where)
    else:
        kept = torch.load("checkpoint.pt", map_location=where)
        net.load_state_dict(kept["net"])
    net.cuda()
    if how in ("both", "dropped"):
        optimizer.load_state_dict(kept["optimizer"])
    if how == "dropped":
        del kept
    for _ in range(3):
        net(torch.ones(4, 1000, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WEIGHTS_BYTES = 4 * 1001 * 1000 * 4
STATE_BYTES = 2 * WEIGHTS_BYTES


@pytest.fixture
def written(project: Project) -> Project:
    """A folder with the script, a checkpoint of it and data."""
    project.write("train.py", SCRIPT)
    net = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 1000)).sum().backward()
    optimizer.step()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, project.folder / "checkpoint.pt")
    torch.save({"images": torch.zeros(1000, 4000), "labels": torch.zeros(4000)}, project.folder / "data.pt")
    return project


@pytest.mark.scripts
@pytest.mark.parametrize(
    ("how", "where", "held_bytes"),
    [
        ("net", "cuda", WEIGHTS_BYTES + STATE_BYTES),
        ("both", "cuda", WEIGHTS_BYTES),
        ("dropped", "cuda", 0),
        ("both", "cpu", 0),
        pytest.param("safetensors", "cuda", WEIGHTS_BYTES, marks=needs("safetensors")),
    ],
)
def test_a_checkpoint_on_the_gpu_has_its_name(written: Project, how: str, where: str, held_bytes: int) -> None:
    """An optimizer keeps what it loads; a network copies it, so that the file's weights stay next to its own."""
    traced = written.predict("python", "train.py", how, where).json["traced"]
    parts = {one["part"]: one["bytes"] for one in traced["parts"] if one["bucket"] == "other"}
    assert parts.get("checkpoint", 0) == pytest.approx(held_bytes, rel=0.01)
    assert traced["buckets"]["batch_data"] < 100_000
    assert traced["buckets"]["optimizer"] == pytest.approx(STATE_BYTES, rel=0.01)
    causes = [one for one in traced["causes"] if one["cause"] == "kept_checkpoint"]
    loaded_at = "train.py:11" if how == "safetensors" else "train.py:16"
    assert [one["line"] for one in causes] == ([loaded_at] if held_bytes else [])


@pytest.mark.scripts
def test_data_that_is_loaded_onto_the_gpu_is_data(written: Project) -> None:
    traced = written.predict("python", "train.py", "data", "cuda").json["traced"]
    assert traced["buckets"]["batch_data"] > 1000 * 4000 * 4
    assert not [one for one in traced["parts"] if one["part"] == "checkpoint"]
