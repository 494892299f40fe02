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

from gpumem_tui.attach import bootstrap, ptrace
from gpumem_tui.attach.target import Refused, Target, refusal
from gpumem_tui.memory import Unknown
from gpumem_tui.probe.documents import decode_document
from gpumem_tui.probe.files import WireError, read_private
from gpumem_tui.text import cleaned, shortened

RemoteExec = Callable[[int, str], None]
REMOTE_EXEC: RemoteExec | None = getattr(sys, "remote_exec", None)
"""`sys.remote_exec` of Python 3.14 and later (PEP 768)."""

_PACKAGE = Path(__file__).resolve().parent.parent
_PROBE = ("__init__.py", "importing.py", "memory.py", "step.py", "sites.py", "probe/**/*.py")
"""All that the probe imports of this package."""
_ANSWER_LIMIT_BYTES = 64 * 1024
_LONGEST_WORD = 200
_ATTEMPTS = 3
_POLL_S = 0.02


class AttachFailed(Exception):
    """It was tried and did not come about; one line. The process runs on as before."""


@dataclass(frozen=True)
class Attached:
    """The probe is in.

    Attributes:
        seconds: from the first touch until the probe said that it runs.
        pause_s: how long the main thread was stopped; the other threads never were.
        has_torch: whether the process has imported torch; else the probe waits for that.
    """

    seconds: float
    pause_s: float | Unknown
    has_torch: bool


def attach(target: Target, timeout_s: float, remote_exec: RemoteExec | None = REMOTE_EXEC) -> Attached:
    """Put the probe into a process and wait until it says that it runs.

    Args:
        timeout_s: how long to wait for the main thread to come back to Python.
        remote_exec: what `sys.remote_exec` does, where this interpreter has it.

    Raises:
        Refused: the kernel or the interpreter does not allow it.
        AttachFailed: the probe could not start, or has not answered yet.
    """
    answer = _answer_path(target)
    with _removed(answer):
        begin = time.monotonic()
        if remote_exec is not None and can_remote_exec(target):
            script = _remote_script(target)
            try:
                _remote_exec(target, remote_exec, str(script))
            except Refused:
                script.unlink()
                raise
            has_torch = _wait_for_answer(target, answer, timeout_s)  # the script removes itself, whenever it runs
            pause_s: float | Unknown = Unknown("not measured: the interpreter chose the moment")
        else:
            pause_s = _inject(target, _payload(target))
            has_torch = _wait_for_answer(target, answer, timeout_s)
        return Attached(time.monotonic() - begin, pause_s, has_torch)


def explanation(target: Target) -> str:
    """What attaching does, to be told before it is asked whether it should; a sentence a line."""
    return (
        "Its main thread is stopped for some milliseconds, and told to start the probe when it is next in Python.\n"
        f"The probe then publishes its memory at most twice a second, in {target.host.inner_directory}.\n"
        "It stays until the process ends; no file and no setting of the program is changed."
    )


def can_remote_exec(target: Target) -> bool:
    """Whether both interpreters are of one minor version that has PEP 768, and see the same files as the same user."""
    ours = sys.version_info[:2]
    same_place = target.host.shares_files and target.host.uid == os.geteuid()
    return ours >= (3, 14) and target.python == ours and same_place


def _payload(target: Target) -> str:
    """The Python text that starts the probe."""
    inner = target.host.inner_directory
    answer = inner / _answer_path(target).name
    if target.host.shares_files and target.host.uid == os.geteuid():
        path, archive = str(_PACKAGE.parent), ""
    else:  # another user or another file system: our files may not be readable there
        path, archive = str(inner / f"probe-{os.urandom(4).hex()}.zip"), _archive()
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
    """The probe and what it needs of this package, as a zip file in base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in (found for pattern in _PROBE for found in sorted(_PACKAGE.glob(pattern))):
            archive.write(source, source.relative_to(_PACKAGE.parent))
    return base64.b64encode(buffer.getvalue()).decode()


def _inject(target: Target, payload: str) -> float:
    """Queue a Python text in the interpreter; returns for how many seconds its main thread stood still."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_POLL_S)  # it was in the few instructions that cannot be entered twice
        reply = _helper(request(target, payload))
        if reply["errno"] in (errno.EPERM, errno.EACCES):
            raise refusal(target.host)
        if reply["errno"] == errno.ESRCH:
            raise Refused(f"{target.host.title} has ended")
        if not reply["error"] and reply["result"] == 0:
            return reply["pause_s"]
    raise AttachFailed(f"{target.host.title}: {reply['error'] or 'its interpreter takes no more pending calls'}")


def request(target: Target, payload: str) -> ptrace.Request:
    """What the helper program is told, to queue a Python text in the interpreter."""
    return ptrace.Request(
        pid=target.host.pid,
        map_memory=target.map_memory,
        signal_return=target.signal_return,
        ready=target.is_ready,
        function=target.add_pending,
        callback=target.run_string,
        argument=payload,
    )


def _helper(request: ptrace.Request) -> ptrace.Answer:
    """Run the helper program. It is one of its own so that a process is let go whatever becomes of us."""
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
        said = helper.stdout.read()
    finally:
        code = helper.wait()
        helper.stdout.close()
    try:
        reply: ptrace.Answer = json.loads(said)
    except ValueError:
        last = said.decode(errors="replace").strip().splitlines()
        how = shortened(last[-1], _LONGEST_WORD) if last else "without a word"
        raise AttachFailed(f"the program that attaches ended (code {code}): {how}") from None
    return reply


def _remote_script(target: Target) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="gpumem-tui-", suffix=".py")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"try: __import__('os').unlink({name!a})\nexcept OSError: pass\n{_payload(target)}")
    return Path(name)


def _remote_exec(target: Target, remote_exec: RemoteExec, script: str) -> None:
    try:
        remote_exec(target.host.pid, script)
    except PermissionError:
        raise refusal(target.host) from None
    except (OSError, RuntimeError) as error:
        raise Refused(f"the Python of {target.host.title} does not take it: {error}") from error


def _answer_path(target: Target) -> Path:
    files = target.host.files
    return files.directory / f"{files.pid}-{files.start_ticks}.attach.json"


@contextmanager
def _removed(path: Path) -> Iterator[None]:
    """Without that file, before and after."""
    path.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _wait_for_answer(target: Target, path: Path, timeout_s: float) -> bool:
    """Wait until the probe says that it runs; returns whether the process has imported torch."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, WireError):  # not yet there, or half written
            answer = cleaned(decode_document(read_private(path, _ANSWER_LIMIT_BYTES, {target.host.uid})))
            if answer.get("problem"):
                raise AttachFailed(f"{target.host.title}: the probe could not start: {answer['problem']}")
            return bool(answer.get("has_torch"))
        if not (target.host.proc / "stat").exists():
            raise AttachFailed(f"{target.host.title} has ended")
        time.sleep(_POLL_S)
    raise AttachFailed(
        f"{target.host.title} has not answered within {timeout_s:g} s: its main thread waits in C code, and the probe "
        f"starts as soon as it is back; or it may not write into {target.host.inner_directory}"
    )
