"""Snapshots while all is well: what is in them, how soon, how often, and at what cost in NVML calls."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpumem_tui.memory import GIB, Bucket, Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.snapshot import DeviceState, HostProcess, ProcessKind, Snapshot
from gpumem_tui.monitor.threads import Crew
from tests.monitor.watching import gpu, is_complete, no_processes, until, watching
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import Calls, FakeGpu, FakeInstance, FakeProcess, Scenario
from tests.waiting import DEADLINE_S, wait_until

_EIGHT = Scenario(
    gpus=[
        FakeGpu(
            used_bytes=30 * GIB,
            utilization_percent=10 * index,
            processes=[FakeProcess(100 * index + rank, 10 * GIB, sm_percent=30) for rank in (1, 2, 3)],
        )
        for index in range(8)
    ]
)


def test_a_snapshot_has_what_the_scenario_says(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_EIGHT)
    with watching() as sampler:
        found = until(sampler, is_complete)
    assert (found.driver_version, found.cuda_version, found.problem) == ("550.54.14", "12.4", "")
    assert [reading.index for reading in found.gpus] == list(range(8))
    seventh = gpu(found, 7)
    assert (seventh.uuid, seventh.bus_id, seventh.state) == ("GPU-00000007", "00000000:08:00.0", DeviceState.OK)
    now = seventh.telemetry
    assert (now.utilization_percent, now.power_w, now.temperature_c) == (70, 61.5, 31)
    assert (now.fan_percent, seventh.mig, seventh.unified) == (Unknown("not supported"), False, False)
    assert not isinstance(seventh.processes, Unknown)
    assert [(p.pid, p.used_bytes, p.sm_percent) for p in seventh.processes] == [
        (701, 10 * GIB, 30),
        (702, 10 * GIB, 30),
        (703, 10 * GIB, 30),
    ]
    assert not isinstance(seventh.ledger, Unknown)
    assert seventh.ledger.size_bytes(Bucket.PROCESS) == 30 * GIB
    assert seventh.ledger.size_bytes(Bucket.UNACCOUNTED) == 0


def test_a_process_on_both_lists_is_one_process(fake_nvml: FakeMachine) -> None:
    processes = [
        FakeProcess(1, GIB, "C"),
        FakeProcess(2, GIB, "G"),
        FakeProcess(3, GIB, "C+G"),
        FakeProcess(4, GIB, "M"),
    ]
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=4 * GIB, processes=processes)]))
    with watching() as sampler:
        found = gpu(until(sampler, is_complete), 0).processes
    assert not isinstance(found, Unknown)
    assert {process.pid: process.kind for process in found} == {
        1: ProcessKind.COMPUTE,
        2: ProcessKind.GRAPHICS,
        3: ProcessKind.BOTH,
        4: ProcessKind.COMPUTE,
    }


def test_a_process_on_both_lists_has_the_size_that_was_read_last(fake_nvml: FakeMachine) -> None:
    """The list of those that draw has its former size for seconds, which would be taken from another's row."""

    def shown(freed_bytes: int) -> Scenario:
        both, other = FakeProcess(1, 10 * GIB - freed_bytes, "C+G"), FakeProcess(2, 10 * GIB)
        return Scenario(gpus=[FakeGpu(used_bytes=20 * GIB - freed_bytes, processes=[both, other])])

    fake_nvml.show(shown(0))
    with watching(slow_interval_s=60.0) as sampler:
        until(sampler, is_complete)
        fake_nvml.show(shown(9 * GIB))
        found = until(sampler, lambda s: getattr(gpu(s, 0).memory, "used_bytes", 0) == 11 * GIB)
    ledger = gpu(found, 0).ledger
    assert not isinstance(ledger, Unknown)
    rows = [row for row in ledger.rows if row.process is not None]
    assert [(row.process.pid, row.size_bytes) for row in rows if row.process] == [(2, 10 * GIB), (1, GIB)]


def test_memory_of_virtual_machines_is_told_to_be_theirs(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=GIB, virtualization=3)]))
    with watching() as sampler:
        ledger = gpu(until(sampler, is_complete), 0).ledger
    assert not isinstance(ledger, Unknown)
    assert ledger.rows[-2].note == "virtual machines on this host"


def test_instances_are_in_the_first_snapshot_of_a_divided_gpu(fake_nvml: FakeMachine) -> None:
    instance = FakeInstance("MIG-1", used_bytes=2 * GIB, processes=[FakeProcess(11, GIB)])
    fake_nvml.show(Scenario(gpus=[FakeGpu(mig_mode=1, instances=[instance])]))
    with watching() as sampler:
        found = gpu(until(sampler, lambda s: bool(s.gpus)), 0)
    assert found.mig
    (read,) = found.instances
    assert (read.uuid, read.index) == ("MIG-1", 0)
    assert not isinstance(read.memory, Unknown)
    assert (read.memory.total_bytes, read.memory.used_bytes) == (10 * GIB, 2 * GIB)
    assert not isinstance(read.ledger, Unknown)
    assert read.ledger.size_bytes(Bucket.UNACCOUNTED) == GIB


