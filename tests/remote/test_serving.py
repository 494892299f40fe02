"""What a host does for a search elsewhere: the real program, spoken with as the viewer does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from gpumem_tui import __version__
from gpumem_tui.options.configuration import Options
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.search.predicting import CommandOutput
from gpumem_tui.search.wire import Configured, NotSearchable, Reply, decode_reply
from tests.waiting import wait_until_gone

HANGS = "import os, time\nprint('stands', os.getpid(), flush=True)\ntime.sleep(1000)\n"


class Served:
    """The program and its answers."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpumem_tui", "search-for-viewer"], cwd=home, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def configure(self, options: Options, directory: Path, version: str = __version__) -> Reply:
        self.ask(action="configure", version=version, directory=str(directory), options=asdict(options))
        return self.answer()

    def answer(self) -> Reply:
        assert self.process.stdout is not None
        return decode_reply(self.process.stdout.readline())

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def hanging(folder: Path) -> Options:
    (folder / "hangs.py").write_text(HANGS)
    return Options(WorkloadOptions(command=(sys.executable, "hangs.py", "{batch}")), gpu="sim:t4-16gb")


def test_options_that_cannot_be_searched_are_refused_one_by_one(served: Served, tmp_path: Path) -> None:
    command = WorkloadOptions(command=("python", "t.py"))
    for options, directory, version, said in (
        (Options(), tmp_path, "0.0", f"its gpumem-tui is {__version__}, the one here 0.0: install the same on both"),
        (Options(), tmp_path / "missing", __version__, "--remote-directory"),
        (Options(gpu="sim:no-such"), tmp_path, __version__, "--gpu"),
        (Options(command), tmp_path, __version__, "has no {batch}"),
    ):
        reply = served.configure(options, directory, version)
        assert isinstance(reply, NotSearchable)
        assert said in reply.detail


@pytest.mark.parametrize("how", ["leave", "kill"])
def test_nothing_stays_when_the_viewer_is_gone(served: Served, tmp_path: Path, how: str) -> None:
    reply = served.configure(hanging(tmp_path), tmp_path)
    assert isinstance(reply, Configured)
    assert reply.directory == str(tmp_path)
    served.ask(action="search")
    while not isinstance(event := served.answer(), CommandOutput):
        pass
    started = [each.pid for each in psutil.Process(served.process.pid).children(recursive=True)]
    assert int(event.text.split()[1]) in started
    if how == "leave":
        served.leave()
        served.process.wait(60)
    else:
        served.process.kill()
    wait_until_gone(started)
