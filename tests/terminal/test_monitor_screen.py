"""The Monitor as a user sees it: the real program in a real terminal, the real pynvml, and a driver that misbehaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from gpumem_tui.memory import GIB
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import (
    GPU_IS_LOST,
    LIBRARY_MISMATCH,
    NO_PERMISSION,
    NOT_AVAILABLE,
    NOT_SUPPORTED,
    Calls,
    FakeGpu,
    FakeInstance,
    FakeProcess,
    Scenario,
)
from tests.terminal.terminal import Terminal, terminal


def gpu(index: int = 0, *, calls: Calls | None = None) -> FakeGpu:
    """A GPU that this very test uses."""
    used = FakeProcess(os.getpid(), (index + 3) * GIB, sm_percent=40)
    return FakeGpu(
        used_bytes=(index + 4) * GIB, processes=[used], utilization_percent=10 + index, calls=calls or Calls()
    )


WELL = Scenario(gpus=[gpu(0), gpu(1), gpu(2)])


def program(machine: FakeMachine, columns: int = 120, lines: int = 40) -> AbstractContextManager[Terminal]:
    """The program on a fake machine; a path of its own keeps the machine's real driver out."""
    return terminal(columns=columns, lines=lines, env=machine.environment)


def is_live(screen: Terminal) -> None:
    """A key is answered: the help comes and goes."""
    screen.press("?")
    screen.wait_for("esc closes")
    screen.press("\x1b")
    screen.wait_until(lambda text: "esc closes" not in text, "the end of the help")


def leaves(screen: Terminal, code: int = 0) -> None:
    """`q` ends the program at once, regardless of the driver."""
    screen.press("q")
    assert screen.exit_code() == code


def failing(**errors: int) -> Calls:
    return Calls(errors=errors)


def hanging(*functions: str) -> Calls:
    return Calls(hangs=functions)


