"""Gradients of each sample, by Opacus' hooks on modules and tensors, and by `torch.func`."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("opacus")]

BATCH, WEIGHTS_BYTES = 32, 4 * (256 * 512 + 512 + 512 * 10 + 10)

TRAINING = """
    import torch
    from opacus import PrivacyEngine
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(256, 256), torch.randint(0, 10, (256,)))
    ask = nn.CrossEntropyLoss()
    net, optimizer, *rest, loader = PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=%d), poisson_sampling=False,
        noise_multiplier=1.0, max_grad_norm=1.0, criterion=ask, grad_sample_mode=%r,
    )
    ask = rest[0] if rest else ask
    for x, label in loader:
        optimizer.zero_grad()
        ask(net(x.cuda()), label.cuda()).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_gradients_of_each_sample(project: Project, mode: str) -> None:
    """As many gradients as samples lie next to the weights; the ghost's norms need none of them."""
    project.write("train.py", TRAINING % (BATCH, mode))
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    traced = done.json["traced"]
    assert traced["highest"]["parameters"]["bytes"] == pytest.approx(WEIGHTS_BYTES, rel=0.02)
    assert traced["highest"]["optimizer"]["bytes"] == pytest.approx(WEIGHTS_BYTES, rel=0.02)
    without_workspaces_bytes = traced["peak_allocated_bytes"] - 2 * (17 << 19)
    samples_bytes = BATCH * WEIGHTS_BYTES
    if mode == "ghost":
        assert without_workspaces_bytes < samples_bytes
    else:
        assert samples_bytes < without_workspaces_bytes < 2.5 * samples_bytes
