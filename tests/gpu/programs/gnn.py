"""Message passing written out with index_add, on batches of small graphs whose sizes differ."""

import torch
from torch import nn

WIDTH, LAYERS = 512, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, source, target):
        messages = self.message(torch.cat([x[source], x[target]], 1))
        return self.update(torch.zeros_like(x).index_add(0, target, messages), x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, atoms, source, target, graph, graphs):
        x = self.atoms(atoms)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x.new_zeros(graphs, WIDTH).index_add_(0, graph, x)).squeeze(1)


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
g = torch.Generator().manual_seed(0)
for step in range(6):
    sizes = torch.randint(16, 25, (512,), generator=g)
    graph = torch.repeat_interleave(torch.arange(512), sizes)
    nodes = int(sizes.sum())
    source = torch.arange(nodes).repeat_interleave(4)
    target = (source + torch.randint(1, 8, (4 * nodes,), generator=g)) % nodes
    atoms = torch.randint(0, 100, (nodes,), generator=g)
    batch = [each.cuda() for each in (atoms, source, target, graph)]
    y = torch.randn(512, generator=g).cuda()
    loss = nn.functional.mse_loss(net(*batch, 512), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
