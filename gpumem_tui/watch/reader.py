"""Reads what probes publish. It trusts nothing in their folders: whoever may write there could have put it there."""

from __future__ import annotations

import heapq
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.probe.files import Files, Folder, WireError
from gpumem_tui.probe.wire import (
    HEADER_BYTES,
    RING_BYTES,
    SLOT_BYTES,
    SLOT_COUNT,
    Exit,
    PostMortem,
    Record,
    StagePeak,
    Stages,
    Stall,
    UncaughtError,
    slot_offset,
)
from gpumem_tui.system import user_name
from gpumem_tui.text import printable
from gpumem_tui.watch import hosts
from gpumem_tui.watch.documents import Header, decode_header, decode_record, read_document
from gpumem_tui.watch.ends import Evidence, Witness, end_of, unseen
from gpumem_tui.watch.folders import full_reason
from gpumem_tui.watch.publishing import PublishingFolders, expected_owners
from gpumem_tui.watch.ranks import StoppedAt
from gpumem_tui.watch.records import (
    SHOWING,
    End,
    ProbedProcess,
    ProbeSample,
    ProcessState,
    RefusedFile,
    last_first,
)

_SILENT_AFTER_S, _SILENT_STEPS = 15.0, 3
"""A stop is reported after so long without a step, and so many times as long as one took before."""
_RARER_S = 2.0
"""Samples that are further apart than this are called rarer."""
_LONGEST_TICKS = 20
"""Digits of a start in clock ticks: /proc/PID/stat has 64 bits (proc(5))."""
_MOST_NAMES, _MOST_RINGS, _MOST_OF_ANOTHER = 4096, 256, 64
"""Limits for one user: names in a folder, rings. Nobody takes the place of others by making more."""
_MOST_STAGES = 128
"""Peaks of stages of one process, on all of its devices."""
_HELD_SHARE, _HELD_SHARE_OF_A_USER = 1 / 4, 1 / 8
"""Share of our descriptors for processes that are followed, and for those of one user."""


@dataclass
class _Ring:
    """The state of a ring between two looks. `file`: device and number of the file that it was then."""

    files: Files
    uid: int
    file: tuple[int, int] = (0, 0)
    header: Header | None = None
    records: dict[int, Record] = field(default_factory=dict)
    problem: str = ""
    host: hosts.Host | None = None
    witness: Witness | None = None
    end: End | None = None
    stages: tuple[StagePeak, ...] = ()
    stages_ns: int = 0


def most_rings(uid: int) -> int:
    """Return how many processes of a user are read at once: what others publish costs the reader little."""
    return _MOST_RINGS if uid == os.geteuid() else _MOST_OF_ANOTHER


def _start_ticks(name: str) -> int:
    """Return when the process began that a ring is named after; before any other if it is no ring's name."""
    ticks = name.removesuffix(".ring").partition("-")[2]
    return int(ticks) if ticks.isdecimal() and len(ticks) < _LONGEST_TICKS else -1


