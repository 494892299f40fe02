"""The surroundings of a command that is followed: its environment, and programs in PATH in place of others.

`nvidia-smi` answers for the simulated GPU, and Python by its name is followed with any PYTHONPATH.

Run as a script, with the standard library alone, it is `nvidia-smi` of the simulated GPU.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DRIVER, CUDA = "570.86.10", (12, 8)
"""The driver in the installer ``cuda_12.8.0_570.86.10_linux.run``, and the CUDA that it comes with."""

SITE = Path(__file__).parent / "site"
"""Folders that must be on PYTHONPATH for a process to be followed."""

_UUID_OF_FIRST = "00000000-0000-0000-0000-000000000000"
_MOST = 8
"""GPUs that one machine has at most."""

_MIB = 1024 * 1024
_TRIAL = "GPUMEM_TUI_TRIAL"
"""Names the folder of the request and the socket."""

_PYTHON = """#!/bin/sh
# A script that replaces PYTHONPATH would not be followed: what follows it is put back, then the program itself is run.
case ":$PYTHONPATH:" in *:{site}:*) ;; *) PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}} ;; esac
export PYTHONPATH
exec {program} "$@"
"""


SWITCHED_OFF: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "",
}
"""Variables that keep loggers and hubs from sending (their documentation); an empty value only removes a variable."""

_IN_ORDER = {"PYTHONHASHSEED": "0", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""So that two runs allocate in the same order: sets as they are hashed, weights as transformers loads them."""

