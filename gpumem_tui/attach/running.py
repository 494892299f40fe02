"""Putting the probe into a process that is already running.

Its own code does the work: a short Python text is queued in its interpreter, which runs it at its next safe point, on
its main thread, as it would a signal handler. Nothing is written into its files, and its allocator is not asked.
"""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpumem_tui.attach import bootstrap, ptrace
from gpumem_tui.attach.target import (
    INSTEAD,
    LIST_LIVING,
    AttachRefused,
    NotAttached,
    Target,
    is_being_attached_to,
    named,
    refusal,
)
from gpumem_tui.decoding import decodable
from gpumem_tui.memory import Unknown
from gpumem_tui.probe.files import Folder, WireError
from gpumem_tui.text import printable, shortened
from gpumem_tui.watch import hosts

RemoteExec = Callable[[int, str], None]
REMOTE_EXEC: RemoteExec | None = getattr(sys, "remote_exec", None)
"""`sys.remote_exec` of Python 3.14 and later (PEP 768)."""

WATCH_IT = "`gpumem-tui watch` shows it then"
FIX_FOLDER = "see `gpumem-tui doctor`"
"""The remedy for a folder of probes that cannot be used."""
_PACKAGE = Path(__file__).resolve().parent.parent
PROBE_FILES = (
    "__init__.py",
    "importing.py",
    "host_memory.py",
    "launchers.py",
    "memory.py",
    "text.py",
    "step/__init__.py",
    "step/buckets.py",
    "step/cuda_history.py",
    "step/phases.py",
    "step/sites.py",
    "step/stages.py",
    "step/walking.py",
    "probe/**/*.py",
)
"""All that the probe imports of this package."""
_ANSWER_LIMIT_BYTES = 64 * 1024
_LONGEST_WORD = 200
_ATTEMPTS = 3
_OTHER_ATTACH_S, _POLL_S = 10.0, 0.02
_IDLE_NOTEBOOK_S = 2.0
_WAITS_FOR_INPUT = frozenset({0, 7, 23, 43, 45, 47, 232, 270, 271, 281, 288, 441})
"""read, poll, select, accept, recvfrom, recvmsg, epoll_wait, pselect6, ppoll, epoll_pwait, accept4, epoll_pwait2: their
numbers on x86-64 (arch/x86/entry/syscalls/syscall_64.tbl); so are the following."""
_WAITS_FOR_A_CHILD = frozenset({61, 247})
_WAITS_FOR_A_LOCK = frozenset({202})
_SLEEPS = frozenset({34, 35, 230})


class AttachFailed(NotAttached):
    """It was tried and did not come about. The process runs on as before."""


class StartsLater(AttachFailed):
    """The probe is queued and starts when something else happens; one line names what."""


class _Answer(msgspec.Struct):
    """The report of `bootstrap.attach` on how it went."""

    state: str = ""
    problem: str = ""
    has_torch: bool = False


@dataclass(frozen=True)
class Attached:
    """The probe is in.

    Attributes:
        seconds: from the first touch until the probe said that it runs.
        pause_s: how long the main thread was stopped; the other threads never were.
        has_torch: whether the process has imported torch; else the probe waits for that.
        was_there: it was in before.
    """

    seconds: float
    pause_s: float | Unknown
    has_torch: bool
    was_there: bool = False


def attach(target: Target, timeout_s: float, remote_exec: RemoteExec | None = REMOTE_EXEC) -> Attached:
    """Put the probe into a process and wait until it reports that it runs.

    Args:
        timeout_s: how long to wait for the main thread to come back to Python, and for torch where it is just being
            imported.
        remote_exec: what `sys.remote_exec` does, where this interpreter has it.

    Raises:
        AttachRefused: the kernel or the interpreter does not allow it.
        AttachFailed: the probe could not start, or has not answered yet.
    """
    _check_folder(target)
    name = _file_name(target, "attach", "json")  # of its own: two attaches at once do not take each other's answers
    with _removed(target, name):
        begin = time.monotonic()
        if remote_exec is not None and can_remote_exec(target):
            script = _remote_script(target, name)
            try:
                remote_exec(target.host.pid, str(script))
            except (OSError, RuntimeError) as error:
                script.unlink()
                if isinstance(error, PermissionError):
                    raise refusal(target.host) from None
                raise AttachRefused(f"the Python of {target.host.title} does not take it: {error}", INSTEAD) from error
            answer = _wait_for_answer(target, name, timeout_s, -1)  # the script removes itself, whenever it runs
            pause_s: float | Unknown = Unknown("not measured: the interpreter chose the moment")
        else:
            injected = _inject(target, _payload(target, name))
            pause_s = injected["pause_s"]
            answer = _wait_for_answer(target, name, timeout_s, injected["waits_in"])
        seconds = time.monotonic() - begin
        _leave_mark(target)
        return Attached(seconds, pause_s, answer.has_torch, answer.state == bootstrap.ALREADY)


