"""Slurm's own commands about a job: the nodes that it runs on, and the resources that it asked for."""

from __future__ import annotations

import re
import subprocess

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Unknown
from gpumem_tui.report.objects import JsonObject
from gpumem_tui.report.tables import counted
from gpumem_tui.text import printable, shortened

_SLURM_S = 20.0
_NUMBER = re.compile(r"[0-9][0-9_+]*")
_FIELDS = ("JobID", "JobIDRaw", "State", "ElapsedRaw", "NodeList", "AllocTRES", "JobName")
"""Fields of sacct(1). A name may hold the separator, so it is the last one."""
_PAIR = re.compile(r"(?:^|\s)([A-Z]\w*)=(\S*)")
"""A field of ``scontrol --oneliner show job``."""


class SlurmJob(JsonObject, frozen=True):
    """A job as Slurm has it.

    Attributes:
        job: its number, as control groups name it: of a task of an array its own, not the array's.
        state: such as "COMPLETED", "RUNNING", "TIMEOUT".
        elapsed_s: seconds for which it has run; None where Slurm gives none.
        nodes: how many it got; `node_list`: which, as Slurm writes them ("gpu-[1-2]").
        gpus: how many GPUs it got, on all nodes together; `gpu_types`: by Slurm's names of them.
        cpus: on all nodes together; `host_memory`: in Slurm's own words ("32G"), empty where it gives none.
    """

    job: str
    name: str
    state: str
    elapsed_s: int | None
    nodes: int
    node_list: str
    gpus: int
    gpu_types: tuple[str, ...]
    cpus: int
    host_memory: str

    @property
    def asked(self) -> str:
        """Return in words for what it asked."""
        parts = [counted(self.gpus, "GPU") + (f" ({', '.join(self.gpu_types)})" if self.gpu_types else "")]
        parts += [counted(self.cpus, "CPU")] if self.cpus else []
        parts += [f"{self.host_memory} of host memory"] if self.host_memory else []
        return ", ".join(parts)


def check_number(job: str) -> None:
    """Refuse a text that is no number of a job.

    Raises:
        OptionError: it is none.
    """
    if not _NUMBER.fullmatch(job):
        raise OptionError(f"{shortened(job)!r} is no Slurm job; give its number, as `squeue` lists it")


def slurm_job(job: str) -> SlurmJob | Unknown:
    """Return a job by ``sacct``, or where that has no accounting by ``scontrol``; else the reason, in one line.

    Raises:
        OptionError: it is no number of a job, or that of several: an array, or the parts of a heterogeneous job.
    """
    check_number(job)
    accounted = [
        "sacct",
        "--allocations",
        "--parsable2",
        "--noheader",
        f"--jobs={job}",
        f"--format={','.join(_FIELDS)}",
    ]
    try:
        lines = _asked(accounted).splitlines()
    except OptionError as error:
        try:
            return _by_scontrol(job)
        except OptionError:
            return Unknown(str(error).removeprefix("--slurm: "))
    rows = [row for line in lines if len(row := line.split("|", len(_FIELDS) - 1)) == len(_FIELDS)]
    if not rows:
        said = f"; it printed {shortened(lines[0])!r}" if lines else ""
        return Unknown(f"`sacct` has no job {job}{said}")
    if len(rows) > 1:
        names = [row[0] for row in rows if _NUMBER.fullmatch(row[0])]  # tasks that wait are listed as 7_[3-9]
        such = f", such as {names[0]}" if names else ""
        raise OptionError(f"job {job} has {len(rows)} parts (tasks of an array, or components); name one{such}")
    _, raw, state, elapsed, node_list, tres, name = rows[0]
    return _job(raw, name, state, elapsed, node_list, tres)


def _by_scontrol(job: str) -> SlurmJob:
    line = _asked(["scontrol", "--oneliner", "show", "job", job]).splitlines()[0]
    found = dict(_PAIR.findall(line))
    tres = next((found[key] for key in ("AllocTRES", "TRES", "ReqTRES") if found.get(key, "(null)") != "(null)"), "")
    elapsed = str(_seconds(found.get("RunTime", "")))
    return _job(
        found.get("JobId", job),
        found.get("JobName", ""),
        found.get("JobState", ""),
        elapsed,
        found.get("NodeList", ""),
        tres,
    )


def _seconds(written: str) -> int | None:
    """Return ``[days-]hours:minutes:seconds`` as seconds."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", written)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _job(raw: str, name: str, state: str, elapsed: str, node_list: str, tres: str) -> SlurmJob:
    """Make it of what Slurm prints.

    Args:
        tres: trackable resources, such as ``billing=19,cpu=1,gres/gpu:a100=1,gres/gpu=1,mem=32G,node=1``: of GPUs
            their sum, or each kind, or both.
    """
    counts = dict(part.partition("=")[::2] for part in tres.split(",") if "=" in part)
    kinds = {
        key.removeprefix("gres/gpu:"): _whole(value) for key, value in counts.items() if key.startswith("gres/gpu:")
    }
    return SlurmJob(
        job=raw,
        name=printable(name),
        state=printable(state),
        elapsed_s=int(elapsed) if elapsed.isdecimal() else None,
        nodes=_whole(counts.get("node", "")),
        node_list=printable(node_list),
        gpus=_whole(counts.get("gres/gpu", "")) or sum(kinds.values()),
        gpu_types=tuple(printable(kind) for kind in kinds),
        cpus=_whole(counts.get("cpu", "")),
        host_memory=printable(counts.get("mem", "")),
    )


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def slurm_nodes(job: str) -> list[str]:
    """Return a Slurm job's nodes, by ``squeue --format=%N`` and ``scontrol show hostnames`` (Slurm's manual pages).

    Raises:
        OptionError: Slurm's commands are not here, or do not know the job, or it has no node yet.
    """
    check_number(job)
    listed = _asked(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]).split()
    if not listed:
        raise OptionError(f"Slurm job {job} has no node: it waits, or it has ended; see `squeue --job {job}`")
    return [node for each in listed for node in _asked(["scontrol", "show", "hostnames", each]).split()]


def _asked(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_S, check=False, errors="replace")
    except FileNotFoundError as error:
        raise OptionError(f"--slurm: there is no `{command[0]}` in PATH; run it where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise OptionError(f"--slurm: `{' '.join(command)}` has not answered for {_SLURM_S:.0f} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OptionError(f"--slurm: `{' '.join(command)}`: {shortened(said[-1], 120)}")
    return done.stdout
