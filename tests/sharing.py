"""What takes long to make is made once for all workers that the tests are divided among."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """Return what `make` returns, called by the first worker that asks; the others wait for it, and get a copy.

    Args:
        name: of this thing among all that tests share.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    folder = factory.getbasetemp().parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / f"{name}.pickle"
        if not kept.exists():
            kept.write_bytes(pickle.dumps(make()))
        found: T = pickle.loads(kept.read_bytes())
        return found
