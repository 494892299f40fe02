"""cuDNN's workspace for each convolution of a recorded run: `python -m tests.gpu.convolutions HISTORY MODEL BATCH`.

HISTORY is an allocator history, `*.events.json.gz`, of a program that trains MODEL of timm. Prints the rows of
`tests/recordings/h200/convolutions.csv`: a workspace is between the result that it is for and what is made next.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COLUMNS = (
    "program", "pass", "dtype", "order", "input", "weight", "result", "stride", "padding", "transposed", "bytes",
    "tried_bytes",
)  # fmt: skip
_PIXELS = 224


@dataclass
class Allocation:
    """A request: its size, where it was made, and the number of the next request when it was given back."""

    size_bytes: int
    site: str
    freed_before: int | None = None

    def is_for_a_moment(self, number: int) -> bool:
        """Return whether nothing was made while it, request `number`, was held."""
        return self.freed_before == number + 1


class _Layers(TorchDispatchMode):
    """Collects the convolutions of a step, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]] = []
        self.backward: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._opname == "convolution":
            self.forward.append((args[0], args[1], result, args[3:9]))
        elif func._opname == "convolution_backward":
            self.backward.append((args[1], args[2], args[0], (*args[4:10], args[10])))
        return result


def allocations(path: Path) -> list[Allocation]:
    """Read a history's requests in order."""
    history = json.loads(gzip.decompress(path.read_bytes()))
    found: list[Allocation] = []
    live: dict[int, int] = {}
    for action, address, size_bytes, _, site in next(filter(None, history["traces"])):
        if action == "alloc":
            live[address] = len(found)
            found.append(Allocation(size_bytes, history["sites"][site]))
        elif action == "free_completed" and address in live:
            found[live.pop(address)].freed_before = len(found)
    return found


def rows(program: str, made: Sequence[Allocation], layers: _Layers) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each pass of the first step, in order; what is tried comes before what it settles on."""
    at = 0
    for images, weight, result, settings in layers.forward:
        while made[at].size_bytes != result.nbytes or "_conv_forward" not in made[at].site:
            at += 1
        taken, at = _momentary(made, at + 1, forward=True)
        yield _row(program, "result", images, weight, result, settings, taken)
    for images, weight, gradient, (*settings, wanted) in layers.backward:
        while True:
            of_input, end = _momentary(made, at + 1) if wanted[0] else ([], at)
            if (not wanted[0] or made[at].size_bytes == images.nbytes) and made[end].size_bytes == weight.nbytes:
                break
            at += 1
        of_weight, at = _momentary(made, end + 1)
        if wanted[0]:
            yield _row(program, "input", images, weight, gradient, settings, of_input)
        yield _row(program, "weight", images, weight, gradient, settings, of_weight)


def _momentary(made: Sequence[Allocation], start: int, *, forward: bool = False) -> tuple[list[int], int]:
    """Return the sizes of what was held for a moment from a request on, and the number of the next other request."""
    end = start
    while end < len(made) and made[end].is_for_a_moment(end) and (not forward or "_conv_forward" in made[end].site):
        end += 1
    return [one.size_bytes for one in made[start:end]], end


def _row(
    program: str, name: str, images: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, settings: Any,
    taken: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    order = "nchw" if images.is_contiguous() else "nhwc"
    shapes = ("x".join(map(str, one.shape)) for one in (images, weight, result))
    tried_bytes, bytes_ = (taken[0], taken[-1]) if len(taken) > 1 else (0, math.fsum(taken))
    stride, padding, _, transposed = settings[:4]
    return (
        program, name, str(images.dtype).removeprefix("torch."), order, *shapes, stride[0], padding[0], int(transposed),
        int(bytes_), tried_bytes,
    )  # fmt: skip


def main() -> None:
    """Print the rows of one history, each kind once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("history", type=Path)
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--channels-last", action="store_true")
    asked = parser.parse_args()
    form = torch.channels_last if asked.channels_last else torch.contiguous_format
    with torch.device("meta"), _Layers() as layers:
        network = import_module("timm").create_model(asked.model).to(getattr(torch, asked.dtype), memory_format=form)
        images = torch.empty(asked.batch, 3, _PIXELS, _PIXELS, dtype=getattr(torch, asked.dtype), memory_format=form)
        network(images).sum().backward()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    seen = dict.fromkeys(rows(asked.model, allocations(asked.history), layers))
    writer.writerows(seen)


if __name__ == "__main__":
    main()