_IDLE_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Environment of a simulated run: by default OpenMP's threads spin between loops (libgomp's GOMP_SPINCOUNT),
milliseconds for each small operation on the host where other programs want the cores too."""


def environment(directory: Path, gpu_uuids: Sequence[str], *, simulated: bool) -> dict[str, str]:
    """Return the environment of a command's run.

    Args:
        directory: of the request and the socket; programs in PATH are put into it.
        gpu_uuids: the only GPUs it may see.
    """
    path = put_in_path(directory / "bin", simulated=simulated)
    return {**of_every_run(gpu_uuids, simulated=simulated), _TRIAL: str(directory), "PATH": path}


def of_every_run(gpu_uuids: Sequence[str] = (), *, simulated: bool = True) -> dict[str, str]:
    """Return the environment shared by every run, but for PATH."""
    path = [str(SITE), os.environ.get("PYTHONPATH", "")]
    defaults = {**_IN_ORDER, **(_IDLE_THREADS if simulated else {})}
    return {
        **{name: value for name, value in os.environ.items() if name != _TRIAL and SWITCHED_OFF.get(name) != ""},
        **{name: value for name, value in SWITCHED_OFF.items() if value},
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        "PYTHONUNBUFFERED": "1",
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids),
    }


def put_in_path(folder: Path, *, simulated: bool) -> str:
    """Write the programs into a new folder, and return a PATH that begins with it.

    Args:
        simulated: whether `nvidia-smi` is to speak of the simulated GPU.
    """
    from gpumem_tui.launchers import NAMES

    folder.mkdir()
    path = os.environ.get("PATH", os.defpath)
    site = shlex.quote(str(SITE))
    for name in ("python", "python3", f"python3.{sys.version_info.minor}", *NAMES):
        found = shutil.which(name, path=path)
        if found and (name.startswith("python") or _is_script_of_python(found)):
            _write(folder / name, _PYTHON.format(site=site, program=shlex.quote(found)))
    if simulated:
        words = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve())])
        _write(folder / "nvidia-smi", f'#!/bin/sh\nexec {words} "$@"\n')
    return os.pathsep.join((str(folder), path))


def keep_followed(word: str) -> str:
    """Return a word of a command; of one that replaces PYTHONPATH, as for `env`, with what follows Python put first."""
    name, equals, value = word.partition("=")
    return f"{name}={SITE}{os.pathsep}{value}" if name == "PYTHONPATH" and equals else word


def _is_script_of_python(path: str) -> bool:
    with open(path, "rb") as file:
        return b"python" in file.readline(200)


def _write(file: Path, script: str) -> None:
    file.write_text(script)
    file.chmod(0o700)


# nvidia-smi (its manual page, "GPU ATTRIBUTES" and "--help-query-gpu")


def _fields(gpu: dict[str, Any], index: int, count: int) -> dict[str, tuple[Any, str]]:
    """Return each property that can be asked for, with its unit; nothing is in use."""
    total = (gpu["total_bytes"] + ((gpu.get("engine") or {}).get("size_bytes", 0))) // _MIB
    name, uuid = gpu["title"].partition(" next to ")[0], f"GPU-{_UUID_OF_FIRST[:-1]}{index}"
    idle = {"utilization.gpu": "%", "utilization.memory": "%", "temperature.gpu": "", "power.draw": "W"}
    return {
        "timestamp": (time.strftime("%Y/%m/%d %H:%M:%S.000"), ""),
        "index": (index, ""),
        "count": (count, ""),
        "driver_version": (DRIVER, ""),
        "compute_cap": ("{}.{}".format(*gpu["compute_capability"]), ""),
        **dict.fromkeys(("name", "gpu_name"), (name, "")),
        **dict.fromkeys(("uuid", "gpu_uuid"), (uuid, "")),
        **dict.fromkeys(("pci.bus_id", "gpu_bus_id"), (f"00000000:0{index}:00.0", "")),
        **dict.fromkeys(("memory.total", "memory.free"), (total, "MiB")),
        "memory.used": (0, "MiB"),
        **{key: (0, unit) for key, unit in idle.items()},
    }


def nvidia_smi(gpu: dict[str, Any], count: int, words: list[str]) -> str:
    """Return what `nvidia-smi` prints for these arguments: the list, properties as CSV, or the table.

    Args:
        gpu: its title, total bytes and compute capability, as a request has them.
        count: how many of its kind there are.
    """
    options: dict[str, str] = {}
    for position, word in enumerate(words):
        key, equals, value = word.partition("=")
        following = words[position + 1] if position + 1 < len(words) else ""
        options[key] = value if equals else "" if following.startswith("-") else following
    chosen = options.get("-i", options.get("--id", ""))
    indexes = [index for index in range(count) if not chosen or str(index) in chosen.split(",")]
    rows = [_fields(gpu, index, count) for index in indexes]
    if "-L" in options or "--list-gpus" in options:
        return "".join(f"GPU {row['index'][0]}: {row['name'][0]} (UUID: {row['uuid'][0]})\n" for row in rows)
    asked = options.get("--query-gpu")
    if asked is not None:
        return _as_csv(rows, [name.strip() for name in asked.split(",")], options.get("--format", ""))
    if any(key.startswith("--query-") for key in options):
        return ""
    lines = [f"NVIDIA-SMI {DRIVER}    Driver Version: {DRIVER}    CUDA Version: {CUDA[0]}.{CUDA[1]}"]
    lines += [
        f"| {row['index'][0]:>3}  {row['name'][0]:<28} | {0:>6}MiB / {row['memory.total'][0]:>6}MiB |" for row in rows
    ]
    return "\n".join([*lines, "simulated by gpumem-tui: no process is listed", ""])


def _as_csv(rows: list[dict[str, tuple[Any, str]]], asked: list[str], form: str) -> str:
    units = "nounits" not in form
    written = io.StringIO()
    table = csv.writer(written, delimiter=",", lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="\\")
    known = rows[0] if rows else {}
    if "noheader" not in form:
        titles = [f"{name} [{known[name][1]}]" if known.get(name, ("", ""))[1] else name for name in asked]
        table.writerow([title if number == 0 else f" {title}" for number, title in enumerate(titles)])
    for row in rows:
        cells = []
        for name in asked:
            value, unit = row.get(name, ("[N/A]", ""))
            cells.append(f"{value} {unit}" if units and unit else str(value))
        table.writerow([cell if number == 0 else f" {cell}" for number, cell in enumerate(cells)])
    return written.getvalue()


def _main() -> None:
    with open(os.environ[_TRIAL] + "/request.json") as file:
        request = json.load(file)
    count = min(_MOST, max(1, request["workload"]["recipe"]["gpus"]))
    sys.stdout.write(nvidia_smi(request["gpu"], count, sys.argv[1:]))


if __name__ == "__main__":
    _main()