class Watcher:
    """Everything that publishes on this machine, as far as we may read it. For one thread at a time.

    Args:
        directories: the folders to look into; by default our own, for root everybody's, and those of containers.
        proc: where processes are looked up.
        clock_ns: the machine's monotonic clock, the same as the probes read.

    Attributes:
        only: the name of the user whose processes are read; empty for everybody's.
    """

    def __init__(
        self,
        directories: Iterable[Path] | None = None,
        proc: Path = hosts.PROC,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.only = ""
        self._places = PublishingFolders(directories, proc, clock_ns)
        self._proc = proc
        self._clock_ns = clock_ns
        self._rings: dict[Path, _Ring] = {}
        self._refused: dict[str, str] = {}
        self._left_out: Counter[int] = Counter()
        self._hosts: dict[tuple[int, int], hosts.Host] | None = None

    def follow(self, pid: int) -> None:
        """Also look in the folder where this process's environment has its probe publish."""
        host = hosts.find(pid, self._proc)
        if host is not None:
            self._places.follow(host.files.directory)

    def processes(self) -> tuple[ProbedProcess, ...]:
        """Look at every folder again; return the processes that publish, or did.

        The running come first, then the last to have begun. A file that cannot be trusted is not read, but is among
        `refused`.
        """
        self._refused = {}
        self._left_out = Counter()
        self._hosts = None
        seen = self._admitted(
            {ring: uid for directory in self._places.directories() for ring, uid in self._scan(directory)}
        )
        for path in set(self._rings) - set(seen):
            if (witness := self._rings[path].witness) is not None:
                witness.close()
        self._rings = {path: self._rings.get(path) or _Ring(Files.of_ring(path), uid) for path, uid in seen.items()}
        processes = []
        for path, ring in self._rings.items():
            if self.only and user_name(ring.uid) != self.only:
                continue
            try:
                processes.append(self._look(ring))
            except FileNotFoundError:
                continue
            except WireError as error:
                self._refused[str(path)] = str(error) if path.name in str(error) else f"{path.name}: {error}"
            except OSError as error:
                self._refused[str(path)] = f"{path.name} cannot be read: {error.strerror}"
        now_s = time.time()
        processes.sort(
            key=lambda process: (not process.is_running, last_first(process.process.started_ns / 1e9, now_s))
        )
        return tuple(processes)

    @property
    def refused(self) -> tuple[RefusedFile, ...]:
        """Return what was not read at the last look, and why."""
        return tuple(RefusedFile(printable(path), printable(reason)) for path, reason in sorted(self._refused.items()))

    def history(self, process: ProbedProcess) -> tuple[ProbeSample, ...]:
        """Return every sample that the ring of a process holds, all devices, oldest first.

        For a process that has ended, until its last sample with a model.
        """
        ring = self._rings.get(process.files.ring)
        if ring is None:
            return ()
        last = _last_with_model(ring) if ring.end is not None else 0
        return tuple(ProbeSample(ring.records[number]) for number in sorted(ring.records) if number <= (last or number))

    def _admitted(self, found: Mapping[Path, int]) -> dict[Path, int]:
        """Return as many rings of each user as are read: those of the processes that began last."""
        taken: Counter[int] = Counter()
        admitted = {}
        for path in sorted(found, key=lambda path: _start_ticks(path.name), reverse=True):
            taken[found[path]] += 1
            if taken[found[path]] <= most_rings(found[path]):
                admitted[path] = found[path]
        taken.update(self._left_out)
        for uid, count in taken.items():
            if count > most_rings(uid):
                who = user_name(uid)
                self._refused[f"user {uid}"] = f"{SHOWING} {most_rings(uid)} of user {who}, who has {count:,}"
        return admitted

    def _scan(self, directory: Path) -> Iterator[tuple[Path, int]]:
        """Yield the rings in a folder, with the user whose folder it is."""
        try:
            with Folder(directory, expected_owners(directory)) as folder:
                uid, full = folder.owner, full_reason(directory, folder.file_system())
                names = folder.names(_MOST_NAMES + 1)
        except FileNotFoundError:
            return
        except WireError as error:
            self._refused[str(directory)] = str(error)
            return
        except OSError as error:
            self._refused[str(directory)] = f"{directory} cannot be read: {error.strerror}"
            return
        if len(names) > _MOST_NAMES:
            self._refused[str(directory)] = f"{directory} holds more than {_MOST_NAMES} files"
            return
        if full:
            self._refused[str(directory)] = full
        rings = [name for name in names if name.endswith(".ring") and not name.startswith(".")]
        newest = heapq.nlargest(most_rings(uid), rings, key=_start_ticks)
        self._left_out[uid] += len(rings) - len(newest)
        for path in (directory / name for name in newest):
            try:
                Files.of_ring(path)
            except WireError as error:
                self._refused[str(path)] = str(error)
            else:
                yield path, uid

    def _look(self, ring: _Ring) -> ProbedProcess:
        """Return the process behind a ring, after reading what was written since the last look."""
        header = ring.header
        if ring.end is None or header is None:
            host = self._find(ring)
            header = _read_new(ring)  # after that: of a process that is gone, nothing is missed
            self._follow(ring, host)
            ring.host, ring.end = host, None if host is not None else _end(ring, header)
        state = ring.end.state if ring.end is not None else ProcessState.RUNNING
        # once it has ended, the newest in which there is a model; where there never was, the newest
        samples = _newest(ring, None if ring.end is None else _last_with_model(ring) or None)
        age_s = self._age_s(samples[0].record.monotonic_ns if samples else None)
        heard_ns = _heard_ns(header, samples)
        heard_s = self._age_s(heard_ns)
        is_silent = state is ProcessState.RUNNING and _is_silent(samples, heard_s)
        stall = _stall(ring, heard_ns or 0) if is_silent else None
        return ProbedProcess(
            files=ring.files,
            pid=ring.host.pid if ring.host is not None else None,
            uid=ring.uid,
            process=header.process,
            state=state,
            samples=samples,
            age_s=age_s,
            problem=ring.problem or _problem(header, samples, heard_s if is_silent else None, stall),
            end=ring.end,
            steps=max(_steps(ring), 0 if stall is None else stall.step),
            is_counted=bool(header.ended_ns),
            heard_s=heard_s,
            rarer=_rarer(header, samples) if state is ProcessState.RUNNING else "",
            is_silent=is_silent,
            stall=stall,
            stages=_stages(ring),
        )

    def _age_s(self, monotonic_ns: int | None) -> Reading[float]:
        if monotonic_ns is None:
            return Unknown("no step has finished yet")
        return max(0.0, (self._clock_ns() - monotonic_ns) / 1e9)

    def _find(self, ring: _Ring) -> hosts.Host | None:
        """Find the living process that writes a ring. Its user must be the ring's, or anyone could pass for it."""
        if ring.host is not None:
            host = hosts.find(ring.host.pid, self._proc)
        else:
            host = hosts.find(ring.files.pid, self._proc)
            if not _writes(host, ring):  # a container's pid
                if self._hosts is None:
                    self._hosts = {(host.inner_pid, host.start_ticks): host for host in hosts.every(self._proc)}
                host = self._hosts.get((ring.files.pid, ring.files.start_ticks))
        return host if _writes(host, ring) else None

    def _follow(self, ring: _Ring, host: hosts.Host | None) -> None:
        """Watch a living process, so that its end is seen."""
        if host is None:
            return
        if ring.witness is not None:
            ring.witness.look()
            return
        held = Counter(other.uid for other in self._rings.values() if other.witness and other.witness.is_held)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        is_free = held.total() < most * _HELD_SHARE and held[ring.uid] < most * _HELD_SHARE_OF_A_USER
        ring.witness = Witness(host.pid, host.start_ticks, hold=is_free)


def _writes(host: hosts.Host | None, ring: _Ring) -> bool:
    return (
        host is not None
        and host.state != "Z"
        and (host.inner_pid, host.start_ticks, host.uid) == (ring.files.pid, ring.files.start_ticks, ring.uid)
    )


def _end(ring: _Ring, header: Header) -> End:
    """Work out how a process that is gone ended; it is remembered, as its key is never used again."""
    seen: Exit | None = None
    error = post_mortem = None
    try:
        seen = read_document(Exit, ring.files, ring.uid)
        error = read_document(UncaughtError, ring.files, ring.uid)
        post_mortem = read_document(PostMortem, ring.files, ring.uid)
    except WireError as problem:
        ring.problem = str(problem)
    if ring.witness is not None:
        seen = seen or ring.witness.ended()
        ring.witness.close()
    elif seen is None:
        seen = unseen(ring.files.pid, ring.files.start_ticks)
    newest = ring.records.get(max(ring.records, default=0))
    last_ns = header.process.started_ns if newest is None else newest.wall_ns
    evidence = Evidence(
        exit=seen,
        error=error,
        post_mortem=post_mortem,
        left_ns=header.ended_ns,
        last_ns=last_ns,
        step=_steps(ring),
    )
    return end_of(evidence)


def _steps(ring: _Ring) -> int:
    newest = ring.records.get(max(ring.records, default=0))
    heartbeat = None if ring.header is None else ring.header.heartbeat
    return max(0 if newest is None else newest.step, 0 if heartbeat is None else heartbeat.step)


def _read_new(ring: _Ring) -> Header:
    """Read the header, and the records that are newer than those known.

    Raises:
        WireError: the ring is not to be trusted, or damaged.
        OSError: it is not there or cannot be read.
    """
    path = ring.files.ring
    with Folder(path.parent, (ring.uid,)) as folder, folder.opened(path.name, RING_BYTES) as opened:
        found = os.fstat(opened.fileno())
        header = decode_header(os.pread(opened.fileno(), HEADER_BYTES, 0))
        if (header.process.pid, header.process.start_ticks) != (ring.files.pid, ring.files.start_ticks):
            raise WireError(f"{ring.files.ring.name} states that it is of process {header.process.pid}")
        file = (found.st_dev, found.st_ino)
        known = ring.header.written if ring.header is not None and file == ring.file else 0
        if known > header.written or file != ring.file:
            known = 0
            ring.records = {}
        oldest = header.written - SLOT_COUNT + 1
        slots = list(_slots(opened.fileno(), max(known + 1, oldest, 1), header.written))
    damaged = 0
    for number, slot in slots:
        try:
            record = decode_record(slot)
        except WireError:
            damaged += 1
            continue
        if record.sequence == number:  # else it was overwritten while we read
            ring.records[number] = record
    ring.records = {number: record for number, record in ring.records.items() if number >= oldest}
    ring.file, ring.header = file, header
    if slots:
        ring.problem = f"samples lost to damage: {damaged}" if damaged else ""
    return header


def _slots(descriptor: int, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield what the slots of these records hold, by number: one read, and another where the ring goes round."""
    while first <= last:
        count = min(last - first + 1, SLOT_COUNT - (first - 1) % SLOT_COUNT)
        data = os.pread(descriptor, count * SLOT_BYTES, slot_offset(first))
        for place in range(count):
            yield first + place, data[place * SLOT_BYTES : (place + 1) * SLOT_BYTES]
        first += count


def _last_with_model(ring: _Ring) -> int:
    """Return the number of the last record with a model, of all devices at that moment; 0 without any."""
    last = max((number for number, record in ring.records.items() if record.parameters_bytes > 0), default=0)
    if not last:
        return 0
    at_ns = ring.records[last].monotonic_ns
    return max(number for number, record in ring.records.items() if record.monotonic_ns == at_ns)


def _newest(ring: _Ring, last: int | None = None) -> tuple[ProbeSample, ...]:
    """Return the newest sample of each device, those of one moment; with `last`, up to that record."""
    last = max(ring.records, default=0) if last is None else last
    newest: dict[int, Record] = {}
    while last in ring.records and ring.records[last].device not in newest:
        record = ring.records[last]
        if newest and record.monotonic_ns != next(iter(newest.values())).monotonic_ns:
            break
        newest[record.device] = record
        last -= 1
    return tuple(ProbeSample(newest[device]) for device in sorted(newest))


def _heard_ns(header: Header, samples: tuple[ProbeSample, ...]) -> int | None:
    """Return when a step is last known to have ended, by the machine's monotonic clock; None before the first."""
    times = [sample.record.monotonic_ns for sample in samples[:1]]
    times += [] if header.heartbeat is None else [header.heartbeat.monotonic_ns]
    return max(times, default=None)


def _rarer(header: Header, samples: tuple[ProbeSample, ...]) -> str:
    """Say why samples are further apart than usual; empty if they are not."""
    heartbeat = header.heartbeat
    if heartbeat is None or not samples or heartbeat.due_ns - samples[0].record.monotonic_ns < _RARER_S * 1e9:
        return ""
    return "sampling slowed, machine busy" if heartbeat.is_busy else "sampling slowed, samples take long"


def _is_silent(samples: tuple[ProbeSample, ...], heard_s: Reading[float]) -> bool:
    """Return whether no step has finished for longer than steps take."""
    if not samples or isinstance(heard_s, Unknown):
        return False
    step_s = samples[0].record.step_s
    return heard_s > max(_SILENT_AFTER_S, _SILENT_STEPS * (0.0 if math.isnan(step_s) else step_s))


def _stages(ring: _Ring) -> tuple[StagePeak, ...]:
    """Return the peak of each stage of the run, as its probe published them last."""
    try:
        written_ns = os.stat(ring.files.stages).st_mtime_ns
        if written_ns != ring.stages_ns:
            ring.stages_ns = written_ns
            document = read_document(Stages, ring.files, ring.uid)
            ring.stages = () if document is None else document.peaks[:_MOST_STAGES]
    except (OSError, WireError):  # older probes write none
        return ()
    return ring.stages


def _stall(ring: _Ring, heard_ns: int) -> Stall | None:
    """Return where a process is that stopped; None where its probe does not say, or told of an earlier stop."""
    try:
        stall = read_document(Stall, ring.files, ring.uid)
    except WireError:  # a line of it would hide that no step finishes
        return None
    return stall if stall is not None and stall.monotonic_ns > heard_ns else None


def _problem(
    header: Header, samples: tuple[ProbeSample, ...], silent_s: Reading[float] | None, stall: Stall | None
) -> str:
    """Say in one line how far the samples are not to be trusted; empty if there is nothing to say.

    Args:
        silent_s: how long no step has finished, if that is longer than steps take; `stall`: where it is.
    """
    if header.switched_off:
        return f"the probe switched itself off: {header.switched_off}"
    record = samples[0].record if samples else None
    problem = ""
    if record is not None and record.errors:
        problem = f"the probe met {record.errors} errors"
    elif record is not None and record.dropped:
        problem = f"{record.dropped} samples could not be written"
    if isinstance(silent_s, float):
        at = None if stall is None else StoppedAt.of_stall(stall)
        silence = f"no step has finished for {silent_s:.0f} s{'' if at is None else f': {at.words}'}"
        problem = f"{silence}; {problem}" if problem else silence
    return problem
