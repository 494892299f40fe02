"""A command on a host: its output, its terminal and its exit code come here, and it ends when we do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import msgspec

from gpumem_tui import __version__
from gpumem_tui.errors import OptionError
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.ssh import ALIVE_S, KEEP_ALIVE, LinkLost, SshOptions, explained, run_there
from gpumem_tui.text import shortened

COMMAND = "run-for-viewer"
"""The program's command on the host."""
_FIRST_ANSWER_S = 60.0
_WORDS = {signal.SIGINT: b"interrupt\n", signal.SIGTERM: b"terminate\n"}
_VERSION = "gpumem-tui, version "
LOST = 255
"""What ssh ends with where the connection is lost (ssh(1))."""


def check_host(host: RemoteHost, options: SshOptions) -> None:
    """Check that the host has this program in this version.

    Raises:
        LinkLost: it has not, or cannot be reached; one line.
    """
    try:
        done = run_there(options.words(host, options.program("--version"), *KEEP_ALIVE), _FIRST_ANSWER_S)
    except TimeoutError as error:
        raise LinkLost(f"no answer within {_FIRST_ANSWER_S:.0f} s") from error
    if done.code:
        problem, _ = explained(done.code, done.errors, host, options)
        raise LinkLost(problem)
    version = next((line.removeprefix(_VERSION) for line in done.lines if line.startswith(_VERSION)), "")
    if version != __version__:
        there = f"is {shortened(version, 20)}" if version else "says no version"
        raise LinkLost(f"its gpumem-tui {there}, the one here {__version__}: install the same on both")


def remote_words(
    host: RemoteHost, options: SshOptions, directory: str, command: Sequence[str], *, terminal: bool
) -> list[str]:
    """Return the words of the ssh that runs a command there under the probe.

    Args:
        terminal: the command has a terminal there, which ours is the screen and the keyboard of.
    """
    there = f"{COMMAND} {written_command(directory, command)}"
    ours = ("-tt", "-o", "LogLevel=ERROR") if terminal else ()
    return options.words(host, options.program(there), *ours, *KEEP_ALIVE)


def written_command(directory: str, command: Sequence[str]) -> str:
    """Write a command as one word of digits and letters.

    Quotes, backslashes, exclamation marks and line breaks mean something else to each of the shells that a login there
    may have.

    >>> read_command(written_command("", ["echo", "it's!"]))
    ('', ('echo', "it's!"))
    """
    return json.dumps([directory, *command]).encode().hex()


def read_command(written: str) -> tuple[str, tuple[str, ...]]:
    """Return directory and command of what `written_command` made.

    Raises:
        OptionError: something else made it.
    """
    try:
        directory, *command = msgspec.json.decode(bytes.fromhex(written), type=list[str])
    except ValueError as error:
        raise OptionError(f"{COMMAND}: it is for another gpumem-tui to call: {error}") from error
    return directory, tuple(command)


def become(words: Sequence[str]) -> None:
    """Replace this process by that ssh: its terminal, its signals and its exit code are ours.

    Raises:
        LinkLost: it cannot be started.
    """
    try:
        os.execvp(shutil.which(words[0]) or words[0], list(words))
    except OSError as error:
        raise LinkLost(f"{words[0]} cannot be started: {error.strerror}") from error


def follow(words: Sequence[str]) -> int:
    """Run that ssh without a terminal, tell the command of SIGINT and SIGTERM, and return its exit code.

    Raises:
        LinkLost: it cannot be started.
    """
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
    except OSError as error:
        raise LinkLost(f"{words[0]} cannot be started: {error.strerror}") from error

    def send(line: bytes) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(line)

    def hand_on(number: int, _frame: FrameType | None) -> None:
        send(_WORDS[signal.Signals(number)])

    before = {number: signal.signal(number, hand_on) for number in _WORDS}
    try:
        while True:
            try:
                return process.wait(ALIVE_S)
            except subprocess.TimeoutExpired:
                send(b"alive\n")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
