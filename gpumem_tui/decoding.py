"""Decoding by msgspec in several threads.

Two threads that decode a dataclass or struct for the first time at once crash the process: msgspec 0.22 shares what it
knows of a type before that is complete (`DataclassInfo_Convert` and `StructInfo_Convert` in its `_core.c`).
"""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

_looking = Lock()
_known: set[object] = set()


def decodable(kind: type[Kind]) -> type[Kind]:
    """Return a type that msgspec is asked to decode, once it knows the whole of it; one thread at a time has it look.

    Raises:
        TypeError: msgspec does not support it.
    """
    if kind not in _known:
        with _looking:
            msgspec.json.Decoder(kind)
            _known.add(kind)
    return kind
