"""`free`: the GPUs that nobody computes on, for scripts; of this machine or of others, now or once there are enough."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

import click

from gpumem_tui.cli.asked import AskedHosts
from gpumem_tui.cli.hosts import HOSTS_OPTIONS, settled, started_fleet, timeout_option
from gpumem_tui.cli.types import AT_LEAST_ONE, Finite, Typed, with_options
from gpumem_tui.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from gpumem_tui.memory import Unknown, format_bytes, size_from
from gpumem_tui.report.objects import SCHEMA, JsonObject
from gpumem_tui.report.output import Complaints, Printer, complain
from gpumem_tui.report.tables import counted

if TYPE_CHECKING:
    from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
    from gpumem_tui.remote.status import HostStatus

EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127
"""As shells have it of a command that cannot be run (POSIX, "Exit Status for Commands")."""
_Read = Callable[[], Mapping[str, "Snapshot | str"]]
"""The newest snapshot of each machine by its name, or why it is missing; this machine's name is empty."""

_Found = Mapping[str, "tuple[list[GpuReading], Snapshot]"]
"""The free GPUs of each machine, among all of it."""
_LOOK_S = 2.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpus", "count", type=AT_LEAST_ONE, metavar="N", help="How many, all of one machine (default: every free one)."
)
@click.option(
    "--memory",
    "memory_bytes",
    type=Typed("size", size_from),
    metavar="SIZE",
    help="Take GPUs with this much free memory, such as 20GiB, even if others compute there.",
)
@click.option(
    "--vendor", "brand", metavar="NAME", help="GPUs of this vendor, such as AMD (default: the first that has enough)."
)
@click.option("--wait", is_flag=True, help="Wait until enough GPUs are free (one, without --gpus).")
@click.option(
    "--interval",
    "interval_s",
    type=Finite(0.2, 3600),
    default=_LOOK_S,
    metavar="S",
    help="Seconds between two looks while waiting (default: 2).",
)
@click.option("--json", "as_json", is_flag=True, help="One object, with UUIDs, names and free memory.")
@click.option("--explain", is_flag=True, help="Print the rule, and why each GPU is free or not.")
@click.option("--exec", "runs", is_flag=True, help="Wait, then run the command after -- on them, in this process.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND...]")
@with_options([*HOSTS_OPTIONS, timeout_option])
def free(**values: object) -> int:
    """Print the free GPUs as CUDA_VISIBLE_DEVICES takes them, or wait for them and run a command there.

    \b
    gpumem-tui free --gpus 2 --exec -- python train.py   # waits until 2 are free
    gpus=$(gpumem-tui free) && CUDA_VISIBLE_DEVICES=$gpus python train.py

    GPUs are of one vendor, and of those that CUDA_VISIBLE_DEVICES allows if it is set: by number, or by UUID where
    models differ. With several hosts each line begins with the host. Exit code 3: too few are free. The command of
    --exec replaces this process, so its exit code and signals are its own.
    """
    asked = _Asked.of(values)
    asked.check()
    reading = _hosts(asked) if asked.are_named else _here()
    with reading as read:
        try:
            found, enough, never = _looked(asked, read)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    known = {name: each for name, each in found.items() if not isinstance(each, str)}
    for name, problem in found.items():
        if isinstance(problem, str):
            complain(f"{name}: {problem}" if name else problem, 0)
    if asked.explain:
        Printer(as_json=False).show(lines=partial(_explained, known, asked.memory_bytes, named=len(found) > 1))
        return 0 if enough else EXIT_NOTHING_FITS if known else EXIT_FAILED
    if not enough:
        free_of = f" with {format_bytes(asked.memory_bytes)} free" if asked.memory_bytes else ""
        what = "GPU" if asked.memory_bytes else "free GPU"
        few = f"no {what}{free_of}" if asked.count is None else f"no machine has {counted(asked.count, what)}{free_of}"
        return complain(never or f"{few}; --wait waits", EXIT_NOTHING_FITS) if known else EXIT_FAILED
    first = dict(list(enough.items())[:1]) if asked.count is not None else enough
    if asked.runs:
        return _run(asked.command, *enough[""])
    Printer(as_json=asked.as_json).show(
        body=partial(FreeObject.of, first), lines=partial(_lines, first, named=len(found) > 1)
    )
    return 0


