"""A fixture for pytest: a step inside of a test on a simulated GPU, to assert on the memory it takes.

Loaded by pytest as it starts: it imports nothing of torch until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

import gpumem_tui
from gpumem_tui.errors import UserError

if TYPE_CHECKING:
    from gpumem_tui import StepMemory

    GpuMemory = Callable[[str], AbstractContextManager[StepMemory]]


@pytest.fixture
def gpu_memory() -> GpuMemory:
    """Return `gpumem_tui.simulated`, whose errors are pytest's.

    `with gpu_memory("sim:a100-40gb") as memory: step()`, then `assert memory.device_used_bytes < 22 * 2**30`. The model
    is made inside of the block. Tensors on the device have shapes and no values. A step that does not fit
    raises `torch.OutOfMemoryError` there.
    """
    return _simulated


@contextmanager
def _simulated(gpu: str) -> Iterator[StepMemory]:
    try:
        with gpumem_tui.simulated(gpu) as memory:
            yield memory
    except UserError as error:
        raise pytest.UsageError(f"gpu_memory: {error}") from error
