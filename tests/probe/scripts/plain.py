"""A plain loop: a head that shares its weight with the embedding, and a frozen layer."""

import torch
from torch import nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.frozen = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        x = F.gelu(self.hidden(self.norm(self.frozen(x))))
        return self.head(x)


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for _ in range(40):
    tokens = torch.randint(0, 50, (8, 12))
    loss = F.cross_entropy(model(tokens), tokens[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
