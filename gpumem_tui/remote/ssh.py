"""How hosts are reached: the user's own ssh, what is called at its other end, and why it ended.

The login shell of the user there, of any kind, takes the call: a script is handed to ``sh`` between
single quotes, in which POSIX shells, csh and fish all leave it as it is, so it has neither quotes of this kind, nor
backslashes, nor exclamation marks, nor more than one line.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Literal

from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.text import shortened, without_escapes

PROGRAM = "gpumem-tui"
OFFERS = "gpumem-tui is offered by: "
"""Before the name of what could run it, on stderr of a host that lacks it."""

_FIND_AND_RUN = (
    f'p=$(command -v {PROGRAM}) && exec "$p" "$@"; '
    f'p=$HOME/.local/bin/{PROGRAM}; [ -x "$p" ] && exec "$p" "$@"; '
    f'p=$("$SHELL" -lc "command -v {PROGRAM}" </dev/null 2>/dev/null | tail -n 1); [ -x "$p" ] && exec "$p" "$@"; '
    "for t in uvx pipx; do "
    f'command -v $t >/dev/null && {{ echo "{OFFERS}$t" >&2; exit 127; }}; '
    f'[ -x "$HOME/.local/bin/$t" ] && {{ echo "{OFFERS}~/.local/bin/$t" >&2; exit 127; }}; '
    "done; exit 127"
)
"""Runs the program from where users install it. A login shell is asked last: it may take long, or print."""


class LinkLost(Exception):
    """There is no connection, or none any more; one line gives the reason."""


@dataclass(frozen=True)
class SshOptions:
    """The options of ssh with which hosts are reached.

    Attributes:
        remote_command: what is called there, as its shell takes it; empty to look for the program.
        interval_s: between two readings.
        ssh: the program that connects.
    """

    remote_command: str = ""
    interval_s: float = 1.0
    ssh: str = "ssh"

    @property
    def called(self) -> str:
        """Return what is called, for people."""
        return self.remote_command or PROGRAM

    def command(self, host: RemoteHost) -> list[str]:
        """Return the words of the process whose lines are the host's readings (`monitor.wire`)."""
        return self.words(host, self.program(f"monitor --wire --interval {self.interval_s:g}"))

    def program(self, arguments: str) -> str:
        """Return the program there with these arguments, for the shell there."""
        return f"{self.remote_command or f'{in_sh(_FIND_AND_RUN)} {PROGRAM}'} {arguments}"

    def words(self, host: RemoteHost, there: str) -> list[str]:
        """Return the words that run something there; `BatchMode`, so that no question waits for an answer."""
        port = [] if host.port is None else ["-p", str(host.port)]
        return [*shlex.split(self.ssh), "-T", "-o", "BatchMode=yes", *port, "--", host.destination, there]


def in_sh(script: str) -> str:
    """Return a script as the first words of a command for any login shell; the words after it are its $0, $1, …."""
    assert not set(script) & set("'\\!\n"), script
    return f"sh -c '{script}'"


# ---- why it ended (OpenSSH's ssh(1), ssh.c, sshconnect*.c)

_SSH_FAILED, _NOT_FOUND, _NOT_EXECUTABLE = 255, 127, 126
_NOISE = ("Warning: Permanently added", "hint: ", "Connection to ", "Killed by signal", "debug1:")
_BY_HOST = "closed by remote host"


def explained(
    code: int | None, errors: Sequence[str], host: RemoteHost, options: SshOptions, printed: str = ""
) -> tuple[str, bool]:
    """Say why a connection ended, with the remedy where there is one, and whether a person has to see to it.

    Args:
        code: exit code of the ssh process; negative for a signal; None where it had not ended.
        errors: the last lines that it wrote.
        printed: what came on stdout instead of readings.
    """
    written = "\n".join(errors)
    by_hand = host.by_hand
    if code == _SSH_FAILED:
        if "IDENTIFICATION HAS CHANGED" in written:
            return f"its host key has changed: {by_hand} shows it; remove the old one if that is right", True
        if "Host key verification failed" in written:
            return f"its host key is not known: {by_hand} once shows it and asks", True
        if "Permission denied (" in written:
            return f"no key is accepted, and a password cannot be asked for: see that {by_hand} asks for none", True
    last = next((line for line in reversed(errors) if not line.startswith(_NOISE) or _BY_HOST in line), "")
    command = shortened(options.called, 30)
    if code != _SSH_FAILED and (problem := _of_python(written, command)):
        return problem, True
    if code == _NOT_FOUND:
        return _not_found(command, last, options), True
    if code == _NOT_EXECUTABLE:
        return f"{command} cannot be executed there: {last}", True
    if code == _SSH_FAILED:
        return shortened(last.removeprefix("ssh: "), 160) or "ssh failed and printed no reason", False
    if code is None or code < 0:
        return "ssh was ended" if code else "the connection was closed", False
    said = last.removeprefix("gpumem-tui: ")
    if any(words in written for words in ("No such option", "No such command", "invalid choice")):
        return f"its gpumem-tui is of another version: install the same one there ({shortened(said, 120)})", True
    if said:
        return shortened(said, 160), False
    if printed:
        return f"its login shell prints “{shortened(printed, 90)}” and ends: name a user with a shell, USER@HOST", True
    return f"{command} ended with code {code} and no reason: see what {by_hand} prints", False