class _Asked(AskedHosts, frozen=True):
    """The options that were typed: which GPUs, of which machines, and what becomes of them."""

    count: int | None = None
    memory_bytes: int | None = None
    brand: str | None = None
    wait: bool = False
    as_json: bool = False
    explain: bool = False
    runs: bool = False
    command: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what cannot be together."""
        if self.command and not self.runs:
            raise click.UsageError("a command is run with --exec: `gpumem-tui free --exec -- COMMAND`")
        if self.runs and not self.command:
            raise click.UsageError("--exec: give the command after --: `gpumem-tui free --exec -- python train.py`")
        if self.runs and self.are_named:
            raise click.UsageError("--exec runs the command on this machine: leave out --host, or `ssh -t HOST` there")
        if self.explain and (self.runs or self.as_json):
            raise click.UsageError(f"--explain and {'--exec' if self.runs else '--json'}: give only one of them")


def _looked(asked: _Asked, read: _Read) -> tuple[Mapping[str, Snapshot | str], _Found, str]:
    """Look until there are enough, if that is waited for; return what was found, the free GPUs, why there never are."""
    from gpumem_tui.monitor.devices import free_gpus

    say = Complaints().say
    while True:
        found = read()
        known = {name: each for name, each in found.items() if not isinstance(each, str)}
        free: dict[str, list[GpuReading]] = {}
        for name, snapshot in known.items():
            idle = free_gpus(snapshot, asked.memory_bytes, {} if name else os.environ)
            free[name] = _of_one_vendor(idle, asked.count, asked.brand)
        enough = {name: (chosen, known[name]) for name, chosen in free.items() if chosen}
        never = _never(known.values(), asked.count, asked.memory_bytes, asked.brand)
        waits = asked.wait or asked.runs
        if enough or not waits or (never and all(map(_is_final, found.values()))):
            return found, enough, never
        problem = next((each for each in found.values() if isinstance(each, str)), "")
        if asked.runs:
            why = f" ({problem})" if problem else "; `gpumem-tui free --explain` gives the reason"
            say(f"waiting for {counted(asked.count or 1, 'free GPU')}{why}; ctrl+c ends it")
        time.sleep(asked.interval_s or _LOOK_S)


def _is_final(found: Snapshot | str) -> bool:
    """Return whether a machine answers, or has no driver: no waiting brings one."""
    from gpumem_tui.monitor.vendors import is_without_driver

    return not isinstance(found, str) or is_without_driver(found)


def _explained(machines: Mapping[str, Snapshot], memory_bytes: int | None, *, named: bool) -> Iterator[str]:
    """Yield the rule, and of each GPU why it is free or not."""
    from gpumem_tui.monitor.devices import free_rule, visible_uuids, why_not_free

    yield free_rule(memory_bytes)
    for name, snapshot in machines.items():
        seen = visible_uuids(snapshot, {} if name else os.environ)
        for gpu in snapshot.gpus:
            why = why_not_free(gpu, memory_bytes, seen)
            used = "" if isinstance(gpu.memory, Unknown) else f"{format_bytes(gpu.memory.used_bytes)} in use"
            state = f"not free: {why}" if why else f"free: {used}"
            yield f"{f'{name} ' if named else ''}GPU {gpu.index} ({gpu.name}): {state}"


def _run(command: Sequence[str], gpus: Sequence[GpuReading], snapshot: Snapshot) -> int:
    """Become the command, on these GPUs; return only if it cannot be run."""
    from gpumem_tui.monitor.vendors import of_brand

    vendor = of_brand(gpus[0].vendor)
    devices, by_number = _devices(gpus, snapshot)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_number and vendor.orders_by_speed else {}
    told = {vendor.visible: devices, **order}
    complain(" ".join(f"{name}={value}" for name, value in told.items()), 0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and exec would keep ignored
        signal.signal(number, signal.SIG_DFL)
    _keep_to_itself(vendor.device_paths)
    try:
        os.execvpe(command[0], list(command), {**os.environ, **told})  # noqa: S606  what the user asked for
    except OSError as error:
        code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
        return complain(f"{command[0]} cannot be run: {error.strerror}", code)


def _keep_to_itself(paths: tuple[str, ...]) -> None:
    """Have the devices that the driver's library opened here be closed where the command begins."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one by which they are listed
            if os.readlink(f"/proc/self/fd/{name}").startswith(paths):
                os.set_inheritable(int(name), False)


