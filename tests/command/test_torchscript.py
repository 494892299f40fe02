"""Networks that TorchScript runs: scripted before or after they go to the GPU, traced, saved and loaded."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

WEIGHTS_BYTES = 4 * (4 * 64 * (64 + 64 + 2) + 64 * 64 + 64)
"""The parameters of an LSTM and a linear layer, 64 wide."""

TRAINING = """
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 64)

        def forward(self, x):
            hidden, _ = self.lstm(x)
            return torch.relu(self.head(hidden))

    x = torch.randn(8, 32, 64, device="cuda")
    %s
    assert all(one.is_cuda for one in net.parameters())
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(4):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "makes",
    [
        "net = torch.jit.script(Tagger().cuda())",
        "net = torch.jit.script(Tagger()).cuda()",
        "net = torch.jit.trace(Tagger().cuda(), x)",
        "torch.jit.script(Tagger()).save('net.pt'); net = torch.jit.load('net.pt', map_location='cuda').train()",
        "torch.jit.script(Tagger()).save('net.pt'); net = torch.jit.load('net.pt').train().cuda()",
    ],
)
def test_a_script_module_trains(project: Project, makes: str) -> None:
    project.write("train.py", TRAINING % makes)
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    highest = {name: one["bytes"] for name, one in done.json["traced"]["highest"].items()}
    assert highest["parameters"] == pytest.approx(WEIGHTS_BYTES, rel=0.01)
    assert highest["gradients"] == pytest.approx(WEIGHTS_BYTES, rel=0.01)
    assert highest["optimizer"] == pytest.approx(2 * WEIGHTS_BYTES, rel=0.01)