def _shown(line: str) -> str:
    """Return a line of stderr as it is shown: a host may send anything."""
    return shortened(without_escapes(line), 300)


_LOST_INTERPRETER = re.compile(
    r"(?P<script>[/~]\S*?):? (?:(?P<python>/\S+): )?(?:bad interpreter|cannot execute: required file not found)"
    r"|exec: (?:line \d+: )?(?P<found>/\S+): not found"
    r"|(?P<sought>/\S+?)[\"'”]? specified the interpreter [\"'“]?(?P<named>/\S+?)[\"'”]?, which"
)
"""As bash and zsh say it, bash from 5.2 on; dash and busybox, of a file that was found; fish."""
_TOO_OLD = re.compile(r"needs Python \d\S+ or later.*|[Rr]equires[ -](?:a different )?Python\b.*|Python ?>=3\.\d+.*")
_NO_PROGRAM = re.compile(r"(?P<python>\S+): No module named '?gpumem_tui\b")
_NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '(?P<package>[\w.]+)'")
_OLD_SYNTAX = re.compile(r"^(SyntaxError: .*|TypeError: unsupported operand type\(s\) for \|.*|ImportError: .*)", re.M)
_NAME_ANOTHER = "name one with it by --remote-command"


def _of_python(written: str, command: str) -> str:
    """Say what keeps the Python there from running the program; empty if it is not that."""
    if found := _LOST_INTERPRETER.search(written):
        script = found["script"] or found["found"] or found["sought"]
        python = found["python"] or found["named"]
        lost = f"{script} there needs {python or 'its Python'}, which is gone"
        return f"{lost}: install {PROGRAM} anew there, or {_NAME_ANOTHER}"
    if found := _TOO_OLD.search(written):
        return f"{shortened(found[0], 100)}: install it with a newer one there, or {_NAME_ANOTHER}"
    if found := _NO_PROGRAM.search(written):
        return f"{found['python']} has no {PROGRAM}: install it in that Python, or {_NAME_ANOTHER}"
    if found := _NO_PACKAGE.search(written):
        return f"its {command} lacks the package {found['package']}: install {PROGRAM} anew there"
    if ("Traceback" in written or "SyntaxError" in written) and (found := _OLD_SYNTAX.search(written)):
        said = shortened(found[0], 80)
        return f"its Python is perhaps too old ({said}): {PROGRAM} needs 3.10 or later; {_NAME_ANOTHER}"
    return ""


def _not_found(command: str, last: str, options: SshOptions) -> str:
    if options.remote_command:
        where = "is not there, or the Python of its first line is not" if "/" in command else "is not in its PATH"
        return f"{command} {where}: install it there, or say where with --remote-command"
    if last.startswith(OFFERS):
        runner = shortened(last.removeprefix(OFFERS), 30)
        run = f"{runner} run --spec" if runner.endswith("pipx") else f"{runner} --from"
        source = installed_from()
        where = f", {ANYWHERE} being its wheel there" if source == ANYWHERE else " has it fetched"
        return f"has no {PROGRAM}, but {runner}: --remote-command '{run} {source} {PROGRAM}'{where}"
    return f"{command} is not in its PATH nor in ~/.local/bin: install it there, or say where with --remote-command"


ANYWHERE = "WHEEL"
"""In the place of a source that only this machine has: a folder, a file, a copy that was never installed."""


