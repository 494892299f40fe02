"""Sparse matrices on the GPU, as networks on graphs multiply with them."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

NODES, EDGES = 2000, 100_000


def test_a_graph_network_on_a_sparse_adjacency_matrix(project: Project) -> None:
    project.write(
        "train.py",
        f"""
        import torch
        from torch import nn

        edges = torch.randint({NODES}, (2, {EDGES}))
        adjacency = torch.sparse_coo_tensor(edges, torch.ones({EDGES}), ({NODES}, {NODES}))
        before = torch.cuda.memory_allocated()
        adjacency = adjacency.cuda()
        print("adjacency", torch.cuda.memory_allocated() - before, adjacency.is_sparse, adjacency.device)
        first, second = nn.Linear(64, 32).cuda(), nn.Linear(32, 4).cuda()
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
        features = torch.randn({NODES}, 64).cuda()
        for epoch in range(10):
            hidden = torch.spmm(adjacency, first(features)).relu()
            out = torch.sparse.mm(adjacency, second(hidden))
            assert (adjacency @ hidden).shape == ({NODES}, 32)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    indices, values = 2 * 8 * EDGES, 4 * EDGES
    assert f"adjacency {indices + -(-values // 512) * 512} True cuda:0" in done.stderr
    transposed = done.json["traced"]["peak_allocated_bytes"] - indices - values
    assert transposed >= indices + values


def test_a_sparse_gradient_is_one_clear_line(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        table = torch.nn.Embedding(1000, 64, sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        for step in range(10):
            table(torch.randint(1000, (8,)).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "sparse=False" in done.complaint
    assert "in backward" in done.complaint
