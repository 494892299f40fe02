"""Two GCN layers with one of attention between them (torch-geometric) on a random graph."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GCNConv

NODES, EDGES = 60_000, 900_000
torch.manual_seed(0)
x = torch.randn(NODES, 256).cuda()
edges = torch.randint(0, NODES, (2, EDGES)).cuda()
y = torch.randint(0, 40, (NODES,)).cuda()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GCNConv(256, 256)
        self.second = GATConv(256, 64, heads=4)
        self.third = GCNConv(256, 40)

    def forward(self, x, edges):
        x = F.dropout(F.relu(self.first(x, edges)), 0.5, self.training)
        return self.third(F.elu(self.second(x, edges)), edges)


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(6):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x, edges), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
