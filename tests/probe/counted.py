"""Runs a script as `python SCRIPT` would, then counts on its own what the script trains, and prints that as JSON.

The count shares nothing with the probe: elements times their size, over the modules and optimizers that are globals of
the script or in a dictionary that is one, every tensor object once.
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
"""Objects that the script made live until the process has ended, as in a script of its own."""


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
        parts = [part for value in state.values() for part in (value if type(value) is list else [value])]
        yield from (part for part in parts if isinstance(part, torch.Tensor))


def main() -> None:
    import gpumem_tui.probe.probe as probe

    del sys.argv[0]
    probe.INTERVAL_S = 0.002  # short runs, sampled often
    probe.SAMPLE_SHARE = 1.0
    made = runpy.run_path(sys.argv[0], run_name="__main__").values()
    found = [thing for value in made for thing in (value.values() if type(value) is dict else (value,))]
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
    main()
