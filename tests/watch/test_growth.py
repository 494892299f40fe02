"""A process whose memory after each step rises steadily is reported; one that warms up or changes its batch is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from gpumem_tui.monitor.alerts import AlertKind, Alerts
from gpumem_tui.watch import report as headless
from gpumem_tui.watch.collector import Collector
from gpumem_tui.watch.growth import Growth, growth_of, is_worth_an_alert
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess, ProbeSample
from tests.scenes import monitor as scene
from tests.watch.rings import GIB, ON_CPU, RECORD, RingFile, this_process

S = 10**9
NOISE = random.Random(1)


def samples(size_at: Callable[[float], float], seconds: int = 300, *, on_cpu: bool = False) -> list[ProbeSample]:
    """Two a second, of a process that holds `size_at` after so many seconds."""
    found = []
    for number in range(2 * seconds):
        size = round(size_at(number / 2))
        record = replace(ON_CPU, host_bytes=size) if on_cpu else replace(RECORD, allocated_bytes=size)
        found.append(
            ProbeSample(replace(record, sequence=number + 1, step=number * 7, monotonic_ns=1 + number * S // 2))
        )
    return found


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize(
    "size_at",
    [
        lambda s: 4 * GIB + s * MIB,
        lambda s: 4 * GIB + s * MIB + NOISE.uniform(-3, 3) * MIB,  # some steps hold more than others
        lambda s: 4 * GIB + s // 10 * 10 * MIB,  # a cache that doubles, or Python's collector, takes it in portions
        lambda s: min(4, 0.2 * s) * GIB + s * MIB,  # it warmed up for 20 s
    ],
    ids=["line", "noise", "portions", "after a warm-up"],
)
def test_a_leak(size_at: Callable[[float], float], on_cpu: bool) -> None:
    [growth] = growth_of(samples(size_at, on_cpu=on_cpu))
    assert growth.bytes_per_s == pytest.approx(MIB, rel=0.1)
    assert growth.device == (-1 if on_cpu else 0)
    assert 120 <= growth.over_s <= 151


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize(
    "size_at",
    [
        lambda _: 4 * GIB,
        lambda _: 4 * GIB + NOISE.uniform(-30, 30) * MIB,
        lambda s: min(8, 0.1 * s) * GIB,  # warms up for 80 s
        lambda s: (4 if s < 200 else 6) * GIB,  # a larger batch
        lambda s: (4 if s < 180 else 5 if s < 250 else 6) * GIB,  # longer and longer sequences
        lambda s: (4 + s % 60 / 60) * GIB,  # taken and given back
        lambda s: (8 - s / 200) * GIB,
        lambda s: 4 * GIB + s * 20_000,  # not enough to matter
    ],
    ids=["constant", "noise", "warm-up", "larger batch", "two jumps", "sawtooth", "falling", "little"],
)
def test_no_leak(size_at: Callable[[float], float], on_cpu: bool) -> None:
    assert growth_of(samples(size_at, on_cpu=on_cpu)) == ()


@pytest.mark.parametrize(("rises_mib", "is_steady"), [((3, 30, 6, 6, 5), True), ((2, 30, 7, 6, 5), False)])
def test_how_far_from_the_mean_a_part_may_rise(rises_mib: tuple[int, ...], is_steady: bool) -> None:
    """From 0.3 to 3 times the mean, which is 10 MiB, both included."""
    levels = [GIB + sum(rises_mib[:part]) * MIB for part in range(6)]
    found = growth_of(samples(lambda s: levels[min(5, max(0, int((s - 149.75) / 149.75 * 6)))], seconds=300))
    assert bool(found) == is_steady


@pytest.mark.parametrize(("in_a_part", "is_told"), [(4, True), (3, False)])
def test_how_many_samples_a_part_has_at_least(in_a_part: int, is_told: bool) -> None:
    every, part_s, places = samples(lambda s: 4 * GIB + s * MIB, seconds=300), 149.75 / 6, range(in_a_part)
    times_s = [149.75 + part_s * (part + (place + 0.5) / in_a_part) for part in range(6) for place in places]
    found = growth_of([every[number] for number in (0, *(int(2 * time_s) for time_s in times_s[:-1]), 599)])
    assert bool(found) == is_told


@pytest.mark.parametrize(
    ("growth", "is_worth_it"),
    [
        (Growth(0, MIB, 150, 7 * 86400), True),
        (Growth(0, MIB, 150, 7 * 86400 + 1), False),
        (Growth(0, GIB / 4 / 3600, 150), True),
        (Growth(0, GIB / 4 / 3600 - 1, 150), False),
    ],
    ids=["within a week", "later", "fast", "slow"],
)
def test_what_is_worth_an_alert(growth: Growth, is_worth_it: bool) -> None:
    assert is_worth_an_alert(growth) == is_worth_it


def test_too_short_to_tell() -> None:
    assert growth_of(samples(lambda s: GIB + s * 10 * MIB, seconds=50)) == ()
    assert growth_of([]) == ()


def test_what_it_says() -> None:
    assert Growth(0, GIB / 3600 * 3.5, 150, 2.1 * 3600).phrase == (
        "cuda:0 after each step grows by 3.50 GiB an hour, full in 2.1 h"
    )
    assert Growth(-1, MIB, 150).phrase == "host memory after each step grows by 3.52 GiB an hour"


def leaking(folder: Path, gpu_uuid: str = RECORD.device_uuid, limit_bytes: int = -1) -> RingFile:
    """This very process keeps 10 MiB a second of its GPU, for five minutes until now."""
    ring = RingFile(folder, this_process())
    now_ns = time.monotonic_ns()
    for number in range(600):
        size = 17 * GIB + number * 5 * MIB
        at_ns = now_ns - (600 - number) * S // 2
        record = replace(RECORD, allocated_bytes=size, device_uuid=gpu_uuid, limit_bytes=limit_bytes)
        ring.sample(replace(record, monotonic_ns=at_ns, step=number))
    return ring


@pytest.mark.parametrize(
    ("limit_bytes", "left"),
    [(-1, "2.2 h"), (200 * GIB, "2.2 h"), (41 * GIB, "36 min")],
    ids=["no limit", "a far limit", "1 GiB below the process's own limit"],
)
def test_an_alert_says_how_fast_and_how_long(limit_bytes: int, left: str, tmp_path: Path) -> None:
    """A GPU with 57 GiB free, and 20 GiB more in the allocator's cache."""
    gpu = scene.gpu(0, [scene.process(4100, 22 * GIB)])
    leaking(tmp_path / "probes", gpu.uuid, limit_bytes)
    published = Collector(Watcher([tmp_path / "probes"])).collect([gpu])
    [growth] = published.processes[0].growth
    assert growth.bytes_per_s == pytest.approx(10 * MIB, rel=0.05)
    snapshot = scene.of([gpu])
    alerts = Alerts().update(snapshot, headless.probe_report(published))
    [alert] = [one for one in alerts if one.kind is AlertKind.GROWTH]
    assert alert.gpu_uuid == gpu.uuid
    assert alert.message.startswith("GPU 0: PID ")
    assert ": cuda:0 after each step grows by 35." in alert.message
    assert f" GiB an hour, full in {left} (python train.py)" in alert.message


def test_watching_without_a_screen_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaking(tmp_path / "probes")

    class Done(Exception):
        pass

    class Thrice(Watcher):
        reads = 0

        def processes(self) -> tuple[ProbedProcess, ...]:
            self.reads += 1
            if self.reads > 5:
                raise Done
            return super().processes()

    with pytest.raises(Done):
        headless.watch(Thrice([tmp_path / "probes"]), None, 0.01, as_json=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if "grows by" in line]
    assert len(lines) == 1
    assert lines[0].endswith("names what keeps it")
