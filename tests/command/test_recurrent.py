"""Recurrent layers in commands and workload files: every kind traces, and shows what is assumed of cuDNN."""

from __future__ import annotations

import pytest

from tests.command.running import Project

UNITS, STEPS = 128, 100

NET = f"""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, {UNITS}, 2, batch_first=True, bidirectional=True, dropout=0.2, proj_size=32)
        self.gru = nn.GRU(64, {UNITS}, 2, batch_first=True, dropout=0.1)
        self.plain = nn.RNN({UNITS}, {UNITS}, batch_first=True)
        self.head = nn.Linear({UNITS}, 1000)

    def forward(self, words, lengths):
        values, _ = self.lstm(self.embedding(words))
        packed = pack_padded_sequence(values, lengths, True, enforce_sorted=False)
        values, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(self.plain(values)[0])
"""

SCRIPT = (
    NET
    + f"""
import sys

size = int(sys.argv[1])
net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(10):
    words = torch.randint(1000, (size, {STEPS})).cuda()
    out = net(words, torch.full((size,), {STEPS}))
    nn.functional.cross_entropy(out.flatten(0, 1), words.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

WORKLOAD = (
    NET
    + f"""

def build(device):
    net = Net().to(device)
    return net, torch.optim.Adam(net.parameters())


def make_batch(batch_size, device):
    return torch.randint(1000, (batch_size, {STEPS}), device=device)


def train_step(net, optimizer, words):
    out = net(words, torch.full((len(words),), {STEPS}))
    nn.functional.cross_entropy(out.flatten(0, 1), words.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


@pytest.mark.slow
def test_a_command_and_a_workload_file_agree(project: Project) -> None:
    project.write("train.py", SCRIPT)
    project.write("step.py", WORKLOAD)
    by_command = project.predict("python", "train.py", "64").json["traced"]
    by_file = project.run(
        "predict", "--json", "--gpu", "sim:a100-80gb", "--workload", "step.py", "--batch-size", "64"
    ).json["traced"]
    for traced in (by_command, by_file):
        assert any("cuDNN's reserve is as measured" in note for note in traced["notes"])
    assert by_command["peak_allocated_bytes"] == pytest.approx(by_file["peak_allocated_bytes"], rel=0.01)
    sequences = 64 * STEPS * 4
    lstm = 2 * (2 * (5 + 1) * UNITS + 2 * 32)  # both directions, two layers, and the output of one twice
    gru, plain = (2 * 6 + 2) * UNITS, UNITS
    assert by_command["peak_allocated_bytes"] > sequences * (lstm + gru + plain)
