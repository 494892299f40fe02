"""Work in a child process: its result, or how the child ended. Needs no GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.gpu.forks import Fork, ForkFailed, Write


def _speak_twice_then_die(write: Write) -> None:
    write(b"part")
    write(b"whole")
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(write: Write) -> None:
    raise ValueError("no\nsuch thing")


def _crash(write: Write) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(write: Write) -> None:
    os._exit(3)


def _hang(write: Write) -> None:
    signal.pause()


def _speak_then_hang(write: Write) -> None:
    write(b"part")
    signal.pause()


def test_what_was_written_last_is_the_result_however_the_child_ends() -> None:
    assert Fork.start(_speak_twice_then_die).wait(10) == b"whole"


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (_raise, "ValueError: no such thing"),
        (_crash, "killed by SIGKILL"),
        (_leave, "exited with code 3"),
        (lambda write: None, "exited with code 0"),
    ],
)
def test_a_child_without_a_result_says_how_it_ended(work: Callable[[Write], None], why: str) -> None:
    with pytest.raises(ForkFailed, match=why):
        Fork.start(work).wait(10)


def test_what_a_child_left_before_it_hung_is_the_result() -> None:
    assert Fork.start(_speak_then_hang).wait(2) == b"part"


def test_a_child_that_hangs_is_killed() -> None:
    fork = Fork.start(_hang)
    started = time.monotonic()
    with pytest.raises(ForkFailed, match="still running"):
        fork.wait(0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(ProcessLookupError):
        os.kill(fork.pid, 0)


def test_nothing_is_left_behind() -> None:
    fork = Fork.start(_raise)
    with pytest.raises(ForkFailed):
        fork.wait(10)
    assert not list(fork.result.parent.glob(f"{fork.result.name}*"))
