"""Whose GPUs the Monitor watches and the search runs on: NVIDIA's, or those of an installed plug-in.

A plug-in's `Vendor` is an entry point of the group ``gpumem_tui.vendors``. The built-in vendor is asked first, and the
entry points only where it has no driver: reading them costs more than the whole of a driver's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.backend import Vendor
from gpumem_tui.monitor.vendors.amd.vendor import AMD
from gpumem_tui.monitor.vendors.nvidia.vendor import NVIDIA

GROUP = "gpumem_tui.vendors"
BUILT_IN = (NVIDIA, AMD)

_chosen = NVIDIA


def vendor() -> Vendor:
    """Return the vendor whose driver was started last; the built-in one before any was."""
    return _chosen


def choose(found: Vendor) -> None:
    """Make a vendor the one whose words screens use from here on."""
    global _chosen
    _chosen = found


def candidates(first: Vendor) -> Iterator[Vendor]:
    """Yield the vendors in the order in which they are tried; plug-ins are looked for when the first has no driver."""
    yield first
    yield from (each for each in BUILT_IN if each is not first)
    yield from (each for each in plugged_in()[0] if each is not first)


@cache
def plugged_in() -> tuple[tuple[Vendor, ...], tuple[str, ...]]:
    """Load the vendors of plug-ins, in the order of their names; what cannot be loaded is one line each."""
    from importlib.metadata import entry_points

    found: list[Vendor] = []
    faults: list[str] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            loaded = entry.load()
        except Exception as error:  # noqa: BLE001  a plug-in's module may raise anything; it is named
            faults.append(f"the vendor “{entry.name}” cannot be loaded: {own_error(error)}")
            continue
        if not isinstance(loaded, Vendor):
            faults.append(f"the vendor “{entry.name}” is no Vendor: {entry.value}")
        elif loaded not in BUILT_IN:
            found.append(loaded)
    return tuple(found), tuple(faults)
