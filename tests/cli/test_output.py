"""Where output goes, or cannot go."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gpumem_tui.report.output import on_end
from tests.sharing import WarmPython

_HEADLESS = (
    ["models"],
    ["settings"],
    pytest.param(["predict", "--batch-size", "1", "--model", "mlp", "--json"], marks=pytest.mark.slow),
    pytest.param(["doctor", "--json"], marks=pytest.mark.slow),
)


def _shell(arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """Run the program with a shell's redirection of its own."""
    command = f'exec -a "{WarmPython.path()}" "$0" -m gpumem_tui "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("arguments", _HEADLESS, ids=lambda arguments: arguments[0])
def test_a_full_disk_behind_the_output_is_one_line(arguments: list[str]) -> None:
    done = _shell(arguments, "> /dev/full")
    assert done.returncode == 4
    assert done.stderr == "gpumem-tui: the output cannot be written: No space left on device; free space there\n"


@pytest.mark.parametrize("arguments", _HEADLESS, ids=lambda arguments: arguments[0])
def test_nobody_need_want_the_output(arguments: list[str]) -> None:
    done = _shell(arguments, ">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_without_an_input_there_is_no_screen() -> None:
    done = _shell(["monitor", "--once"], "<&-")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 4)


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    called: list[int] = []
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        on_end(lambda: called.append(1))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert called == [1]
