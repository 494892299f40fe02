"""Runs a script as `python SCRIPT` would, then counts on its own what the script trains, and prints that as JSON.

The count shares nothing with the probe: elements times their size, over the modules and optimizers that are globals of
the script, every tensor object once.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_kept: list[Any] = []
"""What the script made lives until the process has ended, as it would in a script of its own."""


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for part in [local._indices(), local._values()] if local.is_sparse else [local]:
            total += part.numel() * part.element_size()
    return total


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    holder = getattr(optimizer, "optim", optimizer)
    for state in holder.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def main(script: str) -> None:
    import gpumem_tui.probe.probe as probe

    probe.INTERVAL_S = 0.02  # short runs, sampled often
    probe.SAMPLE_SHARE = 1.0
    found = runpy.run_path(script, run_name="__main__").values()
    _kept.extend(found)
    optimizers = [value for value in found if isinstance(value, torch.optim.Optimizer)]
    models = [value for value in found if isinstance(value, torch.nn.Module)]
    parameters = [p for model in models for p in model.parameters()]
    counts = {
        "rank": int(os.environ.get("RANK", 0)),
        "parameters": _bytes(parameters) + _bytes(b for model in models for b in model.buffers()),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": _bytes(tensor for optimizer in optimizers for tensor in _state(optimizer)),
    }
    if "torch._dynamo.utils" in sys.modules:
        counters = sys.modules["torch._dynamo.utils"].counters
        counts["frames"], counts["graphs"] = counters["frames"]["total"], counters["stats"]["unique_graphs"]
    sys.stdout.write(f"counted {json.dumps(counts)}\n")  # one write: ranks share the terminal
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
