"""What was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Lru(Generic[Key, Item]):
    """The last `size` items used."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[Key, Item] = OrderedDict()

    def get(self, key: Key) -> Item | None:
        """The item under a key, used now; None for none."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def drop(self, key: Key) -> None:
        """Forget it, if it is there."""
        self._items.pop(key, None)

    def put(self, key: Key, item: Item) -> None:
        """Keep it; the one that was not used for longest goes."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._size:
            self._items.popitem(last=False)
