"""A visitor's process, and what is used of textual-serve's insides."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from gpumem_tui.serve.visit import USED, Visit
from tests.waiting import wait_for_file, wait_until_gone

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
os.write(1, b"__GANGLION__\\n" + b"D" + (5).to_bytes(4, "big") + b"drawn")
scratch = pathlib.Path(sys.argv[1] + ".new")
scratch.write_text(f"{os.getpid()} {child.pid}")
scratch.rename(sys.argv[1])
time.sleep(1000)
"""


async def _nothing(*_: object) -> None:
    """A browser that takes everything."""


async def test_textual_serve_has_what_is_used_of_its_insides() -> None:
    service = AppService(
        "", write_bytes=_nothing, write_str=_nothing, close=_nothing, download_manager=DownloadManager()
    )
    assert [name for name in USED if not hasattr(service, name)] == []
    assert service._build_environment(100, 30)["COLUMNS"] == "100"


async def test_a_process_that_does_not_want_to_end_ends_though_the_browser_takes_nothing(tmp_path: Path) -> None:
    drawn = asyncio.Event()

    async def write(_: bytes) -> None:
        drawn.set()
        await asyncio.Event().wait()

    pids = tmp_path / "pids"
    visit = Visit([sys.executable, "-c", STUBBORN, str(pids)], write, _nothing, _nothing)
    await visit.start(80, 24)
    await asyncio.wait_for(drawn.wait(), 120)
    await asyncio.to_thread(wait_for_file, pids)
    await visit.stop()
    await visit.stop()
    wait_until_gone([int(pid) for pid in pids.read_text().split()])
