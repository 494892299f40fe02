"""Programs whose tensors differ from step to step: what is offered is what the program takes with it exported."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_tui.search.fragmentation import EXPANDABLE
from tests.command.running import BLOCK, Project

PROGRAM = f"""\
    import os, random, sys, torch
    from torch import nn
    from torch.nn import functional as F
    SAID
    WIDTH = 512
    random.seed(1)

{BLOCK}
    net = nn.Sequential(nn.Embedding(8000, WIDTH), *[Block() for _ in range(5)], nn.Linear(WIDTH, 8000)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        tokens = torch.randint(0, 8000, (int(sys.argv[1]), random.randint(60, 500))).cuda()
        loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
VARIABLE = "PYTORCH_ALLOC_CONF"


def predicted(project: Project, size: str, said: str = "", **environment: str) -> dict[str, Any]:
    """The traced step at batch 16, or at a command's own batch."""
    project.write("train.py", PROGRAM.replace("SAID", said))
    options = ("--gpu", "sim:rtx-4090-24gb", "--steps", "5", "--json", *(["--batch-size", "16"] if "{" in size else []))
    done = project.run("predict", *options, "--", "python", "train.py", size, environment=environment)
    traced: dict[str, Any] = done.json["traced"]
    return traced


@pytest.mark.slow
def test_what_is_offered_is_what_the_program_takes_with_it(project: Project) -> None:
    found = predicted(project, "{batch}")
    offered, with_it = found["allocator"], predicted(project, "{batch}", **{VARIABLE: EXPANDABLE})
    assert offered["option"] == EXPANDABLE
    assert offered["how"] == f"export {VARIABLE}={EXPANDABLE}"
    assert offered["reserved_bytes_before"] == found["peak_reserved_bytes"] > 1.2 * with_it["peak_reserved_bytes"]
    assert offered["reserved_bytes"] == with_it["peak_reserved_bytes"]
    assert offered["max_batch_size_before"] == found["max_batch_size"] < with_it["max_batch_size"]
    assert offered["max_batch_size"] == with_it["max_batch_size"]
    assert with_it["allocator"] is None


@pytest.mark.slow
def test_a_search_names_the_batch_that_is_safe_with_it(project: Project) -> None:
    project.write("train.py", PROGRAM.replace("SAID", ""))
    words = ("search", "--gpu", "sim:t4-16gb", "--steps", "5", "--json", "--", "python", "train.py", "{batch}")
    found, with_it = (
        project.run(*words, environment=environment).lines[-1] for environment in ({}, {VARIABLE: EXPANDABLE})
    )
    offered = found["allocator"]
    assert (offered["option"], with_it["allocator"]) == (EXPANDABLE, None)
    assert offered["max_batch_size_before"] == found["safe_batch_size"] < with_it["safe_batch_size"]
    assert offered["max_batch_size"] == with_it["safe_batch_size"]


@pytest.mark.slow
def test_a_program_that_has_set_it_is_offered_nothing(project: Project) -> None:
    assert predicted(project, "16", f'os.environ["{VARIABLE}"] = "{EXPANDABLE}"')["allocator"] is None
