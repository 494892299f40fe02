"""Two optimizers on one model: sparse gradients for the embedding, momentum for the rest; one overrides `step`."""

import torch
from torch import nn


class Clipped(torch.optim.SGD):
    """Clips, then steps as its parent does."""

    @torch.no_grad()
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


torch.manual_seed(0)
model = nn.ModuleDict({"embedding": nn.Embedding(100, 8, sparse=True), "head": nn.Linear(8, 100)})
sparse = torch.optim.SparseAdam(model["embedding"].parameters())
dense = Clipped(model["head"].parameters(), lr=0.1, momentum=0.9)
for _ in range(40):
    tokens = torch.randint(0, 100, (16,))
    loss = nn.functional.cross_entropy(model["head"](model["embedding"](tokens)), tokens)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
