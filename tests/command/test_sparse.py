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


ROWS, WIDTH, IDS = 50_000, 64, 8192
TABLE = 4 * ROWS * WIDTH
GRADIENT = IDS * (4 * WIDTH + 8)
"""A row of values and an index for each id of the batch, as no two of them are added up before an optimizer asks."""


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("SGD", 0), ("SparseAdam", 2 * TABLE), ("Adagrad", TABLE)],
)
def test_sparse_gradients_take_what_the_batch_has_of_rows(
    project: Project, kind: str, optimizer: str, state_bytes: int
) -> None:
    project.write(
        "train.py",
        f"""
        import torch

        table = torch.nn.{kind}({ROWS}, {WIDTH}, sparse=True).cuda()
        optimizer = torch.optim.{optimizer}(list(table.parameters()), lr=0.1)
        gradient = None
        for step in range(4):
            optimizer.zero_grad()
            del gradient
            ids = None
            before = torch.cuda.memory_allocated()
            ids = torch.randint({ROWS}, ({IDS},)).cuda()
            table(ids.view(-1, 4) if "{kind}" == "EmbeddingBag" else ids).square().sum().backward()
            gradient = table.weight.grad
            print("step", step, gradient.is_sparse, gradient._nnz(), torch.cuda.memory_allocated() - before)
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py")
    found = done.json["traced"]
    for step in range(3):
        assert f"step {step} True {IDS} {GRADIENT}" in done.stderr
    assert found["highest"]["parameters"]["bytes"] == TABLE
    assert found["highest"].get("optimizer", {"bytes": 0})["bytes"] == state_bytes
    assert GRADIENT - IDS * 8 <= found["highest"]["gradients"]["bytes"] <= GRADIENT


def test_sparse_gradients_add_up_over_passes_and_momentum_keeps_them(project: Project) -> None:
    project.write(
        "train.py",
        f"""
        import torch

        table = torch.nn.Embedding({ROWS}, {WIDTH}, sparse=True, device="cuda")
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            for part in range(2):
                table(torch.randint({ROWS}, ({IDS},)).cuda()).sum().backward()
            kept = table.weight.grad._nnz()
            optimizer.step()
            buffer = optimizer.state[table.weight]["momentum_buffer"]
            optimizer.zero_grad(set_to_none=False)
            print("step", step, kept, buffer._nnz(), table.weight.grad._nnz())
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.complaint
    for step in range(2):
        assert f"step {step} {2 * IDS} {2 * IDS * (step + 1)} 0" in done.stderr


def test_what_is_not_followed_of_sparse_gradients_is_one_clear_line(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        table = torch.nn.Embedding(1000, 64, sparse=True).cuda()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for step in range(10):
            table(torch.randint(1000, (8, 1)).cuda()).sum().backward()
            torch.sparse.softmax(table.weight.grad, 1)
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "sparse=False" in done.complaint
    assert done.complaint.endswith("(train.py:8)")


def test_jagged_tensors_take_what_their_values_take(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from torch import nn

        table = nn.Embedding(100, 64).cuda()
        layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 100)).cuda()
        optimizer = torch.optim.AdamW([*table.parameters(), *layers.parameters()])
        for _ in range(5):
            rows = [torch.randint(100, (length,)) for length in (3000, 1000)]
            words = torch.nested.as_nested_tensor(rows, layout=torch.jagged, device="cuda")
            before = torch.cuda.memory_allocated()
            out = nn.functional.dropout(layers(table(words)), 0.1)
            print("holds", torch.cuda.memory_allocated() - before)
            nn.functional.cross_entropy(out.values(), words.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    held = [int(line.split()[-1]) for line in done.stderr.splitlines() if "holds" in line]
    rows = 4000  # no padding: embedded, normalized with two statistics, two wide ones, and a result with its mask
    assert held[-1] == pytest.approx(rows * (2 * 64 * 4 + 2 * 4 + 2 * 4096 * 4 + 2 * 100 * 4 + 100), rel=0.08)


def test_jagged_attention_of_no_fused_kernel_is_one_clear_line(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from torch import nn

        layer = nn.Linear(8, 8).cuda()
        rows = torch.nested.nested_tensor_from_jagged(torch.randn(8, 8).cuda(), torch.tensor([0, 3, 8]).cuda())
        query = layer(rows).double().unflatten(-1, (2, 4)).transpose(1, 2)
        nn.functional.scaled_dot_product_attention(query, query, query)
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "works on a jagged tensor" in done.complaint
    assert done.complaint.endswith("(train.py:8)")