def explanation(target: Target) -> str:
    """Explain what attaching does, for a user who is asked whether to attach; a sentence a line."""
    return (
        "Its main thread is stopped for some milliseconds, and told to start the probe when it is next in Python.\n"
        "If it waits for a lock, that wait is interrupted, as by a signal, and begun again by Python.\n"
        f"The probe then publishes its memory at most twice a second, in {target.host.inner_directory}.\n"
        "It stays until the process ends; no file and no setting of the program is changed."
    )


def can_remote_exec(target: Target) -> bool:
    """Return whether both interpreters are of one minor version with PEP 768, and see the same files as one user."""
    ours = sys.version_info[:2]
    same_place = target.host.shares_files and target.host.uid == os.geteuid()
    return ours >= (3, 14) and target.python == ours and same_place


def _payload(target: Target, name: str) -> str:
    """Return the Python text that starts the probe, and reports in a file of that name how it went."""
    inner = target.host.inner_directory
    answer = inner / name
    if target.host.shares_files and target.host.uid == os.geteuid():
        path, archive = str(_PACKAGE.parent), ""
    else:  # another user or another file system: our files may not be readable there
        path, archive = str(inner / _file_name(target, "probe", "zip")), _archive()
    source = Path(bootstrap.__file__).read_text()
    return _statement(f"{source}\nattach({path!a}, {archive!a}, {str(answer)!a})\n")


def _statement(source: str) -> str:
    """Python that runs `source` where an exception would come out in the middle of training, so that none does.

    It binds no name. An interrupt from the keyboard is meant for the program: it is raised again a moment later. (The
    source is compiled first: an interrupt that leaves an `exec` of text changes the interpreter's exit code for good.)
    """
    return (
        f"try: exec(compile({source!a}, '<gpumem-tui>', 'exec'), {{'__name__': 'gpumem_tui_bootstrap'}})\n"
        "except KeyboardInterrupt: __import__('_thread').start_new_thread("
        "lambda: __import__('time').sleep(0.05) or __import__('_thread').interrupt_main(), ())\n"
        "except BaseException: pass\n"
    )