@cache
def installed_from(package: str = PROGRAM) -> str:
    """Return a requirement that installs this version on another machine, as `uvx --from` takes it; else `ANYWHERE`.

    The source of its installation is in direct_url.json, which is absent where that was an index (PEP 610, "Recording
    the Direct URL Origin of installed distributions"). Only then its name on an index is surely its own.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ANYWHERE
    origin = found.read_text("direct_url.json")
    return f"{package}=={found.version}" if origin is None else _of_url(origin)


def _of_url(text: str) -> str:
    """Return the requirement that a direct_url.json means.

    >>> _of_url('{"url": "https://h/p.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}')
    'git+https://h/p.git@ab12'
    >>> _of_url('{"url": "https://h/p.whl", "archive_info": {}}'), _of_url('{"url": "file:///here", "dir_info": {}}')
    ('https://h/p.whl', 'WHEEL')
    """
    origin = json.loads(text)
    url, repository = str(origin["url"]), origin.get("vcs_info")
    if url.startswith("file:"):
        return ANYWHERE
    return url if repository is None else f"{repository['vcs']}+{url}@{repository['commit_id']}"


# ---- as a process

_KEPT_LINES = 20
_LONGEST_ERROR = 4096
_CHUNK = 1 << 20
_REST_S = 1.0
"""For what stderr still holds once stdout has ended, and for the process to end after that."""
_POLL_S = 0.5


@cache
def _silence() -> tuple[int, int]:
    """Return the ends of a pipe in which nothing comes, for all connections."""
    return os.pipe()


class SshProcess:
    """The user's own ssh as a process whose lines are read, with bounded memory.

    Args:
        words: of the command line; its stdin is one in which nothing comes, and which ends with this process, however
            that does: by it what runs on the host notices.
        longest_line: bytes.
        most_errors: bytes that may come on stderr until `error_bytes` is set to 0 again.

    Attributes:
        errors: the last lines of its stderr; `error_bytes`: how much came there since this was set to 0.
        heard_s: when something last came on stdout (`time.monotonic`).

    Raises:
        LinkLost: it cannot be started.
    """

    def __init__(self, words: Sequence[str], longest_line: int, most_errors: int) -> None:
        try:
            self._process = subprocess.Popen(
                words, stdin=_silence()[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LinkLost(f"{words[0]} cannot be started: {error.strerror}") from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self.error_bytes = 0
        self.heard_s = time.monotonic()
        self._longest_line, self._most_errors = longest_line, most_errors
        self._out_fd, self._error_fd = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out_fd, selectors.EVENT_READ)
        self._selector.register(self._error_fd, selectors.EVENT_READ)
        self._buffer, self._searched = bytearray(), 0
        self._error_rest = b""

    @property
    def has_ended(self) -> bool:
        """Return whether the process surely has ended."""
        return self._process.poll() is not None

    def read(self, timeout_s: float) -> list[bytes] | None:
        """Return the lines that came within a time, perhaps none; None once stdout has ended.

        Raises:
            LinkLost: a line is longer than any can be, or stderr is flooded.
        """
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        if self._error_fd in ready:
            self._read_error()
        if self._out_fd not in ready:
            return []
        data = os.read(self._out_fd, _CHUNK)
        if not data:
            self._read_last_errors()
            return None
        self.heard_s = time.monotonic()
        self._buffer += data
        return self._lines()

    def _lines(self) -> list[bytes]:
        end = self._buffer.rfind(b"\n", self._searched)
        lines = bytes(self._buffer[:end]).split(b"\n") if end >= 0 else []
        del self._buffer[: end + 1]
        self._searched = len(self._buffer)
        if max(len(self._buffer), *map(len, lines), 0) > self._longest_line:
            raise LinkLost(f"prints a line of more than {self._longest_line >> 20} MiB, which is no reading")
        return lines

    def _read_error(self) -> bool:
        """Keep the last lines of stderr; False at its end."""
        data = os.read(self._error_fd, _CHUNK)
        self.error_bytes += len(data)
        if self.error_bytes > self._most_errors:
            raise LinkLost(f"writes more than {self._most_errors / (1 << 20):.0f} MiB to stderr between two readings")
        *lines, rest = (self._error_rest + data).split(b"\n")
        self._error_rest = rest[-_LONGEST_ERROR:]
        lines += [] if data else [self._error_rest]
        kept = [line for line in lines if line.strip()][-_KEPT_LINES:]
        self.errors.extend(_shown(line[:_LONGEST_ERROR].decode("utf-8", "replace")) for line in kept)
        if not data:
            self._selector.unregister(self._error_fd)
        return bool(data)

    def _read_last_errors(self) -> None:
        """Read what stderr still holds. It need not end: with ControlPersist ssh's master keeps it."""
        self._selector.unregister(self._out_fd)
        until_s = time.monotonic() + _REST_S
        while self._error_fd in self._selector.get_map() and time.monotonic() < until_s:
            if self._selector.select(_POLL_S):
                self._read_error()
            elif self.has_ended:
                return

    def explained(self, host: RemoteHost, options: SshOptions, printed: str) -> tuple[str, bool]:
        """Say why it has closed its output, and whether a person has to see to it; `printed` as `explained` has it."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_REST_S)
        rest = without_escapes(self._buffer[:_LONGEST_ERROR].decode("utf-8", "replace"))
        return explained(code, self.errors, host, options, printed or rest)

    def terminate(self) -> None:
        """Ask it to end; what runs on the host ends by what it reads, or when it writes next."""
        if not self.has_ended:
            self._process.terminate()

    def end(self) -> None:
        """End it and wait for its end."""
        self.terminate()
        try:
            self._process.wait(_REST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._selector.close()


# ---- once

RemoteSignal = Literal["TERM", "KILL"]

_PATIENCE_S = 30.0
_GONE, _ANOTHER, _REFUSED = 81, 82, 83
_SEND = (
    f"s=$(cat /proc/$1/stat 2>/dev/null) || exit {_GONE}; "
    "p=$1; began=$2; signal=$3; set -- ${s##*) }; "
    "hz=$(getconf CLK_TCK); boot=$(while read -r k v; do [ $k = btime ] && echo $v; done </proc/stat); "
    "d=$((boot + ${20} / hz - began)); "
    f"[ $d -ge -1 ] && [ $d -le 1 ] || exit {_ANOTHER}; "
    f"kill -s $signal $p || exit {_REFUSED}"
)
"""Field 22 of /proc/PID/stat, the 20th after the name, is the start in clock ticks since the boot, whose time is btime
in /proc/stat (proc(5)); a second is allowed for, as `monitor.processes` does."""


class NotSignalled(Exception):
    """The process was not signalled; one line gives the reason."""


@dataclass(frozen=True)
class Done:
    """The outcome of a command on a host: its exit code, its lines, and those of its stderr."""

    code: int
    lines: tuple[str, ...]
    errors: tuple[str, ...]


def run_there(words: Sequence[str], timeout_s: float) -> Done:
    """Run ssh to its end, with no stdin. Takes as long as ssh does: not for the event loop.

    Raises:
        LinkLost: it cannot be started.
        TimeoutError: it has not ended in time.
    """
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise LinkLost(f"{words[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    lines, errors = (text.decode("utf-8", "replace").splitlines() for text in (done.stdout, done.stderr))
    kept = map(_shown, errors)
    return Done(done.returncode, tuple(lines), tuple(line for line in kept if line))


def send_signal(host: RemoteHost, options: SshOptions, process: HostProcess, signal: RemoteSignal) -> None:
    """Signal the same process there that was shown, even if its pid is reused by then.

    Raises:
        NotSignalled: it has ended, its pid is another process's, it may not be signalled, ssh failed.
    """
    there = f"{in_sh(_SEND)} gpumem-tui {process.pid} {int(process.start_time_s)} {signal}"
    try:
        done = run_there(options.words(host, there), _PATIENCE_S)
    except LinkLost as error:
        raise NotSignalled(str(error)) from error
    except TimeoutError as error:
        raise NotSignalled(f"{host.name} has not answered for {_PATIENCE_S:.0f} s; see whether it was ended") from error
    if done.code:
        raise NotSignalled(_why_not(done, host, options, process))


def _why_not(done: Done, host: RemoteHost, options: SshOptions, process: HostProcess) -> str:
    which = f"pid {process.pid} on {host.name}"
    if done.code == _GONE:
        return f"{which} is not there any more"
    if done.code == _ANOTHER:
        return f"{which} is another process by now: not signalled"
    if done.code == _REFUSED:
        reason = shortened(done.errors[-1] if done.errors else "kill failed", 120)
        return f"{which} of {process.user} was not signalled: {reason}"
    problem, _ = explained(done.code, done.errors, host, options, done.lines[-1] if done.lines else "")
    return f"{which} was not signalled: {problem}"
