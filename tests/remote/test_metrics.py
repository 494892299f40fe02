"""`gpumem-tui --host A --host B --metrics`: all of them for Prometheus, without a screen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpumem_tui.memory import GIB
from tests.monitor.snapshots import gpu, machine
from tests.remote.standins import DENIED, Ssh
from tests.waiting import wait_until

Series = dict[tuple[str, str], float]


def _scraped(address: str) -> Series:
    """By name and host, the last of those that differ otherwise."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read().decode()
    return {
        (sample.name, sample.labels["host"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_host_is_served_by_its_name_and_one_that_is_away_says_so(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path)
    ssh.prints("a", [machine([gpu(0, used_bytes=10 * GIB)])])
    ssh.prints("b", [machine([gpu(0, used_bytes=20 * GIB)])])
    ssh.host("c", f"echo '{DENIED}' >&2", "exit 255")
    own = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    hosts = ["--host", "a", "--host", "b", "--host", "c"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", *hosts, "--metrics", "127.0.0.1:0"],
        env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = re.fullmatch(r"gpumem-tui: metrics on (\S+), of 3 hosts\n", process.stderr.readline())
        assert said is not None
        up = ("gpumem_host_up", "a"), ("gpumem_host_up", "b")
        found = wait_until(lambda: (series := _scraped(said[1])) and all(series[each] for each in up) and series)
        assert found
        assert found["gpumem_gpu_memory_used_bytes", "a"] == 10 * GIB
        assert found["gpumem_gpu_memory_used_bytes", "b"] == 20 * GIB
        assert found["gpumem_host_up", "c"] == 0
        assert process.stderr.readline().startswith("gpumem-tui: c: away: no key is accepted")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
        process.wait()