def _archive() -> str:
    """Pack the probe, and what it needs of this package, as a zip file in base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in (found for pattern in PROBE_FILES for found in sorted(_PACKAGE.glob(pattern))):
            archive.write(source, source.relative_to(_PACKAGE.parent))
    return base64.b64encode(buffer.getvalue()).decode()


def _inject(target: Target, payload: str) -> ptrace.CallAnswer:
    """Queue a Python text in the interpreter."""
    attempt = 0
    deadline = time.monotonic() + _OTHER_ATTACH_S
    while attempt < _ATTEMPTS:
        reply = _helper(request(target, payload))
        if not reply["error"] and reply["result"] == 0:
            return reply
        if reply["errno"] == errno.ESRCH:
            raise AttachRefused(f"{target.host.title} has ended", LIST_LIVING)
        host = hosts.find(target.host.pid, target.host.proc.parent) or target.host
        attempt += not is_being_attached_to(host) or time.monotonic() > deadline
        time.sleep(_POLL_S)  # another attach was at it, or it was in the few instructions that cannot be entered twice
    if reply["errno"] in (errno.EPERM, errno.EACCES):
        raise refusal(target.host)
    raise AttachFailed(
        f"{target.host.title}: {reply['error'] or 'its interpreter takes no more pending calls'}", INSTEAD
    )


def request(target: Target, payload: str) -> ptrace.PtraceRequest:
    """Make the request to the helper program: queue a Python text in the interpreter."""
    return ptrace.PtraceRequest(
        pid=target.host.pid,
        map_memory=target.map_memory,
        signal_return=target.signal_return,
        ready=target.is_ready,
        function=target.add_pending,
        callback=target.run_string,
        argument=payload,
    )


def _helper(request: ptrace.PtraceRequest) -> ptrace.CallAnswer:
    """Run the helper program. It is one of its own so that a process is let go even if we die."""
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", ptrace.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt from the keyboard is for us alone
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it is dead; what it said is looked at below
            helper.stdin.write(json.dumps(request).encode())
            helper.stdin.close()
        output = helper.stdout.read()
    finally:
        code = helper.wait()
        helper.stdout.close()
    try:
        reply: ptrace.CallAnswer = json.loads(output)
    except ValueError:
        last = output.decode(errors="replace").strip().splitlines()
        how = shortened(last[-1], _LONGEST_WORD) if last else "without output"
        raise AttachFailed(f"the program that attaches ended (code {code}): {how}", INSTEAD) from None
    return reply


def _remote_script(target: Target, answer: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="gpumem-tui.", suffix=".py")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"try: __import__('os').unlink({name!a})\nexcept OSError: pass\n{_payload(target, answer)}")
    return Path(name)


def _check_folder(target: Target) -> None:
    """Refuse before anything is touched where the probe would refuse to publish."""
    try:
        _folder(target).close()
    except FileNotFoundError:
        return  # the probe will make it
    except WireError as error:
        raise AttachRefused(f"{target.host.title} could not publish: {error}", FIX_FOLDER) from None
    except OSError as error:
        raise AttachRefused(f"{target.host.files.directory} cannot be read: {error.strerror}", FIX_FOLDER) from None


def _folder(target: Target) -> Folder:
    return Folder(target.host.files.directory, (target.host.uid,))


def _file_name(target: Target, what: str, ending: str) -> str:
    files = target.host.files
    return f"{files.pid}-{files.start_ticks}.{what}-{os.urandom(4).hex()}.{ending}"


@contextmanager
def _removed(target: Target, name: str) -> Iterator[None]:
    """Remove that file in the end."""
    try:
        yield
    finally:
        with suppress(OSError, WireError), _folder(target) as folder:
            folder.remove(name)


def _wait_for_answer(target: Target, name: str, timeout_s: float, waits_in: int) -> _Answer:
    """Wait until the probe reports that it runs; returns its answer: see `bootstrap.attach`.

    Args:
        waits_in: the system call that the main thread waited in; -1 for none.
    """
    title = target.host.title
    begin = time.monotonic()
    answer: _Answer | None = None
    while time.monotonic() < begin + timeout_s:
        with suppress(FileNotFoundError, WireError, msgspec.MsgspecError), _folder(target) as folder:
            answer = msgspec.json.decode(folder.read(name, _ANSWER_LIMIT_BYTES), type=decodable(_Answer))
            if answer.problem:
                raise AttachFailed(f"{title}: the probe could not start: {printable(answer.problem)}", INSTEAD)
            if answer.state == bootstrap.LOADS_DATA:
                raise _loads_data(target.host)
            if answer.state != bootstrap.IMPORTING_TORCH:
                return answer
        if not (target.host.proc / "stat").exists():
            raise AttachFailed(f"{title} has ended", LIST_LIVING)
        is_idle = waits_in in _WAITS_FOR_INPUT and hosts.is_notebook(target.host)
        if is_idle and not answer and time.monotonic() > begin + _IDLE_NOTEBOOK_S:
            raise StartsLater(
                f"{title} is a notebook that runs no cell now: the probe starts at the next cell", "run a cell"
            )
        time.sleep(_POLL_S)
    if answer:
        _leave_mark(target)
        raise StartsLater(
            f"{title} still imports torch after {timeout_s:g} s: the probe starts when that is done", WATCH_IT
        )
    found = hosts.trainers(target.host.pid, target.host.proc.parent)
    instead = f"attach to its children that may train: {named(found)}" if found else INSTEAD
    raise AttachFailed(_no_answer(target.host, timeout_s, waits_in), instead, found)


def _leave_mark(target: Target) -> None:
    """Leave a file by which viewers know that the probe is in, before it publishes."""
    with suppress(OSError, WireError), _folder(target) as folder:
        folder.replace(target.host.files.attached.name, b"")


def _loads_data(host: hosts.Host) -> AttachFailed:
    """Make the error for a worker of a DataLoader, which names its parent instead."""
    parent = hosts.find(host.parent_pid, host.proc.parent)
    whose = f"attach to its parent, {parent.title}" if parent is not None else "attach to the process that trains"
    reason = f"{host.title} is a DataLoader worker, which loads batches and trains nothing"
    return AttachFailed(reason, whose, () if parent is None else (parent,))


def _no_answer(host: hosts.Host, timeout_s: float, waits_in: int) -> str:
    waits = "is in C code"
    for numbers, told in (
        (_WAITS_FOR_INPUT, "waits for input"),
        (_WAITS_FOR_A_CHILD, "waits for a child process"),
        (_WAITS_FOR_A_LOCK, "waits for a lock of C code"),
        (_SLEEPS, "sleeps"),
    ):
        waits = told if waits_in in numbers else waits
    return (
        f"{host.title} has not answered within {timeout_s:g} s: its main thread {waits}, and the probe starts when it "
        f"is next in Python; or it may not write into {host.inner_directory}"
    )
