"""Memory of training processes outside PyTorch's allocator, from the driver and their probes."""

from __future__ import annotations

import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from gpumem_tui.catalog.calibration import Calibration, is_known, load
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.errors import own_error
from gpumem_tui.memory import Unknown

if TYPE_CHECKING:
    from gpumem_tui.monitor.readings import Reading
    from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
    from gpumem_tui.watch.published import Key, Published
    from gpumem_tui.watch.reader import Watcher
    from gpumem_tui.watch.records import ProbedProcess, ProbeSample

_EVERY_S = 1.0
_IDLE_S = 2.0
"""Between two looks while nothing trains on a GPU."""
_MOST_READINGS = 60
"""After so many of the driver it is given up: it lists other pids, or the reserved bytes never settle."""


@dataclass(frozen=True)
class HeldBeside:
    """The bytes that a process holds of a GPU by the driver, beyond what its allocator reserves by its last sample."""

    gpu: GpuReading
    process: ProbedProcess
    sample: ProbeSample
    reserved_bytes: int
    beside_bytes: int


def machine_now() -> Snapshot | None:
    """Return what the driver reports of this machine; None where it does not answer."""
    from gpumem_tui.monitor.report import NoDriverAnswer, complete
    from gpumem_tui.monitor.sampler import Sampler

    source = Sampler()
    source.start()
    try:
        return complete(source)
    except NoDriverAnswer:
        return None
    finally:
        source.stop()


def held(gpus: Iterable[GpuReading], published: Published) -> Iterator[HeldBeside]:
    """Yield what processes that train under a probe hold, of whole GPUs.

    One whose driver's figure is not more than what its allocator reserved is left out.
    """
    for gpu in gpus:
        for process in () if isinstance(gpu.processes, Unknown) else gpu.processes:
            watched, sample = published.by_place.get((gpu.uuid, process.pid), (None, None))
            if watched is None or sample is None or process.instance or isinstance(process.used_bytes, Unknown):
                continue
            reserved_bytes = sample.reserved_bytes
            if isinstance(reserved_bytes, int) and process.used_bytes > reserved_bytes:
                yield HeldBeside(gpu, watched.process, sample, reserved_bytes, process.used_bytes - reserved_bytes)


def learned(seen: Iterable[HeldBeside], version: Reading[str]) -> list[Calibration]:
    """Return what was seen of processes as calibrations, one for each kind of GPU and torch, under a driver."""
    sizes: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
    for one in seen:
        if not isinstance(one.gpu.memory, Unknown):
            sizes[one.gpu.name, one.gpu.memory.total_bytes, one.process.process.torch].append(one.beside_bytes)
    driver = version if isinstance(version, str) else "of unknown version"
    today = date.today().isoformat()
    return [
        Calibration(
            gpu=name,
            total_bytes=total_bytes,
            driver=driver,
            torch=torch,
            measured=today,
            stages={"least": min(each), "training": max(each)},
            is_learned=True,
        )
        for (name, total_bytes, torch), each in sizes.items()
    ]


def unkept(found: Iterable[Calibration]) -> list[Calibration]:
    """Return those that the user's file does not say already, or better; all where it cannot be read."""
    try:
        kept = load()
    except CatalogError:
        kept = ()
    return [one for one in found if not is_known(one, kept)]


def offer(found: Calibration) -> str:
    """Return the line that offers to keep what was seen, with the command that does."""
    command = f"gpumem-tui doctor --calibrate --seen {shlex.quote(found.words)}"
    return (
        f"of {found.gpu} a training process held {found.size_words} outside what PyTorch reserved (CUDA context, "
        f"libraries); predictions for it can use that: `{command}` keeps it"
    )


class BesideWatch:
    """Finds, while processes train, what they hold outside their allocators, and offers once to keep it.

    The driver and the probe are read at different times. So a figure counts only where a process had reserved as much
    before the driver was read as after, and where two readings agree.

    Args:
        watcher: finds the processes; used by nobody else.
        pids: of whom, as they know themselves; None for all that publish.
        say: given the line that offers it, in a thread of ours.
        read: reads the driver.
    """

    def __init__(
        self,
        watcher: Watcher,
        pids: Callable[[], Collection[int]] | None,
        say: Callable[[str], object],
        read: Callable[[], Snapshot | None] = machine_now,
    ) -> None:
        self._watcher, self._pids, self._say, self._read = watcher, pids, say, read
        self._over = threading.Event()
        self._readings = 0
        self._between_ns = 0, 0
        self._driver: Reading[str] = Unknown("not read yet")
        self._pending: list[HeldBeside] = []
        self._figures: dict[tuple[Key, str], HeldBeside] = {}
        self._sure: dict[tuple[Key, str], HeldBeside] = {}

    def start(self) -> None:
        """Begin, in a thread that ends with the program; returns at once."""
        threading.Thread(target=self._run, name="beside-allocators", daemon=True).start()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            while not self.look() and not self._over.wait(_EVERY_S if self._readings else _IDLE_S):
                pass
        except Exception as error:  # noqa: BLE001  said; what trains continues
            self._say(own_error(error))

    def look(self) -> bool:
        """Look again, at the driver too where that is due; return whether there is nothing more to find out."""
        training = {each.key for each in self._watcher.processes() if self._is_wanted(each)}
        self._pending = [one for one in self._pending if one.process.key in training and not self._is_judged(one)]
        if not training or self._pending:
            return False
        if self._readings < _MOST_READINGS and not (self._sure and self._sure.keys() >= self._figures.keys()):
            self._read_driver(training)
            return False
        for found in unkept(learned(self._sure.values(), self._driver)):
            self._say(offer(found))
        return True

    def _is_wanted(self, process: ProbedProcess) -> bool:
        is_on_gpu = process.is_running and any(sample.is_on_gpu for sample in process.samples)
        return is_on_gpu and (self._pids is None or process.files.pid in self._pids())

    def _read_driver(self, training: Collection[Key]) -> None:
        from gpumem_tui.watch.collector import Collector

        begun_ns = time.monotonic_ns()
        snapshot = self._read()
        self._between_ns = begun_ns, time.monotonic_ns()
        self._readings += 1
        if snapshot is not None:
            self._driver = snapshot.driver_version
            published = Collector(self._watcher).collect(snapshot.gpus)
            self._pending = [one for one in held(snapshot.gpus, published) if one.process.key in training]

    def _is_judged(self, one: HeldBeside) -> bool:
        """Return whether a sample came after the driver was read; if so, note the figure where it can be trusted."""
        begun_ns, ended_ns = self._between_ns
        samples = [each for each in self._watcher.history(one.process) if each.device == one.sample.device]
        after = next((n for n, each in enumerate(samples) if each.record.monotonic_ns >= ended_ns), None)
        if after is None:
            return False
        before = max((n for n, each in enumerate(samples) if each.record.monotonic_ns <= begun_ns), default=None)
        if before is not None and {each.reserved_bytes for each in samples[before : after + 1]} == {one.reserved_bytes}:
            place = one.process.key, one.gpu.uuid
            last = self._figures.get(place)
            self._figures[place] = one
            if last is not None and last.beside_bytes == one.beside_bytes:
                self._sure[place] = one
        return True
