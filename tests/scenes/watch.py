"""Watched processes made by hand, and a source of probes that shows a given state."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.probes import ProbeFigures
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
from gpumem_tui.probe.files import Files
from gpumem_tui.probe.wire import HeldPlace, LookAnswer, LookedDevice, PostMortem, Process, Record
from gpumem_tui.watch.expected import Expected
from gpumem_tui.watch.postmortem import Case
from gpumem_tui.watch.published import Key, Placed, Published, WatchedProcess
from gpumem_tui.watch.records import End, ProbedProcess, ProbeSample, ProcessState
from tests.scenes import monitor as scene
from tests.watch.rings import ON_CPU, RECORD
from tests.watch.rings import out_of_memory as out_of_memory_document

GPT2 = find_model("gpt2")
EXPECTED = Expected(GPT2, Recipe(), ("12 heads and dropout 0.1 as in gpt2", "sequence length 1,024"))
PARAMETERS_BYTES = 497_759_232
"""GPT-2 small in fp32."""


class Said:
    """A source of probes that has read what a test put in."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.followed: Key | None = None
        self.is_reading = False
        self.stopped = False
        self._told: list[Callable[[], None]] = []

    def say(self, published: Published) -> None:
        """From now on this is what was read."""
        self.published = published
        for tell in self._told:
            tell()

    def ask(self, gpus: Sequence[GpuReading], followed: Key | None) -> None:
        """Remember whose history is wanted."""
        self.followed = followed

    def latest(self) -> Published:
        """The state that the test put in."""
        return self.published

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called with each message."""
        self._told.append(tell)

    def stop(self) -> None:
        """Remember it."""
        self.stopped = True


def record(**changes: Any) -> Record:
    """GPT-2 small under AdamW on a GPU, a moment before the snapshot at noon."""
    values: dict[str, Any] = {
        "step": 12_340,
        "wall_ns": round((scene.NOON_S - 0.4) * 1e9),
        "parameters_bytes": PARAMETERS_BYTES,
        "gradients_bytes": PARAMETERS_BYTES,
        "optimizer_bytes": 2 * PARAMETERS_BYTES,
        "allocated_bytes": 2 * GIB + 300 * MIB,
        "reserved_bytes": 15 * GIB,
        "peak_allocated_bytes": 14 * GIB,
        "peak_reserved_bytes": 15 * GIB,
        "inactive_split_bytes": 120 * MIB,
        "device_uuid": "",
        **changes,
    }
    return replace(RECORD, **values)


def on_cpu(**changes: Any) -> Record:
    """A small model that trains in host memory."""
    sizes = {"parameters_bytes": 3 * MIB, "gradients_bytes": 3 * MIB, "optimizer_bytes": 6 * MIB}
    return replace(ON_CPU, **{"step": 340, "wall_ns": round((scene.NOON_S - 0.2) * 1e9), **sizes, **changes})


def watched(pid: int, *placed: tuple[Record, str], **changes: Any) -> WatchedProcess:
    """A process whose newest records are of these GPUs, by their uuid; an empty one is host memory."""
    rank, world_size = changes.pop("rank", None), changes.pop("world_size", None)
    host = scene.host_process(pid)
    who = Process(
        pid=pid, start_ticks=pid * 7, started_ns=0, entry="run", rank=rank, local_rank=rank, world_size=world_size,
        python="3.11.7", torch="2.13.0", visible_devices=None, command=tuple(host.command.split()),
    )  # fmt: skip
    state = changes.pop("state", ProcessState.RUNNING)
    samples = tuple(ProbeSample(one) for one, _ in placed)
    probed = ProbedProcess(
        files=Files(Path("/tmp/probes"), pid, pid * 7),
        pid=pid if state is ProcessState.RUNNING else None,
        uid=os.geteuid(),
        process=who,
        state=state,
        samples=samples,
        age_s=0.4,
        problem=changes.pop("problem", ""),
    )
    places = tuple(Placed(ProbeSample(one), uuid or Unknown("host memory")) for one, uuid in placed)
    return WatchedProcess(probed, places, **{"host": host, "expected": EXPECTED, **changes})


def published(*processes: WatchedProcess) -> Published:
    """All of them, with what their allocators say."""
    figures = {
        (placed.gpu_uuid, one.pid): ProbeFigures(
            placed.sample.record.allocated_bytes,
            placed.sample.record.reserved_bytes,
            placed.sample.record.retries,
            placed.sample.record.ooms,
        )
        for one in processes
        for placed in one.placed
        if isinstance(placed.gpu_uuid, str)
    }
    return Published(tuple(processes), (), figures)


def training() -> tuple[Snapshot, Published]:
    """One GPU with a watched process of 16 GiB, and another process without a probe."""
    gpu = scene.gpu(0, [scene.process(4100, 16 * GIB), scene.process(4101, 6 * GIB)])
    return scene.of([gpu]), published(watched(4100, (record(), gpu.uuid), history=history()))


def history() -> tuple[ProbeSample, ...]:
    """Eight minutes of samples: the peak grew once, and the cache was given back once."""
    samples = []
    for number in range(480):
        early, kept = number < 160, number > 300
        samples.append(
            ProbeSample(
                record(
                    sequence=number + 1,
                    step=12_340 - (479 - number) * 4,
                    wall_ns=round((scene.NOON_S - 0.4 - (479 - number)) * 1e9),
                    peak_allocated_bytes=(9 if early else 14) * GIB,
                    reserved_bytes=(10 if early else 15 if kept else 17) * GIB,
                )
            )
        )
    return tuple(samples)


def ranks(count: int = 8) -> tuple[Snapshot, Published]:
    """A job of twice as many ranks as there are here, one a GPU; rank 5 holds the most."""
    gpus = [scene.gpu(index, [scene.process(4100 + index, 16 * GIB)]) for index in range(count)]
    processes = [
        watched(
            4100 + index,
            (record(peak_allocated_bytes=(14 + (index == 5)) * GIB - index * 8 * MIB, retries=index // 5), gpu.uuid),
            rank=index,
            world_size=2 * count,
        )
        for index, gpu in enumerate(gpus)
    ]
    return scene.of(gpus), published(*processes)


def out_of_memory(uuid: str = "", **changes: Any) -> WatchedProcess:
    """GPT-2 small, ended three minutes ago on a GPU of 80 GiB."""
    buckets = {"parameters": PARAMETERS_BYTES, "gradients": PARAMETERS_BYTES, "optimizer": 2 * PARAMETERS_BYTES}
    died_ns = round((scene.NOON_S - 180) * 1e9)
    here = {"wall_ns": died_ns, "device_uuid": uuid, "buckets": buckets, "requested_live_bytes": None}
    values = out_of_memory_document(**{**here, **changes})
    ended = watched(4104, state=ProcessState.OUT_OF_MEMORY, host=Unknown("out of memory"))
    return structs.replace(ended, case=Case(ended.process, PostMortem(**values), EXPECTED))


def ended(
    pid: int = 4105, state: ProcessState = ProcessState.FAILED, phrase: str = "failed with exit code 1", **changes: Any
) -> WatchedProcess:
    """One that trained in host memory and ended a minute ago, after 8 minutes of which there are samples."""
    past = tuple(
        ProbeSample(on_cpu(step=sample.record.step, wall_ns=sample.record.wall_ns - 60 * 10**9)) for sample in history()
    )
    record = past[-1].record
    made = watched(pid, (record, ""), state=state, host=Unknown(phrase), history=past)
    end = End(state, phrase, scene.NOON_S - 60, **changes)
    return structs.replace(made, process=replace(made.process, end=end, steps=12_340))


def look() -> LookAnswer:
    """A step of 0.4 s whose peak of 14 GiB is at the end of forward."""
    standing_bytes = 3 * PARAMETERS_BYTES
    peak_bytes = 14 * GIB
    rise = [(0.02 + n * 0.004, standing_bytes + (peak_bytes - standing_bytes) * n // 40) for n in range(41)]
    fall = [(0.19 + n * 0.004, peak_bytes - (peak_bytes - 4 * PARAMETERS_BYTES) * n // 40) for n in range(41)]
    held = [
        HeldPlace("activations", "aten.addmm", f"transformer.h.{block}.mlp.c_fc", "model.py:88", (700 - block) * MIB, 2)
        for block in range(12)
    ]
    held += [
        HeldPlace("parameters", "", "transformer.wte", "", PARAMETERS_BYTES, 148, before_step=True),
        HeldPlace("optimizer", "", "transformer.wte", "", 2 * PARAMETERS_BYTES, 296, before_step=True),
        HeldPlace("temporary", "aten._log_softmax", "lm_head", "train.py:31", 900 * MIB, 1),
        HeldPlace("batch_data", "", "", "train.py:28", 64 * MIB, 2),
    ]
    known = sum(one.bytes for one in held)
    held.append(HeldPlace("activations", "", "", "", peak_bytes - known, 4_000))
    buckets: dict[str, int] = {}
    for one in held:
        buckets[one.bucket] = buckets.get(one.bucket, 0) + one.bytes
    device = LookedDevice(
        device=0,
        device_uuid="",
        peak_bytes=peak_bytes,
        buckets=buckets,
        held=tuple(sorted(held, key=lambda one: -one.bytes)),
        timeline=((0.0, standing_bytes), *rise, *fall, (0.39, 4 * PARAMETERS_BYTES)),
        phases=((0.0, "batch"), (0.02, "forward"), (0.185, "backward"), (0.36, "optimizer")),
        peak_s=0.18,
        highest={**buckets, "gradients": PARAMETERS_BYTES, "temporary": 1_200 * MIB},
    )
    return LookAnswer(1, 12_341, 0.4, "allocator history", (device,), {})
