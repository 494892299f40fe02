"""Follows the blocks within the CUDA allocator's segments, to know how large each is.

The allocator writes down what was asked for; what it counts is the block that it gave, which can be larger: the rest of
a free block is only split off if it is worth it (CUDACachingAllocator.cpp, `should_split`). From the blocks before the
step and every event since, that follows exactly. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_GRANULE_BYTES = 512
_SMALL_REQUEST_BYTES = 1 << 20


class Segments:
    """The free blocks of one device by address, kept up with the allocator's events.

    Args:
        segments: ``segments`` of `torch.cuda.memory._snapshot()`, those of the device.
        settings: its ``allocator_settings``; versions that lack them have the defaults here.

    Attributes:
        live: blocks in use, bytes by address.
    """

    def __init__(self, segments: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        self._expandable = bool(settings.get("expandable_segments", False))
        largest = int(settings.get("max_split_size", -1) or -1)
        self._max_split_bytes = largest if largest > 0 else 1 << 62
        self._starts: set[int] = set()
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        for segment in segments:
            self._starts.add(segment["address"])
            address = segment["address"]
            for block in segment["blocks"]:
                address = block.get("address", address)
                if block["state"] == "active_allocated":
                    self.live[address] = block["size"]
                elif block["state"] == "inactive":
                    self._insert(address, block["size"])
                else:
                    self._waiting[address] = block["size"]
                address += block["size"]

    def segment_made(self, address: int, size_bytes: int) -> None:
        """The driver gave memory: a new segment, or more of an expandable one."""
        if self._expandable:
            self._merge(address, size_bytes)
        else:
            self._starts.add(address)
            self._insert(address, size_bytes)

    def segment_gone(self, address: int, size_bytes: int) -> None:
        """Free memory went back to the driver."""
        self._starts.discard(address)
        for start, size in list(self._free.items()):
            if start <= address < start + size:
                self._remove(start)
                if start < address:
                    self._insert(start, address - start)
                if address + size_bytes < start + size:
                    self._insert(address + size_bytes, start + size - address - size_bytes)

    def take(self, address: int, requested_bytes: int) -> int:
        """The allocator gave the block at `address`; its size. A block that is not known is taken for the smallest."""
        size = max(1, -(-requested_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES
        found = self._free.get(address)
        if found is not None and found >= size:
            self._remove(address)
            rest = found - size
            if self._splits(size, rest):
                self._insert(address + size, rest)
            else:
                size = found
        self.live[address] = size
        return size

    def release(self, address: int) -> None:
        """The program no longer uses a block: from here on it does not count as allocated."""
        if address in self.live:
            self._waiting[address] = self.live.pop(address)

    def reuse(self, address: int) -> None:
        """The streams are done with it as well: the block can be given again."""
        if address in self._waiting:
            self._merge(address, self._waiting.pop(address))

    def _splits(self, size: int, rest: int) -> bool:
        if self._expandable or size <= _SMALL_REQUEST_BYTES:
            return rest >= _GRANULE_BYTES
        return size < self._max_split_bytes and rest > _SMALL_REQUEST_BYTES

    def _merge(self, address: int, size: int) -> None:
        """Insert a free block as one with its free neighbours in the segment."""
        after = address + size
        if after in self._free and after not in self._starts:
            size += self._remove(after)
        if address in self._ends and address not in self._starts:
            address = self._ends[address]
            size += self._remove(address)
        self._insert(address, size)

    def _insert(self, address: int, size: int) -> None:
        self._free[address] = size
        self._ends[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._free.pop(address)
        del self._ends[address + size]
        return size
