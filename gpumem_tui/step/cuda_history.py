"""The CUDA caching allocator's history of a step, and the notes made next to it while the step ran.

The allocator counts what it does, and each note carries that count: so notes find their place in the history when it is
read. Nothing here synchronizes or allocates on a device. Imports nothing of ours but `step`, and beyond the standard
library only torch, and is Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.memory import Bucket
from gpumem_tui.step import Phase, Site
from gpumem_tui.step.sites import is_own

_UNKNOWN = Site()


@dataclass(frozen=True)
class HistoryNote:
    """A marker after `position` events of a device's history: a phase or module begins, or blocks get a bucket.

    Attributes:
        step: the training step that the phase belongs to, from 1; 0 while the model is built.
        module: qualified name of the innermost running module, or ''.
        addresses: of blocks that are the bucket's. owners: addresses, each with the module that owns it.
        step_ends: a step ends here.
        undoes: the place of the forward whose backward begins here; an empty one where that is not known.
    """

    position: int
    phase: Phase | None = None
    module: str | None = None
    bucket: Bucket | None = None
    addresses: tuple[int, ...] = ()
    owners: tuple[tuple[int, str], ...] = ()
    step_ends: bool = False
    step: int = 0
    undoes: Site | None = None

    def tagged(self, numbers: Mapping[int, int]) -> Iterator[tuple[int, Bucket]]:
        """Yield (allocation number, bucket) for each of this note's addresses that is live.

        `numbers` are the live allocations by address.
        """
        if self.bucket is not None:
            for address in self.addresses:
                if address in numbers:
                    yield numbers[address], self.bucket


class HistoryNotes:
    """The notes of one device, from when this is made.

    Attributes:
        device: None until one of the devices has had an allocation, where it was not said which one it is.
    """

    def __init__(self, device: int | torch.device | None) -> None:
        self.device = device
        self._start = 0 if device is None else _events(device)
        self.notes: list[HistoryNote] = []

    @property
    def position(self) -> int:
        """Allocations and releases since then."""
        if self.device is None:
            self.device = next((index for index in range(torch.cuda.device_count()) if _events(index)), None)
        return 0 if self.device is None else _events(self.device) - self._start

    def add(  # noqa: PLR0913 - the fields of a note
        self,
        phase: Phase | None = None,
        module: str | None = None,
        bucket: Bucket | None = None,
        addresses: Iterable[int] = (),
        owners: Iterable[tuple[int, str]] = (),
        step_ends: bool = False,
        step: int = 0,
        undoes: Site | None = None,
    ) -> None:
        """Note something now; see `HistoryNote`."""
        self.notes.append(
            HistoryNote(self.position, phase, module, bucket, tuple(addresses), tuple(owners), step_ends, step, undoes)
        )


def _events(device: int | torch.device) -> int:
    """Return how many allocations and releases a device has had so far.

    PyTorch has no figures (``{}``) until CUDA is initialized, and calls that it queued for that moment run just before:
    `memory_stats_as_nested_dict` and `_lazy_init` of torch/cuda. No device has had an allocation by then.
    """
    count: Any = torch.cuda.memory_stats_as_nested_dict(device).get("allocation", {}).get("all", {})
    return int(count.get("allocated", 0)) + int(count.get("freed", 0))


COUNTED = ("alloc", "free_requested")
"""Actions in the history that the allocator counts as well: `stats.allocation` of CUDACachingAllocator.cpp."""


def in_order(trace: Iterable[dict[str, Any]], notes: Iterable[HistoryNote]) -> Iterator[dict[str, Any] | HistoryNote]:
    """Yield the CUDA allocator's history, each note after as many allocations and releases as it counted."""
    pending = iter(notes)
    note = next(pending, None)
    position = 0
    for entry in trace:
        counts = entry["action"] in COUNTED
        while counts and note is not None and note.position <= position:
            yield note
            note = next(pending, None)
        position += counts
        yield entry
    while note is not None:
        yield note
        note = next(pending, None)


def made_at(entry: dict[str, Any], phase: Phase, module: str = "", undoes: Site = _UNKNOWN) -> tuple[Site, bool]:
    """Return where an allocation was made, and whether by a forward that is repeated in backward.

    `phase`, `module` and `undoes` say where the step was then. Where no line of the program's ran, as in autograd's own
    threads, it is that of the forward which backward undoes; not in a backward within that one, of
    which we know nothing.
    """
    frames = entry.get("frames", ())
    site = Site(module=module, source=_calling_line(frames))
    is_backward = phase is Phase.BACKWARD
    if is_backward and not site.source and not _in_file(frames, "torch/autograd/graph.py"):
        site = Site(module=module or undoes.module, source=undoes.source)
    return site, is_backward and _in_checkpoint(frames)


def _calling_line(frames: Iterable[dict[str, Any]]) -> str:
    """Return ``file:line`` of the program in frames as the CUDA allocator records them, the innermost first."""
    for frame in frames:
        path = frame["filename"]
        if is_own(path) and "/torch/" not in path and "/torchinductor_" not in path:  # which writes code of its own
            return f"{os.path.basename(path)}:{frame['line']}"
    return ""


def _in_file(frames: Iterable[dict[str, Any]], path: str) -> bool:
    return any(frame["filename"].endswith(path) for frame in frames)


def _in_checkpoint(frames: Iterable[dict[str, Any]]) -> bool:
    """Return whether such frames are a checkpoint's that repeats its forward. Its own nested backward is none."""
    for frame in frames:
        if frame["filename"].endswith("torch/autograd/graph.py"):
            return False
        if frame["filename"].endswith("torch/utils/checkpoint.py"):
            return True
    return False
