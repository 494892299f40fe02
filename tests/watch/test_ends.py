"""How processes end, in words: by what `run` saw, by what the probe saw, by what the kernel did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui import host_memory
from gpumem_tui.probe.files import start_ticks, write_document
from gpumem_tui.probe.wire import Exit, encode_document
from gpumem_tui.watch.ends import Witness, kill_of, memory_kills, unseen
from gpumem_tui.watch.printed import EndedLine
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess, ProcessState
from tests.attach.loops import NOBODY
from tests.waiting import wait_until
from tests.watch.rings import GIB, GONE_PID, ON_CPU, RECORD, RingFile, gone, this_process

LOG = """\
6,1,100000,-;Linux version 6.8.0
3,900,50000000,-;memory: usage 2097152kB, limit 2097152kB, failcnt 61
3,902,50000100,-;Memory cgroup out of memory: Killed process 4000000 (python) total-vm:9437184kB, anon-rss:2000000kB, \
file-rss:90000kB, shmem-rss:152kB, UID:0 pgtables:8000kB oom_score_adj:0
6,903,60000000,-;oom_reaper: reaped process 4000000 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
3,950,90000000,-;Out of memory: Killed process 71 (node (x) y) total-vm:1kB, anon-rss:100kB, file-rss:20kB, \
shmem-rss:3kB, UID:0 pgtables:8000kB oom_score_adj:0
"""


def seen(**changes: Any) -> Exit:
    """A process that exited with code 0."""
    values: dict[str, Any] = {"wall_ns": time.time_ns(), "exit_code": 0, "signal": None, "killed_for_memory": False}
    return Exit(**{**values, "resident_bytes": None, "limit_bytes": None, "limit_owner": "", **changes})


def of(folder: Path, exit_: Exit | None = None, error: dict[str, Any] | None = None) -> ProbedProcess:
    """A process that trained 3 steps and ended so."""
    ring = RingFile(folder, gone())
    ring.sample(*(RECORD.__class__(**{**asdict(RECORD), "step": 3}),))
    if exit_ is not None:
        write_document(ring.files.exit, encode_document(asdict(exit_)))
    if error is not None:
        write_document(
            ring.files.error, encode_document({"step": 3, "wall_ns": 1, "message": "", "source": "", **error})
        )
        ring.end()
    [process] = Watcher([folder]).processes()
    return process


@pytest.mark.parametrize(
    ("exit_", "error", "state", "phrase"),
    [
        (seen(), None, ProcessState.ENDED, "finished (exit code 0)"),
        (seen(exit_code=3), None, ProcessState.FAILED, "failed with exit code 3"),
        (seen(exit_code=137), None, ProcessState.FAILED, "failed with exit code 137, as after SIGKILL"),
        (
            seen(exit_code=1),
            {"error": "ValueError", "message": "bad shape\nmore", "source": "train.py:7"},
            ProcessState.FAILED,
            "failed with exit code 1: ValueError: bad shape at train.py:7",
        ),
        (None, {"error": "KeyError"}, ProcessState.FAILED, "failed: KeyError"),
        (None, {"error": "KeyboardInterrupt"}, ProcessState.INTERRUPTED, "interrupted by Ctrl-C"),
        (None, {"error": "ValueError", "step": 1}, ProcessState.ENDED, "ended"),  # a hook lived on: more steps came
        (seen(exit_code=None, signal=2), None, ProcessState.INTERRUPTED, "interrupted by Ctrl-C (SIGINT)"),
        (seen(exit_code=None, signal=9), None, ProcessState.KILLED, "killed (SIGKILL)"),
        (seen(exit_code=None, signal=15), None, ProcessState.KILLED, "killed (SIGTERM)"),
        (seen(exit_code=None, signal=11), None, ProcessState.CRASHED, "crashed: segmentation fault (SIGSEGV)"),
        (seen(exit_code=None, signal=6), None, ProcessState.CRASHED, "crashed: aborted (SIGABRT)"),
        (seen(exit_code=None, signal=40), None, ProcessState.KILLED, "killed (signal 40)"),
        (seen(exit_code=None), None, ProcessState.VANISHED, "killed or crashed (not observed)"),
        (
            seen(
                exit_code=None, signal=9, killed_for_memory=True, resident_bytes=15 * GIB, limit_bytes=16 * GIB,
                limit_owner=host_memory.GROUP,
            ),
            None,
            ProcessState.KILLED_FOR_MEMORY,
            "killed by the kernel as host memory ran out: 15.00 GiB resident, limit 16.00 GiB (its control group)",
        ),
    ],
)  # fmt: skip
def test_every_end_has_its_words(
    exit_: Exit | None, error: dict[str, Any] | None, state: ProcessState, phrase: str, tmp_path: Path
) -> None:
    process = of(tmp_path / "probes", exit_, error)
    assert (process.state, process.state_words, process.step) == (state, phrase, 3)


def test_what_is_no_end_is_a_problem(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", gone())
    write_document(ring.files.exit, b"{}")
    [process] = Watcher([tmp_path / "probes"]).processes()
    assert process.state is ProcessState.VANISHED
    assert "exit.json was written by another version" in process.problem


def test_the_last_sample_with_a_model_stays(tmp_path: Path) -> None:
    """At the exit, `main` has returned and its model is gone; its number of steps is from then."""
    ring = RingFile(tmp_path / "probes", gone())
    fields = asdict(ON_CPU)
    nothing = {"parameters_bytes": 0, "gradients_bytes": 0, "optimizer_bytes": 0}
    ring.sample(ON_CPU.__class__(**{**fields, "step": 40}))
    ring.sample(ON_CPU.__class__(**{**fields, **nothing, "step": 41, "phase": ""}))
    ring.end()
    [process] = Watcher([tmp_path / "probes"]).processes()
    assert process.step == 41
    assert process.samples[0].record.parameters_bytes == 4 * GIB


# The kernel's log


def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text(LOG)
    return path


def test_the_kernels_log_tells_whom_it_killed(tmp_path: Path) -> None:
    first, second = memory_kills(log_file(tmp_path))
    assert (first.pid, first.by_group, first.limit_bytes, first.boot_s) == (4000000, True, 2 * GIB, 50.0001)
    assert first.resident_bytes == (2000000 + 90000 + 152) * 1024
    assert (second.pid, second.by_group, second.limit_bytes, second.resident_bytes) == (71, False, None, 123 * 1024)
    assert kill_of(71, 89.0, log_file(tmp_path)) == second
    assert kill_of(71, 91.0, log_file(tmp_path)) is None  # an earlier process of that pid
    assert memory_kills(tmp_path / "absent") == ()


def test_a_process_that_nobody_followed(tmp_path: Path) -> None:
    found = unseen(GONE_PID, 0, log_file(tmp_path))
    assert found is not None
    assert (found.killed_for_memory, found.limit_bytes, found.limit_owner) == (True, 2 * GIB, host_memory.GROUP)
    assert unseen(GONE_PID, 60 * os.sysconf("SC_CLK_TCK"), log_file(tmp_path)) is None


# A living process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as program:
        yield program
        program.kill()


def test_a_process_that_is_not_killed_for_memory(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    witness = Witness(sleeper.pid, start_ticks(sleeper.pid), tmp_path / "absent")
    assert not witness.has_ended()
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert witness.has_ended()
    ended = witness.ended()
    witness.close()
    assert (ended.signal, ended.exit_code, ended.killed_for_memory) == (signal.SIGKILL, None, False)
    assert ended.resident_bytes is not None
    assert ended.limit_bytes is not None
    assert ended.limit_bytes > ended.resident_bytes > 0


@pytest.mark.parametrize(
    ("files", "limit_bytes"),
    [
        (
            {"a/b/memory.events": "low 0\noom 3\noom_kill 2\n", "a/b/memory.max": "max\n", "a/memory.max": "4096\n"},
            4096,
        ),
        ({"a/b/memory.events": "oom_kill 2\n", "a/b/memory.max": "8192\n", "memory.max": "16384\n"}, 8192),
        ({"memory.events": "oom_kill 2\n", "memory.max": "max\n"}, None),  # as in a container: a name of outside
    ],
)
def test_control_groups_of_version_2(files: dict[str, str], limit_bytes: int | None, tmp_path: Path) -> None:
    for name, text in {"groups/" + name: text for name, text in files.items()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/a/b\n")
    group = host_memory.memory_group(7, tmp_path / "proc", tmp_path / "groups")
    assert group is not None
    assert (group.oom_kills(), group.limit_bytes()) == (2, limit_bytes)


_SCOPE = "system.slice/slurmstepd.scope/job_6"
_UNDER_UID = "slurm/uid_1000/job_6"


@pytest.mark.parametrize(
    ("line", "files"),
    [
        (
            f"0::/{_SCOPE}/step_0/user/task_0\n",
            {
                f"{_SCOPE}/memory.max": f"{GIB}\n",
                f"{_SCOPE}/step_0/memory.max": f"{4 * GIB}\n",
                f"{_SCOPE}/step_0/user/memory.max": "max\n",
                f"{_SCOPE}/step_0/user/task_0/memory.max": f"{2 * GIB}\n",
                f"{_SCOPE}/step_0/user/task_0/memory.events": "oom_kill 0\n",
            },
        ),
        (
            f"4:memory:/{_UNDER_UID}/step_0/task_0\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                f"memory/{_UNDER_UID}/memory.limit_in_bytes": f"{GIB}\n",
                f"memory/{_UNDER_UID}/step_0/memory.limit_in_bytes": f"{4 * GIB}\n",
                f"memory/{_UNDER_UID}/step_0/task_0/memory.limit_in_bytes": f"{2 * GIB}\n",
                f"memory/{_UNDER_UID}/step_0/task_0/memory.oom_control": "under_oom 0\noom_kill 0\n",
            },
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_jobs_limit_binds_the_step_that_may_have_more(line: str, files: dict[str, str], tmp_path: Path) -> None:
    """The tree that Slurm makes of a job (https://slurm.schedmd.com/cgroup_v2.html, and its plugin of version 1)."""
    for name, text in {"proc/7/cgroup": line, **{"groups/" + name: text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    group = host_memory.memory_group(7, tmp_path / "proc", tmp_path / "groups")
    assert group is not None
    assert (group.oom_kills(), group.limit_bytes()) == (0, GIB)


def memory_folder() -> Path | None:
    """A control group that we may make, with a memory limit; None where we may not."""
    own = host_memory.memory_group()
    if own is None or os.geteuid() != 0:
        return None
    folder = own.top / f"gpumem-tui-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.max" if own.is_unified else "memory.limit_in_bytes"
        (folder / name).write_text(str(64 << 20))
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        return None
    return folder


def test_a_process_that_the_kernel_kills_for_memory(tmp_path: Path) -> None:
    """Really: in a control group of 64 MiB. Seen by who watches, with the kernel's log and without."""
    group = memory_folder()
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    fill = "import sys\nsys.stdin.readline()\nheld = []\nwhile True: held.append(bytearray(4 << 20))"
    try:
        with subprocess.Popen([sys.executable, "-c", fill], stdin=subprocess.PIPE) as program:
            assert program.stdin is not None
            (group / "cgroup.procs").write_text(str(program.pid))
            ring = RingFile(tmp_path / "probes", this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
            ring.sample(ON_CPU)
            watcher = Watcher([tmp_path / "probes"])
            blind = Witness(program.pid, start_ticks(program.pid), tmp_path / "absent")
            assert watcher.processes()[0].is_running
            program.stdin.write(b"\n")
            program.stdin.flush()
            wait_until(blind.has_ended)
            assert blind.ended().killed_for_memory
            blind.close()
            [process] = watcher.processes()
            assert process.state is ProcessState.KILLED_FOR_MEMORY
            assert "killed by the kernel as host memory ran out: " in process.state_words
            assert process.state_words.endswith("limit 64.0 MiB (its control group)")
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_ends_of_others_have_their_owner_and_one_of_the_future_comes_last(tmp_path: Path) -> None:
    theirs = RingFile(tmp_path / "theirs", gone(pid=GONE_PID + 1, started_ns=time.time_ns() + 10**16))
    theirs.sample(replace(RECORD, wall_ns=time.time_ns() + 10**16))
    os.chown(theirs.files.directory, NOBODY, NOBODY)
    os.chown(theirs.path, NOBODY, NOBODY)
    RingFile(tmp_path / "ours", gone()).sample(replace(RECORD, wall_ns=time.time_ns()))
    first, last = Watcher([tmp_path / "theirs", tmp_path / "ours"]).processes()
    assert (first.uid, last.uid) == (0, NOBODY)
    assert last.title == f"PID {GONE_PID + 1} of user nobody (python train.py)"
    assert EndedLine.of(last).user == "nobody"
    assert first.title == f"PID {GONE_PID} (python train.py)"
