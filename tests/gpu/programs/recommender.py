"""A click model: bags of sparse embeddings with SparseAdam, dense layers with Adagrad."""

import torch
from torch import nn

ROWS, TABLES, WIDTH, BATCH = 400_000, 8, 64, 16384


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, WIDTH), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, dense, ids, offsets):
        low = self.bottom(dense)
        parts = torch.stack([low, *(table(ids[i], offsets) for i, table in enumerate(self.tables))], 1)
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, -1, device=dense.device)
        products = torch.bmm(parts, parts.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([low, products], 1)).squeeze(1)


net = Net().cuda()
dense = [p for name, p in net.named_parameters() if not name.startswith("tables")]
optimizers = [torch.optim.SparseAdam(list(net.tables.parameters()), 1e-3), torch.optim.Adagrad(dense, 1e-2)]
for step in range(6):
    x = torch.rand(BATCH, 13).cuda()
    ids = torch.randint(0, ROWS, (TABLES, 4 * BATCH)).cuda()
    offsets = torch.arange(0, 4 * BATCH, 4).cuda()
    y = torch.rand(BATCH).round().cuda()
    loss = nn.functional.binary_cross_entropy_with_logits(net(x, ids, offsets), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print(step, loss.item(), flush=True)
