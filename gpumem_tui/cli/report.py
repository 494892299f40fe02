"""`report`: a job's use of its GPUs, from recordings, next to what it asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Unknown
from gpumem_tui.report.output import Printer, complain

if TYPE_CHECKING:
    from gpumem_tui.monitor.sampler import Sampler
    from gpumem_tui.monitor.snapshot import GpuProcess
    from gpumem_tui.recording.jobs import JobUse
    from gpumem_tui.remote.slurm import SlurmJob

_EVERY_S = 1.0
"""Between two readings under `run`."""
_RECORD = "gpumem-tui monitor --record gpus-$SLURM_JOB_ID-$SLURMD_NODENAME --quiet &"
"""In the job's script, so that the report finds the file."""


@click.command
@click.option("--slurm", "job", metavar="JOB", help="Number of a Slurm job, running or ended.")
@click.argument("files", nargs=-1, metavar="[FILE...]", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One object.")
def report(job: str | None, files: tuple[Path, ...], as_json: bool) -> int:
    """Peak and mean memory and use of a Slurm job's GPUs, what it asked for, and whether less would have done.

    It reads recordings of the nodes: those named, else the files gpus-JOB-* here. To make one, put this into the job's
    script:

    \b
    gpumem-tui monitor --record gpus-$SLURM_JOB_ID-$SLURMD_NODENAME --quiet &
    """
    if job is None:
        raise OptionError("name the job: `gpumem-tui report --slurm JOB`; `sacct` lists yours")
    from gpumem_tui.recording.jobs import JobUse, job_lines, job_object, slurm_number
    from gpumem_tui.remote.slurm import slurm_job

    asked = slurm_job(job)
    number = job if isinstance(asked, Unknown) else asked.job
    found = files or tuple(sorted(Path().glob(f"gpus-{number}-*")))
    if not found:
        raise OptionError(_no_recording(job, asked))
    use = JobUse(lambda process: slurm_number(process) == number)
    for path in found:
        _read(path, use)
    if not use.gpus:
        raise OptionError(_not_in(job, found, asked, use))
    result = job_object(number, asked, use)
    Printer(as_json=as_json).show(body=lambda: result, lines=lambda: job_lines(result))
    return 0


class JobWatch:
    """Adds up, while a command runs in a Slurm job, what it uses of this node's GPUs; outside any it does nothing.

    The first of the job's tasks on a node does it for all of them.
    """

    def __init__(self) -> None:
        is_first = os.environ.get("SLURM_LOCALID", "0") == "0"
        self._job = os.environ.get("SLURM_JOB_ID", "") if is_first else ""
        self._source: Sampler | None = None
        self._pid = 0

    def follow(self, pid: int) -> None:
        """Begin, with the command's process: signals are blocked by now, so that no thread takes one."""
        if self._job:
            with suppress(Exception):  # the command trains even if its figures fail
                self._begin(pid)

    def _begin(self, pid: int) -> None:
        from gpumem_tui.monitor.sampler import Sampler
        from gpumem_tui.recording.jobs import JobUse
        from gpumem_tui.watch.live import ask_probes

        self._pid, self._ask, self._use = pid, ask_probes(), JobUse(self._belongs)
        self._source = Sampler(_EVERY_S)
        self._source.start()

    def tick(self) -> None:
        """Take the newest reading in."""
        with suppress(Exception):
            if self._source is not None and (snapshot := self._source.latest()) is not None:
                self._use.add(snapshot.host.name, snapshot, self._ask(snapshot).said)

    def line(self) -> str:
        """Return the job's line, at its end; empty where it was on no GPU."""
        with suppress(Exception):
            return "" if self._source is None else self._line(self._source)
        return ""

    def _line(self, source: Sampler) -> str:
        from gpumem_tui.recording.jobs import job_line, job_object

        source.stop()
        if not self._use.gpus:
            return ""
        report = job_object(self._job, Unknown("not asked"), self._use)
        smaller = f"; {report.smaller_gpus[0]} would have done" if report.smaller_gpus else ""
        return f"{job_line(report)}{smaller}"

    def _belongs(self, process: GpuProcess) -> bool:
        from gpumem_tui.recording.jobs import slurm_number
        from gpumem_tui.watch.supervising import is_below

        return slurm_number(process) == self._job or is_below(process.pid, self._pid)


def _read(path: Path, use: JobUse) -> None:
    from gpumem_tui.recording.recording import GpuRecording

    recording = GpuRecording(path)
    for picture in recording.pictures():
        for status in picture.statuses:
            if status.report is not None:
                use.add(status.host.name, status.report.snapshot, status.report.said)
    if recording.damage:
        complain(recording.damage, 0)


def _no_recording(job: str, asked: SlurmJob | Unknown) -> str:
    if isinstance(asked, Unknown):
        return f"--slurm: {asked.reason}; there is no recording gpus-{job}-* here either{_listed(asked)}"
    return (
        f"job {job} was not recorded: no file gpus-{job}-* here; name it, or next time put `{_RECORD}` into its script"
    )


def _listed(asked: Unknown) -> str:
    """Say how to find one's jobs, unless the reason is that Slurm's commands are missing."""
    return "" if "in PATH" in asked.reason else "; `sacct` lists your jobs"


def _not_in(job: str, files: Iterable[Path], asked: SlurmJob | Unknown, use: JobUse) -> str:
    names = ", ".join(map(str, files))
    if isinstance(asked, Unknown):
        return f"--slurm: {asked.reason}; no process of job {job} is in {names} either{_listed(asked)}"
    others = (
        f"jobs there: {', '.join(sorted(use.others)[:5])}" if use.others else "no process of any Slurm job is there"
    )
    said = f"no process of job {job} on a GPU is in {names} ({others})"
    return f"{said}; `gpumem-tui monitor --replay FILE` plays a recording"
