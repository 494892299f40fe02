"""Fixtures of every test of the Monitor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.vendors.nvidia.vendor import NVIDIA


@pytest.fixture(autouse=True)
def _built_in_vendor() -> Iterator[None]:
    """The vendor that is asked first is the built-in one, whichever a test before or this one has chosen."""
    vendors.choose(NVIDIA)
    yield
    vendors.choose(NVIDIA)