def _never(snapshots: Iterable[Snapshot], count: int | None, memory_bytes: int | None, brand: str | None) -> str:
    """Return why no waiting helps on these machines; empty if it may."""
    machines = [snapshot.gpus for snapshot in snapshots]
    brands = dict.fromkeys(gpu.vendor for gpus in machines for gpu in gpus)
    if brand is not None and brand.casefold() not in map(str.casefold, brands):
        return f"there is no GPU of {brand}, only of {', '.join(brands)}" if brands else f"there is no GPU of {brand}"
    wanted = [each for each in brands if brand is None or brand.casefold() == each.casefold()]

    def is_large(gpu: GpuReading) -> bool:
        return isinstance(gpu.memory, Unknown) or gpu.memory.total_bytes >= (memory_bytes or 0)

    most = max((sum(gpu.vendor == each and is_large(gpu) for gpu in gpus) for gpus in machines for each in wanted),
               default=0)  # fmt: skip
    if most >= (count or 1):
        return ""
    large = f" of {format_bytes(memory_bytes)}" if memory_bytes else ""
    return f"no machine has {counted(count or 1, 'GPU')}{large}{f'; the most is {most}' if most else ''}"


def _of_one_vendor(gpus: Sequence[GpuReading], count: int | None, brand: str | None) -> list[GpuReading]:
    """Return so many GPUs of one vendor, by default all; none where no vendor has so many.

    Args:
        brand: whose; None for the first that has so many.
    """
    for each in dict.fromkeys(gpu.vendor for gpu in gpus):
        chosen = [gpu for gpu in gpus if gpu.vendor == each][:count]
        if (brand is None or brand.casefold() == each.casefold()) and len(chosen) >= (count or 1):
            return chosen
    return []


def _devices(gpus: Sequence[GpuReading], snapshot: Snapshot) -> tuple[str, bool]:
    """Return GPUs as the runtime's variable takes them, and whether by number."""
    from gpumem_tui.monitor.vendors import of_brand

    brand = gpus[0].vendor
    is_alike = len({gpu.name for gpu in snapshot.gpus if gpu.vendor == brand}) == 1
    by_number = is_alike or not of_brand(brand).orders_by_speed
    return ",".join(str(gpu.number) if by_number else gpu.uuid for gpu in gpus), by_number


def _lines(found: _Found, *, named: bool) -> Iterator[str]:
    for name, (gpus, snapshot) in found.items():
        devices, _ = _devices(gpus, snapshot)
        yield f"{name} {devices}" if named else devices


class _FreeGpu(JsonObject, frozen=True):
    index: int
    vendor: str
    number: int
    uuid: str
    name: str
    free_bytes: int

    @classmethod
    def of(cls, gpu: GpuReading) -> _FreeGpu:
        """Return a GPU that is free."""
        assert not isinstance(gpu.memory, Unknown), "one that is free can be read"
        return cls(
            index=gpu.index,
            vendor=gpu.vendor,
            number=gpu.number,
            uuid=gpu.uuid,
            name=gpu.name,
            free_bytes=gpu.memory.free_bytes,
        )


class _Machine(JsonObject, frozen=True):
    host: str | None
    gpus: tuple[_FreeGpu, ...]


class FreeObject(JsonObject, frozen=True):
    """The object that `free --json` prints."""

    schema: Literal[1]
    machines: tuple[_Machine, ...]

    @classmethod
    def of(cls, found: _Found) -> FreeObject:
        """Return the free GPUs of each machine."""
        machines = (
            _Machine(host=name or None, gpus=tuple(map(_FreeGpu.of, gpus))) for name, (gpus, _) in found.items()
        )
        return cls(schema=SCHEMA, machines=tuple(machines))


@contextmanager
def _here() -> Iterator[_Read]:
    from gpumem_tui.monitor.report import NoDriverAnswer, complete
    from gpumem_tui.monitor.sampler import Sampler

    source = Sampler()
    source.start()

    def read() -> Mapping[str, Snapshot | str]:
        try:
            snapshot = complete(source)
        except NoDriverAnswer as error:
            return {"": str(error)}
        return {"": snapshot.problem or source.latest() or snapshot}

    try:
        yield read
    finally:
        source.stop()


def _answer(status: HostStatus) -> Snapshot | str:
    """Return a host's reading, or why it cannot be used."""
    problem = status.problem or status.late(time.monotonic())
    if problem or status.report is None:
        return problem
    return status.report.snapshot.problem or status.report.snapshot


@contextmanager
def _hosts(asked: AskedHosts) -> Iterator[_Read]:
    with started_fleet(asked) as (fleet, _):

        def read() -> Mapping[str, Snapshot | str]:
            return {status.host.name: _answer(status) for status in settled(fleet, asked)}

        yield read
