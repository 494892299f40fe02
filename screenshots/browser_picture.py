"""The picture of the Monitor in a browser: a real server on the fake NVML, in a headless Chromium."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gpumem_tui.memory import GIB
from tests.nvml_stub.machine import FakeMachine, compile_stub
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario
from tests.serve.browser import browsing, find_chromium
from tests.serve.serving import serving

_WINDOW = (1000, 620)
_SIZES_GIB = (31, 62, 77, 12)
"""The browser's picture: its pixels, and each GPU's memory."""
_SEEN_S = 32


async def browser_picture(path: Path) -> None:
    """A machine with four GPUs, on each of which a process of this user's computes."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium is installed here (Debian: apt install chromium)")
    with TemporaryDirectory() as made, _busy(Path(made), len(_SIZES_GIB)) as pids:
        folder = Path(made)
        machine = FakeMachine(compile_stub(folder), folder)
        machine.show(_four_gpus(pids, 0))
        settings = folder / "settings.toml"
        settings.write_text("chart_minutes = 0.5\n")
        own = {**machine.environment, "PATH": os.environ["PATH"]}
        with serving(own, "--settings", str(settings)) as served:
            async with browsing(chromium, folder / "browser") as page:
                await page.open(served.url, *_WINDOW)
                for second in range(_SEEN_S):
                    machine.show(_four_gpus(pids, second))
                    await asyncio.sleep(1)
                path.write_bytes(await page.picture())


def _four_gpus(pids: list[int], second: int) -> Scenario:
    """The first process holds more while it is in the middle of what it does."""
    held = [size * GIB + (9 * GIB if not place and second % 16 > 7 else 0) for place, size in enumerate(_SIZES_GIB)]
    return Scenario(
        gpus=[
            FakeGpu(
                used_bytes=size, processes=[FakeProcess(pid, size - GIB // 4, sm_percent=96 - 7 * place)],
                utilization_percent=97 - 7 * place - second % 5,
                power_w=310.0 - 20 * place, temperature_c=61 - 3 * place,
            )
            for place, (pid, size) in enumerate(zip(pids, held, strict=True))
        ]
    )  # fmt: skip


@contextmanager
def _busy(folder: Path, count: int) -> Iterator[list[int]]:
    """Processes that look like training."""
    (folder / "train.py").write_text("import time\ntime.sleep(600)\n")
    command = ["python", "train.py", "--batch-size", "16"]
    processes = [subprocess.Popen(command, executable=sys.executable, cwd=folder) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
