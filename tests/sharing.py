"""Objects that take long to make are made once for all workers of the tests."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests import warm

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


class WarmPython:
    """A Python that starts with torch imported; it does so before the first of all workers starts one."""

    _factory: pytest.TempPathFactory | None = None
    _folder: Path | None = None

    @classmethod
    def comes_from(cls, factory: pytest.TempPathFactory) -> None:
        """Say where it is to be made."""
        cls._factory = factory

    @classmethod
    def path(cls, name: str = warm.TORCH) -> str:
        """Return the program to start: `warm.TORCH`, `warm.TRANSFORMERS` or `warm.TRAINING`."""
        factory = cls._factory
        assert factory is not None, "tests ask for it, not their modules"
        if cls._folder is None:
            cls._folder = made_once(factory, "python", lambda: cls._made(factory.mktemp("python")))
        return str(cls._folder / name)

    @staticmethod
    def _made(folder: Path) -> Path:
        warm.start(folder, os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
        return folder