FAULTS: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    "lost at start": (WELL.change(1, lost=True), ("0 ", "lost", "2 ")),
    "library mismatch": (Scenario(init=LIBRARY_MISMATCH), ("versions differ", "reboot")),
    "no permission for NVML": (Scenario(init=NO_PERMISSION), ("no permission", "/dev/nvidiactl")),
    "memory not supported": (
        WELL.change(0, total_bytes=None, reserved_bytes=None, used_bytes=None),
        ("0 ", "not supported", "A100"),
    ),
    "process list not permitted": (
        WELL.change(0, calls=failing(nvmlDeviceGetComputeRunningProcesses_v3=NO_PERMISSION)),
        ("GPU 0: processes unknown: no permission",),
    ),
    "utilization not supported": (WELL.change(0, utilization_percent=None), ("A100", "–")),
    "a call that hangs": (WELL.change(1, calls=hanging("nvmlDeviceGetPowerUsage")), ("stale", "A100")),
    "starting hangs": (Scenario(calls=hanging("nvmlInitWithFlags")), ("the NVIDIA driver is starting (2 s)",)),
    "2^64 - 1 bytes": (
        WELL.change(0, processes=[FakeProcess(os.getpid(), NOT_AVAILABLE)]),
        (str(os.getpid()), "–"),
    ),
    "a pid that does not exist": (
        WELL.change(0, processes=[FakeProcess(4_194_303, GIB)]),
        ("4194303", "no such process here"),
    ),
    "MIG": (
        WELL.change(
            0,
            mig_mode=1,
            instances=[FakeInstance("MIG-1", used_bytes=2 * GIB), FakeInstance("MIG-2", used_bytes=9 * GIB)],
            calls=failing(nvmlDeviceGetMemoryInfo_v2=NO_PERMISSION),
        ),
        ("11.00/20.00", "MIG 1 of 10.00"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_and_the_screen_stays_live(fake_machine: FakeMachine, fault: str) -> None:
    scenario, said = FAULTS[fault]
    fake_machine.show(scenario)
    with program(fake_machine) as screen:
        screen.wait_for(*said)
        is_live(screen)
        leaves(screen)


def test_the_bare_command_opens_on_the_monitor_where_a_gpu_answers(fake_machine: FakeMachine) -> None:
    fake_machine.show(WELL)
    with program(fake_machine, 80, 24) as screen:
        text = screen.wait_for("GPU MEM", "A100", str(os.getpid()))
        assert "SIMULATED" not in text
        leaves(screen)


def test_without_a_driver_it_opens_on_search_and_says_so() -> None:
    with terminal() as screen:
        screen.wait_for("SIMULATED", "no NVIDIA driver")
        screen.press("1")
        screen.wait_for("No GPU to watch", "no NVIDIA driver")
        screen.press("2")
        screen.wait_for("SIMULATED")
        leaves(screen)


def _changes(before: Scenario, after: Scenario, first: str, then: str) -> tuple[Scenario, Scenario, str, str]:
    return before, after, first, then


CHANGES = {
    "a value": _changes(WELL, WELL.change(2, used_bytes=70 * GIB), "6.00/80.00", "70.00/80.00"),
    "a GPU is lost": _changes(WELL, WELL.change(1, lost=True), "GPU MEM", "lost"),
    "a lost GPU comes back": _changes(WELL.change(1, lost=True), WELL, "lost", "5.00/80.00"),
    "a GPU appears": _changes(Scenario(gpus=[gpu(0)]), WELL, "4.00/80.00", "6.00/80.00"),
    "the driver comes late": _changes(Scenario(init=LIBRARY_MISMATCH), WELL, "versions differ", "6.00/80.00"),
    "the driver goes": _changes(
        WELL, Scenario(calls=failing(nvmlDeviceGetMemoryInfo_v2=GPU_IS_LOST), gpus=WELL.gpus), "GPU MEM", "lost"
    ),
    "MIG is switched off": _changes(
        WELL.change(0, mig_mode=1, instances=[FakeInstance("MIG-1")]), WELL, "A100", "4.00/80.00"
    ),
    "a reading stops being supported": _changes(
        WELL, WELL.change(0, calls=failing(nvmlDeviceGetPowerUsage=NOT_SUPPORTED)), "GPU MEM", "–"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_it_watches_is_shown(fake_machine: FakeMachine, change: str) -> None:
    before, after, first, then = CHANGES[change]
    fake_machine.show(before)
    with program(fake_machine) as screen:
        screen.wait_for(first) if before.init == 0 else screen.wait_until(
            lambda text: first in text or "SIMULATED" in text, first
        )
        fake_machine.show(after)
        screen.wait_for(then)
        is_live(screen)
        leaves(screen)


def test_a_healthy_gpu_goes_on_beside_one_that_hangs(fake_machine: FakeMachine) -> None:
    stuck = WELL.change(1, calls=hanging("nvmlDeviceGetMemoryInfo_v2"))
    fake_machine.show(WELL)
    with program(fake_machine) as screen:
        screen.wait_for("GPU MEM", "5.00/80.00")
        fake_machine.show(stuck)
        screen.wait_for("stale")
        fake_machine.show(stuck.change(2, used_bytes=70 * GIB))
        text = screen.wait_for("70.00/80.00")
        assert "5.00/80.00" in text, "the last reading stays, with its age"
        leaves(screen)


def test_search_opens_from_the_monitor_though_listing_the_gpus_hangs(fake_machine: FakeMachine) -> None:
    fake_machine.show(WELL)
    with program(fake_machine) as screen:
        screen.wait_for("GPU MEM")
        fake_machine.show(Scenario(gpus=WELL.gpus, calls=hanging("nvmlDeviceGetCount_v2")))
        screen.press("2")
        is_live(screen)
        leaves(screen)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_while_a_call_hangs(fake_machine: FakeMachine, number: signal.Signals) -> None:
    fake_machine.show(WELL.change(0, calls=hanging("nvmlDeviceGetPowerUsage")))
    with program(fake_machine) as screen:
        screen.wait_for("GPU MEM")
        os.kill(screen.pid, number)
        assert screen.exit_code() == 128 + number


def test_resizing_in_a_real_terminal(fake_machine: FakeMachine) -> None:
    fake_machine.show(WELL)
    looks: list[tuple[int, int, Callable[[str], bool]]] = [
        (80, 24, lambda text: "GPU MEM" in text and "HOST MEM" in text),
        (40, 10, lambda text: "GPU MEM" in text and "HOST MEM" not in text),
        (30, 6, lambda text: "needs 40×8" in text),
        (200, 60, lambda text: "driver reserved" in text),
    ]
    with program(fake_machine) as screen:
        screen.wait_for("GPU MEM")
        for columns, lines, there in looks:
            screen.resize(columns, lines)
            screen.wait_until(there, f"{columns}×{lines}")
        leaves(screen)


def test_without_colour_and_in_ascii(fake_machine: FakeMachine) -> None:
    fake_machine.show(WELL)
    plain = {**fake_machine.environment, "NO_COLOR": "1", "GPUMEM_TUI_ASCII": "1"}
    with terminal(env=plain) as screen:
        assert screen.wait_for("GPU MEM", "driver reserved", "unaccounted").isascii()
        leaves(screen)