def test_the_first_snapshot_does_not_wait_for_what_is_slow(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(replace(_EIGHT, calls=Calls(hangs=["nvmlDeviceGetPcieThroughput"])))
    with watching() as sampler:
        found = until(sampler, lambda s: bool(s.gpus))
    for reading in found.gpus:
        assert not isinstance(reading.memory, Unknown)
        assert not isinstance(reading.processes, Unknown)
        assert not isinstance(reading.telemetry.power_w, Unknown)
        assert reading.telemetry.pcie_tx_bytes_per_s == Unknown("not read yet")


def test_a_gpu_that_hangs_does_not_hold_up_the_second_snapshot_for_a_long_interval(fake_nvml: FakeMachine) -> None:
    """It names the call, and has what is read slowly of the others."""
    fake_nvml.show(_EIGHT.change(1, calls=Calls(hangs=["nvmlDeviceGetPowerUsage"])))
    with watching(interval_s=600.0, slow_interval_s=600.0) as sampler:
        found = until(sampler, lambda s: bool(s.gpus) and "nvmlDeviceGetPowerUsage" in gpu(s, 1).state_reason)
    assert gpu(found, 0).telemetry.temperature_c == 31


def test_processes_are_named_without_waiting_for_the_second_interval(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu(processes=[FakeProcess(7, GIB)])]))
    listed = threading.Event()

    def look(pids: Iterable[int]) -> Mapping[int, Reading[HostProcess]]:
        found = {pid: Unknown("found") for pid in pids}
        if found:
            listed.wait(DEADLINE_S)  # longer than the first snapshot waits for it
        return found

    sampler = Sampler(600.0, 600.0, look=look, proc=Path("/nowhere"))
    sampler.subscribe(listed.set)
    sampler.start()
    try:
        until(sampler, lambda s: bool(s.gpus) and _hosts(s) == [Unknown("found")])
    finally:
        sampler.stop()


def _hosts(snapshot: Snapshot) -> list[Reading[HostProcess]]:
    processes = gpu(snapshot, 0).processes
    return [] if isinstance(processes, Unknown) else [each.host for each in processes]


def test_changes_show_in_the_next_snapshots(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_EIGHT)
    with watching() as sampler:
        until(sampler, is_complete)
        fake_nvml.show(_EIGHT.change(3, utilization_percent=99, temperature_c=80))
        until(
            sampler, lambda s: gpu(s, 3).telemetry.temperature_c == 80 and gpu(s, 3).telemetry.utilization_percent == 99
        )


def test_eight_gpus_cost_fewer_than_49_calls_a_pass(fake_nvml: FakeMachine) -> None:
    """At the usual ratio of slow to fast readings, so that at 1 s it is that many a second; half of nvitop 1.7's."""
    fake_nvml.show(_EIGHT)

    def passes(snapshot: Snapshot) -> float:
        return snapshot.calls.get("nvmlDeviceGetPowerUsage", 0) / 8

    with watching(interval_s=0.05, slow_interval_s=0.25) as sampler:
        first = until(sampler, lambda s: passes(s) >= 2)
        last = until(sampler, lambda s: passes(s) >= 2 + 60)
    cost = (sum(last.calls.values()) - sum(first.calls.values())) / (passes(last) - passes(first))
    print(f"\n{cost:.1f} NVML calls a pass")
    assert cost < 49
    assert last.calls["nvmlDeviceGetName"] == 8, "what never changes is read once"


def test_every_call_is_counted(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_EIGHT)
    with watching() as sampler:
        until(sampler, lambda s: is_complete(s) and sum(s.calls.values()) == sum(fake_nvml.calls().values()))


def test_the_end(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_EIGHT)
    with watching() as sampler:
        until(sampler, is_complete)
        sampler.stop()
        last = sampler.latest()
        assert last is not None
        assert sampler.wait(last, DEADLINE_S) is None, "none ever again, and at once"
        assert sampler.latest() is last
    for thread in threading.enumerate():
        if thread.name.startswith("gpu-"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), thread.name


@pytest.mark.usefixtures("fake_nvml")
def test_before_the_first_snapshot_there_is_none() -> None:
    sampler = Sampler(look=no_processes)
    assert sampler.latest() is None
    assert sampler.wait(None, 0.01) is None


def test_the_sampler_is_woken_once_for_all_that_it_waits_for() -> None:
    sampler, told, looked = Sampler(), [0], list[str]()

    def all_told() -> bool:
        looked.append(threading.current_thread().name)
        return told[0] == 16

    waiting = threading.Thread(target=sampler._wait_for, args=(all_told, DEADLINE_S), name="waits")
    waiting.start()
    wait_until(lambda: bool(looked))
    for _ in range(16):
        with sampler._progress:
            told[0] += 1
        sampler._tell()
    waiting.join(DEADLINE_S)
    assert looked.count("waits") == 2  # before it waits, and when all is there


def test_a_crew_has_more_threads_only_while_a_job_takes_long() -> None:
    released, done = threading.Event(), list[str]()
    crew = Crew("crew-of-a-test")

    def threads() -> int:
        return sum(thread.name == "crew-of-a-test" for thread in threading.enumerate())

    def hang() -> None:
        released.wait(DEADLINE_S)

    crew.do(hang)
    wait_until(lambda: not crew.is_behind)
    for number in range(8):
        crew.do(partial(done.append, str(number)))
    assert done == []
    crew.reinforce()
    wait_until(lambda: len(done) == 8)
    assert (done, threads()) == (sorted(done), 2), "one for the job that hangs, one for all others"
    crew.reinforce()
    assert threads() == 2
    released.set()
    wait_until(lambda: threads() == 1)
    crew.end()
    wait_until(lambda: threads() == 0)
