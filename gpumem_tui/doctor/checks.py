"""Checks what works on this machine and what does not, and names the fix.

Every check shows what it found in one line. Something that is missing but not needed here (a GPU on a laptop, a driver
for it) is skipped; something that is there and does not work has failed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from gpumem_tui.ascii import is_chosen, wants_ascii
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading, Snapshot
from gpumem_tui.monitor.vendors import known, of_brand, vendor
from gpumem_tui.simulator.allocator.profile import too_old
from gpumem_tui.text import file_text

_TORCH_TIMEOUT_S = 120.0
_TORCH_CODE = """
import json, platform
facts = {"python": platform.python_version()}
try:
    import torch
except ImportError as error:
    facts["error"] = str(error)
else:
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "usable": torch.cuda.is_available()}
print(json.dumps(facts))
"""
_CAP_SYS_PTRACE = 19


class _Torch(msgspec.Struct):
    """The torch of an interpreter, as `_TORCH_CODE` prints it; `error`: why it is missing."""

    python: str = ""
    torch: str = ""
    cuda: str | None = None
    usable: bool = False
    error: str = ""


class Status(Enum):
    """The outcome of a check. The value is what JSON and the screen show."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Check:
    """The outcome of one check, in words.

    Attributes:
        remedy: the command to type, or the file to change; required for a warning and a failure.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.WARN, Status.FAIL) and not self.remedy:
            raise ValueError(f"{self.name} has no remedy")


@dataclass(frozen=True)
class System:
    """The machine as the checks look at it. Tests point it elsewhere.

    Attributes:
        root: the file system.
        is_terminal: stdin, stdout and stderr all are.
        size: of the terminal, columns and lines; 0 where it is unknown.
        chose_ascii: the user asks for ASCII where the terminal could show more.
    """

    root: Path
    environ: Mapping[str, str]
    uid: int
    machine: str
    is_terminal: bool
    size: tuple[int, int]
    encoding: str
    chose_ascii: bool = False

    @classmethod
    def here(cls) -> System:
        """Describe this machine and this terminal."""
        streams = (sys.stdin, sys.stdout, sys.stderr)  # None where whoever started the program closed them
        try:
            size = os.get_terminal_size(2)
        except OSError:
            size = os.terminal_size((0, 0))
        return cls(
            root=Path("/"),
            environ=os.environ,
            uid=os.geteuid(),
            machine=platform.machine(),
            is_terminal=all(stream is not None and stream.isatty() for stream in streams),
            size=(size.columns, size.lines),
            encoding=getattr(sys.stdout, "encoding", "no output").removeprefix("gpumem_tui_"),
            chose_ascii=is_chosen(),
        )


def examine(system: System, snapshot: Snapshot | None, python: str | None) -> Iterator[Check]:
    """Yield every check, the quick ones first.

    Args:
        snapshot: what the monitor reads; None if the driver did not answer.
        python: the interpreter to look for torch in; None for the one that runs this program.
    """
    yield driver_check(system, snapshot)
    if snapshot is not None and not snapshot.problem:
        yield from other_drivers_checks(snapshot)
    if snapshot is not None and not snapshot.problem:
        yield gpus_check(snapshot.gpus)
        yield processes_check(snapshot.gpus)
    yield device_files_check(system)
    yield container_check(system)
    yield terminal_check(system)
    yield attach_check(system)
    yield probe_directory_check()
    yield settings_check()
    yield torch_check(python, has_gpu=snapshot is not None and bool(snapshot.gpus))


def driver_check(system: System, snapshot: Snapshot | None) -> Check:
    """Check whether the vendor's library answers."""
    asked = vendor()
    if snapshot is None:
        remedy = f"see {asked.kernel_log}; `{asked.tool}` hangs too then"
        return Check("driver", Status.FAIL, f"the {asked.driver} does not answer", remedy)
    if not snapshot.problem:
        driver, cuda = snapshot.driver_version, snapshot.cuda_version
        which = asked.driver if len(snapshot.drivers) > 1 else "driver"
        versions = [
            f"{which} {driver.reason if isinstance(driver, Unknown) else driver}",
            cuda.reason if isinstance(cuda, Unknown) else f"{snapshot.runtime} {cuda}",
        ]
        return Check("driver", Status.OK, ", ".join(versions))
    if asked.is_on_bus(system.root) or not snapshot.problem.startswith((asked.no_driver, asked.not_loaded)):
        found, _, remedy = snapshot.problem.partition(": ")
        return Check("driver", Status.FAIL, found, remedy or f"see {asked.kernel_log}")
    return Check(
        "driver", Status.SKIP, f"no {asked.brand} GPU here; `gpumem-tui search --gpu sim:h100-80gb` simulates one"
    )


