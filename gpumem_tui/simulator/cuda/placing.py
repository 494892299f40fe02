"""Memory that a rank puts on GPU 0 before it has chosen its own GPU, as every other rank of the machine does.

``.cuda()`` and ``device="cuda"`` mean the current device, which is GPU 0 until `torch.cuda.set_device`. `torch.load`
without ``map_location`` puts tensors where they were saved. Each rank then opens a CUDA context on GPU 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Placing:
    """The tensors that this rank makes on GPU 0 without saying so.

    Attributes:
        ranks: of this machine; with one there is nothing to tell apart.
        allocations: returns how many allocations were made. `place`: the line of the program that is calling.
        place_of: returns the line that made an allocation.
        is_named: whether the program names a GPU by its number, or chooses one, at all.
    """

    ranks: int = 1
    allocations: Callable[[], int] = lambda: 0
    place: Callable[[], str] = lambda: ""
    place_of: Callable[[int], str] = lambda _: ""
    is_chosen: bool = False
    is_named: bool = False
    _made: dict[int, str] = field(default_factory=dict)
    _loaded: set[int] = field(default_factory=set)

    def begin(
        self, ranks: int, allocations: Callable[[], int], place: Callable[[], str], place_of: Callable[[int], str]
    ) -> None:
        """Follow a rank of so many on this machine."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # empty in a simulated run, which hides real GPUs
        self.ranks = 1 if visible and visible != "-1" and "," not in visible else ranks
        self.allocations, self.place, self.place_of = allocations, place, place_of
        self.is_chosen = self.is_named = False
        self._made, self._loaded = {}, set()

    def choose(self) -> None:
        """Note that the program chooses its GPU, as `torch.cuda.set_device` does."""
        self.is_chosen = self.is_named = True

    def meant(self, index: int | None) -> None:
        """Note that a GPU is named by its number, or the current one by none."""
        if self.ranks < 2:
            return
        if index is not None:
            self.is_named = True
        elif not self.is_chosen:
            self._made.setdefault(self.allocations() + 1, self.place())

    def loaded(self) -> None:
        """Note that `torch.load` puts a tensor on the GPU that it was saved from."""
        if self.ranks > 1:
            self._made.setdefault(self.allocations() + 1, self.place())
            self._loaded.add(self.allocations() + 1)

    def found(self) -> tuple[tuple[int, ...], str, bool]:
        """Return the numbers of the allocations, the first line that makes one, and whether that loads a file.

        Nothing where the program never tells GPUs apart, so that its launcher may do that for it.
        """
        last = self.allocations()
        made = [number for number, place in self._made.items() if number <= last and self.place_of(number) == place]
        if not made or not (self.is_named or self._loaded):
            return (), "", False
        return tuple(made), self._made[made[0]], made[0] in self._loaded


placing = Placing()
"""The placing of the rank that this process follows."""
