"""A notebook's cells in one namespace; the one that makes the model is run again, larger, and then trained again."""

import torch

IMPORTS = "import torch\nfrom torch import nn"
MODEL = """
model = nn.Sequential(nn.Linear(16, {width}), nn.ReLU(), nn.Linear({width}, 16))
optimizer = torch.optim.Adam(model.parameters())
"""
TRAIN = """
for _ in range(30):
    x = torch.randn(8, 16)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

torch.manual_seed(0)
cells = {"__name__": "__main__"}
for number, cell in enumerate([IMPORTS, MODEL.format(width=32), TRAIN, MODEL.format(width=512), TRAIN, TRAIN]):
    exec(compile(cell, f"<ipython-input-{number}>", "exec"), cells)
