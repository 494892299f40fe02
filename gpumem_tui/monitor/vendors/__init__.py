"""Whose GPUs are watched and searched on: those of the vendors that come with the program, and of plug-ins.

A plug-in's `Vendor` is an entry point of the group ``gpumem_tui.vendors``. They are looked for last: reading them costs
more than the whole of a driver's start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.backend import Vendor
from gpumem_tui.monitor.vendors.amd.vendor import AMD
from gpumem_tui.monitor.vendors.nvidia.vendor import NVIDIA
from gpumem_tui.text import file_text

GROUP = "gpumem_tui.vendors"
BUILT_IN = (NVIDIA, AMD)
"""In the order in which their GPUs are numbered."""

_known = {each.brand: each for each in BUILT_IN}
_chosen = NVIDIA


def vendor() -> Vendor:
    """Return the vendor whose words stand for the machine as a whole: the first whose driver runs."""
    return _chosen


def choose(found: Vendor) -> None:
    """Make a vendor the one whose words stand for the machine."""
    global _chosen
    _chosen = found


def of_brand(brand: str) -> Vendor:
    """Return the vendor of a GPU; if that brand is not installed here, as of another host, the machine's."""
    return _known.get(brand, _chosen)


def known() -> tuple[Vendor, ...]:
    """Return every vendor known so far, those of plug-ins once they were looked for."""
    return tuple(_known.values())


def is_without_driver(problem: str) -> bool:
    """Return whether a snapshot's problem is that the machine has no driver, not that one fails."""
    return problem.startswith(tuple(each.no_driver for each in known()))


def candidates(first: Vendor) -> Iterator[Vendor]:
    """Yield the vendors in the order in which they are tried; plug-ins are looked for when the first has no driver."""
    yield first
    yield from (each for each in BUILT_IN if each is not first)
    yield from (each for each in plugged_in()[0] if each is not first)


@cache
def plugged_in() -> tuple[tuple[Vendor, ...], tuple[str, ...]]:
    """Load the vendors of plug-ins, in the order of their names; what cannot be loaded is one line each."""
    if not _may_be_installed():
        return (), ()
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
        elif loaded.brand not in {each.brand for each in BUILT_IN}:
            found.append(loaded)
            _known[loaded.brand] = loaded
        elif loaded not in BUILT_IN:
            faults.append(f"the vendor “{entry.name}” is of a brand that the program knows: {loaded.brand}")
    return tuple(found), tuple(faults)


def _may_be_installed() -> bool:
    """Return whether a package besides this one has entry points of the group, or may have, in an archive.

    To ask `importlib.metadata` each time would import 30 modules, whose 1.7 MiB a Monitor keeps.
    """
    return any(
        place.is_file()
        or any(
            GROUP in file_text(file)
            for file in place.glob("*-info/entry_points.txt")
            if not file.parent.name.startswith(("gpumem_tui-", "gpumem_tui."))
        )
        for place in map(Path, sys.path)
    )