def other_drivers_checks(snapshot: Snapshot) -> Iterator[Check]:
    """Check the drivers of further vendors, besides that whose GPUs come first."""
    for driver in snapshot.drivers:
        whose, runtime = of_brand(driver.vendor), driver.runtime_version
        if driver.vendor == vendor().brand:
            continue
        found, _, remedy = driver.problem.partition(": ")
        if not driver.problem:
            words = runtime.reason if isinstance(runtime, Unknown) else f"{driver.runtime} {runtime}"
            yield Check(whose.driver, Status.OK, f"{driver.driver_version}, {words}")
        elif driver.problem.startswith(whose.not_loaded):
            yield Check(whose.driver, Status.SKIP, f"{found}; to watch {whose.brand} GPUs too, {remedy}")
        else:
            yield Check(whose.driver, Status.FAIL, found, remedy or f"see {whose.kernel_log}")


def gpus_check(gpus: Sequence[GpuReading]) -> Check:
    """Check whether there are GPUs and all of them answer."""
    if not gpus:
        remedy = f"see `{vendor().tool}`; in a container, {vendor().in_containers}"
        return Check("GPUs", Status.WARN, "the driver runs, but lists no GPU", remedy)
    models = ", ".join(f"{count} × {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
    silent = [gpu for gpu in gpus if gpu.state is not DeviceState.OK]
    if silent:
        reasons = "; ".join(f"GPU {gpu.index} is {gpu.state.value}: {gpu.state_reason}" for gpu in silent)
        return Check(
            "GPUs",
            Status.FAIL,
            f"{models}; {reasons}",
            f"see {of_brand(silent[0].vendor).faults_log}; then `sudo reboot`",
        )
    return Check("GPUs", Status.OK, models)


def processes_check(gpus: Sequence[GpuReading]) -> Check:
    """Check whether the driver shows how much of a GPU's memory each process holds."""
    lists = {gpu.index: gpu.processes for gpu in gpus if gpu.state is DeviceState.OK}
    if not lists:
        return Check("processes", Status.SKIP, "no GPU answers")
    unread = {index: listed.reason for index, listed in lists.items() if isinstance(listed, Unknown)}
    if unread:
        reasons = ", ".join(sorted(set(unread.values())))
        return Check(
            "processes", Status.WARN, f"no process list on GPU {_listed(unread)}: {reasons}", "`sudo gpumem-tui doctor`"
        )
    processes = [process for listed in lists.values() if not isinstance(listed, Unknown) for process in listed]
    foreign = [process.host.reason for process in processes if isinstance(process.host, Unknown)]
    if foreign:
        remedy = "run gpumem-tui outside the container, or start that with `docker run --pid=host`"
        return Check("processes", Status.WARN, f"{len(foreign)} not found here: {foreign[0]}", remedy)
    if any(isinstance(process.used_bytes, Unknown) for process in processes):
        found = "the driver does not report memory by process (WSL, MIG or vGPU)"
        return Check("processes", Status.WARN, found, "`gpumem-tui run -- COMMAND` measures your training")
    found = f"{len(processes)}, each with its memory" if processes else "none now; the lists can be read"
    return Check("processes", Status.OK, found)


def device_files_check(system: System) -> Check:
    """Check whether this user may open the GPUs' device files, as programs must."""
    pattern = re.compile("|".join(each.device_files for each in known()))
    files = [path for path in sorted((system.root / "dev").glob("*")) if pattern.fullmatch(path.name)]
    if not files:
        return Check("device files", Status.SKIP, "no GPU device files in /dev; a simulated GPU needs none")
    closed = [str(path.name) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        place = f"/dev/{re.sub('[0-9]*$', '', closed[0])}"
        remedy = f"join the group that `ls -l {place}*` shows, or ask who administers this machine"
        return Check("device files", Status.FAIL, f"no permission to open /dev/{', /dev/'.join(closed)}", remedy)
    return Check("device files", Status.OK, f"{len(files)} can be opened")


def container_check(system: System) -> Check:
    """Check whether a container hides what the monitor needs."""
    marks = [name for name in (".dockerenv", "run/.containerenv") if (system.root / name).exists()]
    if not marks and "container" not in system.environ:
        return Check("container", Status.SKIP, "not in a container")
    for withheld, remedy in (each.withheld(system.environ) for each in known()):
        if withheld:
            return Check("container", Status.FAIL, withheld, remedy)
    return Check("container", Status.OK, "the driver's libraries are not withheld")


def terminal_check(system: System) -> Check:
    """Check whether the screen can be drawn as it was meant."""
    if not system.is_terminal:
        return Check("terminal", Status.SKIP, "none: the screen needs one; `gpumem-tui monitor --once` does not")
    columns, lines = system.size
    term = system.environ.get("TERM", "")
    place = " in tmux" if "TMUX" in system.environ else ""
    colours = _colours(system.environ)
    size = f"{columns}×{lines}" if columns and lines else "size unknown"
    characters = "ASCII as you chose" if system.chose_ascii else system.encoding
    found = f"{size}, {term or 'TERM unset'}{place}, {colours}, {characters}"
    if term in ("", "dumb"):
        return Check("terminal", Status.FAIL, found, "`export TERM=xterm-256color`, or the name of your terminal")
    is_utf8 = system.encoding.lower().replace("-", "") == "utf8" and not wants_ascii(system.environ)
    if not is_utf8 and not system.chose_ascii:
        return Check("terminal", Status.WARN, found, "`export LC_ALL=C.UTF-8`; until then the screen is ASCII")
    if colours == "16 colours":
        remedy = "`set -g default-terminal tmux-256color` in ~/.tmux.conf" if place else "`export TERM=xterm-256color`"
        return Check("terminal", Status.WARN, found, f"for more colours: {remedy}")
    if 0 < columns < 80 or 0 < lines < 24:
        return Check("terminal", Status.WARN, found, "enlarge it to 80×24, then `gpumem-tui`")
    return Check("terminal", Status.OK, found)


def attach_check(system: System) -> Check:
    """Check whether `gpumem-tui attach` may put a probe into a running process."""
    if system.machine != "x86_64":
        found = f"attaching works on x86-64 only, and this machine is {system.machine}"
        return Check("attach", Status.WARN, found, "`gpumem-tui run -- COMMAND` works everywhere")
    scope = _number(system.root / "proc/sys/kernel/yama/ptrace_scope")
    if scope >= 3:
        remedy = "until a reboot, start training with `gpumem-tui run -- COMMAND`"
        return Check("attach", Status.WARN, "the kernel forbids attaching (kernel.yama.ptrace_scope = 3)", remedy)
    if scope and system.uid != 0:
        remedy = "`sudo gpumem-tui attach PID`, or `sudo sysctl kernel.yama.ptrace_scope=0`"
        return Check("attach", Status.WARN, f"needs root here (kernel.yama.ptrace_scope = {scope})", remedy)
    if system.uid == 0 and not _may_trace(system.root):
        remedy = "start the container with `docker run --cap-add SYS_PTRACE`"
        return Check("attach", Status.WARN, "this root has no CAP_SYS_PTRACE", remedy)
    whose = "any user's" if system.uid == 0 else "your own"
    return Check("attach", Status.OK, f"may attach to {whose} processes")


def probe_directory_check() -> Check:
    """Check whether probes can publish where this user's viewer looks."""
    from gpumem_tui.probe.files import default_directory
    from gpumem_tui.watch.folders import why_unusable

    folder = default_directory()
    if reason := why_unusable(folder):
        return Check(
            "probe directory", Status.FAIL, reason, "`export GPUMEM_TUI_DIR=FOLDER` where you train and where you watch"
        )
    found = str(folder) if folder.exists() else f"{folder} is made when it is needed"
    return Check("probe directory", Status.OK, found)


def settings_check() -> Check:
    """Check whether the settings file is valid."""
    from gpumem_tui.catalog.loader import gpus
    from gpumem_tui.errors import OptionError
    from gpumem_tui.settings import default_path, load

    path = default_path()
    try:
        load()
        gpus()
    except OptionError as error:
        return Check("settings", Status.FAIL, str(error), f"fix {path}; `gpumem-tui settings` prints one")
    if path.exists():
        return Check("settings", Status.OK, str(path))
    return Check("settings", Status.OK, f"none ({path} would be read)")


def torch_check(python: str | None, *, has_gpu: bool) -> Check:
    """Check whether torch is in the interpreter that trains and can use a GPU, in a process of its own."""
    interpreter = sys.executable if python is None else python
    facts = _ask(interpreter)
    bad = Status.FAIL if python is not None else Status.WARN
    if facts.error:
        remedy = f"`{interpreter} -m pip install torch`, or `gpumem-tui doctor --python PATH`"
        return Check("torch", bad, f"{interpreter}: {facts.error}", remedy)
    found = f"{facts.torch}, Python {facts.python}"
    if (facts.usable or not has_gpu) and (reason := too_old(facts.torch)):
        remedy = (
            f"`{interpreter} -m pip install --upgrade torch`, or --python PATH; `predict` and `plan` answer by formula"
        )
        return Check("torch", Status.WARN if facts.usable else bad, f"{found}: {reason}", remedy)
    if facts.usable:
        return Check("torch", Status.OK, f"{found}, CUDA {facts.cuda}")
    if not has_gpu:
        return Check("torch", Status.OK, f"{found}, no GPU to use: steps run on the simulated one")
    if facts.cuda is None:
        return Check(
            "torch",
            bad,
            f"{found}, built without CUDA",
            "install a CUDA build by the line of https://pytorch.org/get-started/locally",
        )
    remedy = (
        f"compare the CUDA version of `{vendor().tool}` (the driver may be too old); see `echo $CUDA_VISIBLE_DEVICES`"
    )
    return Check("torch", bad, f"{found}, CUDA {facts.cuda}: cannot use a GPU", remedy)


def _ask(interpreter: str) -> _Torch:
    try:
        done = subprocess.run(
            [interpreter, "-c", _TORCH_CODE],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return _Torch(error=f"cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return _Torch(error=f"`import torch` did not finish within {_TORCH_TIMEOUT_S:.0f} s")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return msgspec.json.decode(lines[-1], type=_Torch)
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return _Torch(error=f"`import torch` fails: {last[0]}")


def _may_trace(root: Path) -> bool:
    for line in file_text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return True


def _colours(environ: Mapping[str, str]) -> str:
    """Name the colours of a terminal as Textual decides them."""
    if "NO_COLOR" in environ:
        return "no colours (NO_COLOR)"
    if environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "16 million colours"
    return "256 colours" if "256color" in environ.get("TERM", "") else "16 colours"


def _listed(indices: Mapping[int, object]) -> str:
    return ", ".join(map(str, indices))


def _number(path: Path) -> int:
    text = file_text(path).strip()
    return int(text) if text.isdigit() else 0
