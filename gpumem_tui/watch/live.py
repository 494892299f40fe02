"""Reads what probes publish now, in a thread of its own, whenever somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.probes import NOTHING_SAID, Ask, ProbeReport
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
from gpumem_tui.watch.published import Key, Published

if TYPE_CHECKING:
    from gpumem_tui.watch.publishing import PublishingFolders

Collect = Callable[[Sequence[GpuReading], Key | None], Published]


def ask_probes() -> Ask:
    """Return what asks the probes of this machine's processes. While nothing publishes, hardly anything is imported."""
    from gpumem_tui.watch.publishing import PublishingFolders

    collect: list[Collect] = []
    places = PublishingFolders()

    def ask(snapshot: Snapshot) -> ProbeReport:
        if not collect and places.are_quiet():
            return NOTHING_SAID
        from gpumem_tui.watch.report import probe_report

        if not collect:
            collect.append(_collector(None, derives=False))
        return probe_report(collect[0](snapshot.gpus, None))

    return ask


def _collector(directories: Iterable[Path] | None, *, derives: bool) -> Collect:
    from gpumem_tui.watch.collector import Collector
    from gpumem_tui.watch.reader import Watcher

    return Collector(Watcher(directories), derives=derives).collect


class LiveProbes:
    """The live `published.ProbeSource`. It may take its time: asked again meanwhile, it reads once more, no oftener.

    Args:
        directories: the folders to look into; by default those of `Watcher`.
    """

    def __init__(self, directories: Iterable[Path] | None = None) -> None:
        self._directories = directories
        self._wanted: tuple[Sequence[GpuReading], Key | None] = ((), None)
        self._asked = threading.Event()
        self._is_collecting = False
        self._stopped = False
        self._latest = Published()
        self._told: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name="probe-collector", daemon=True).start()

    @property
    def is_reading(self) -> bool:
        """Return whether a reading that was asked for is still under way."""
        return self._asked.is_set() or self._is_collecting

    def ask(self, gpus: Sequence[GpuReading], followed: Key | None) -> None:
        """Ask the thread to read what these GPUs' processes publish; `followed` is read in full."""
        self._wanted = (gpus, followed)
        self._asked.set()

    def latest(self) -> Published:
        """Return what was read last."""
        return self._latest

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each reading."""
        self._told.append(tell)

    def stop(self) -> None:
        """End; returns at once."""
        self._stopped = True
        self._asked.set()

    def _run(self) -> None:
        collect: Collect | None = None
        places: PublishingFolders | None = None
        while True:
            self._asked.wait()
            if self._stopped:
                return
            self._is_collecting = True
            self._asked.clear()
            try:
                if places is None:
                    from gpumem_tui.watch.publishing import PublishingFolders  # nobody asks before the first frame

                    places = PublishingFolders(self._directories)
                if collect is None and not places.are_quiet():
                    collect = _collector(self._directories, derives=True)
                published = self._latest if collect is None else collect(*self._wanted)
            except Exception as error:  # noqa: BLE001  named in the header; the next reading may go well
                published = replace(self._latest, problem=own_error(error))
            if published != self._latest:
                self._latest = published
            self._is_collecting = False
            for tell in self._told:
                tell()
