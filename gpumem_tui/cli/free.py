"""`free`: the GPUs that nobody computes on, for scripts; of this machine or of others, now or once there are enough."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import click

from gpumem_tui.cli.asked import AskedHosts
from gpumem_tui.cli.hosts import HOSTS_OPTIONS, settled, started_fleet, timeout_option
from gpumem_tui.cli.types import AT_LEAST_ONE, Finite, Typed, with_options
from gpumem_tui.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from gpumem_tui.memory import Unknown, format_bytes, size_from
from gpumem_tui.report.objects import SCHEMA, JsonObject
from gpumem_tui.report.output import Printer, complain
from gpumem_tui.report.tables import counted

if TYPE_CHECKING:
    from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
    from gpumem_tui.remote.status import HostStatus

_Read = Callable[[], Mapping[str, "Snapshot | str"]]
"""The newest snapshot of each machine by its name, or why it is missing; this machine's name is empty."""


@click.command
@click.option(
    "--gpus", "count", type=AT_LEAST_ONE, metavar="N", help="So many, all of one machine; else all there are."
)
@click.option(
    "--memory",
    "memory_bytes",
    type=Typed("size", size_from),
    metavar="SIZE",
    help="With so much memory free, such as 20GiB, whoever computes there too.",
)
@click.option(
    "--vendor", "brand", metavar="NAME", help="Only GPUs of this vendor, such as AMD; else of the first with so many."
)
@click.option("--wait", is_flag=True, help="Wait until there are so many (one, without --gpus).")
@click.option(
    "--interval",
    "interval_s",
    type=Finite(0.2, 3600),
    default=2.0,
    metavar="S",
    help="Seconds between two looks while waiting (default: 2).",
)
@click.option("--json", "as_json", is_flag=True, help="One object, with UUIDs, names and free memory.")
@with_options([*HOSTS_OPTIONS, timeout_option])
def free(
    count: int | None,
    memory_bytes: int | None,
    interval_s: float,
    *,
    brand: str | None,
    wait: bool,
    as_json: bool,
    **hosts: object,
) -> int:
    """The free GPUs as CUDA_VISIBLE_DEVICES takes them: CUDA_VISIBLE_DEVICES=$(gpumem-tui free --gpus 2 --wait).

    Free is a GPU on which nobody computes, within the CUDA_VISIBLE_DEVICES that is set already; one whose processes
    cannot be read is not, nor one that is divided into MIG instances. They are printed by number, or by UUID where GPUs
    differ, as CUDA counts those in another order. With several hosts each line begins with the host. Exit code 3: there
    are not so many, and nothing is printed.

    All are of one vendor. AMD's are printed as HIP_VISIBLE_DEVICES takes them:
    HIP_VISIBLE_DEVICES=$(gpumem-tui free --vendor AMD).
    """
    from gpumem_tui.monitor.devices import free_gpus

    asked = AskedHosts.of({**hosts, "interval_s": interval_s, "address": None})
    reading = _hosts(asked) if asked.are_named else _here()
    with reading as read:
        try:
            while True:
                found = read()
                known = {name: each for name, each in found.items() if not isinstance(each, str)}
                free = {
                    name: _of_one_vendor(free_gpus(snapshot, memory_bytes, {} if name else os.environ), count, brand)
                    for name, snapshot in known.items()
                }
                enough = {name: (chosen, known[name]) for name, chosen in free.items() if chosen}
                never = _never(known.values(), count, memory_bytes, brand)
                if enough or not wait or (never and len(known) == len(found)):
                    break
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    for name, problem in found.items():
        if isinstance(problem, str):
            complain(f"{name}: {problem}" if name else problem, 0)
    if not enough:
        free_of = f" with {format_bytes(memory_bytes)} free" if memory_bytes else ""
        what = "GPU" if memory_bytes else "free GPU"
        few = f"no {what}{free_of}" if count is None else f"no machine has {counted(count, what)}{free_of}"
        return complain(never or f"{few}; --wait waits", EXIT_NOTHING_FITS) if known else EXIT_FAILED
    first = dict(list(enough.items())[:1]) if count is not None else enough
    Printer(as_json=as_json).show(
        body=partial(FreeObject.of, first), lines=partial(_lines, first, named=len(found) > 1)
    )
    return 0


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


_Found = Mapping[str, "tuple[list[GpuReading], Snapshot]"]


def _lines(found: _Found, *, named: bool) -> Iterator[str]:
    from gpumem_tui.monitor.vendors import of_brand

    for name, (gpus, snapshot) in found.items():
        brand = gpus[0].vendor
        is_alike = len({gpu.name for gpu in snapshot.gpus if gpu.vendor == brand}) == 1
        by_number = is_alike or not of_brand(brand).orders_by_speed
        devices = ",".join(str(gpu.number) if by_number else gpu.uuid for gpu in gpus)
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
