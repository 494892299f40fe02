"""How a command prints: results on stdout as lines or as JSON, progress and complaints on stderr.

Standard library alone, but for JSON: every command imports this as it starts.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from gpumem_tui.errors import EXIT_FAILED, EXIT_INTERRUPTED

T = TypeVar("T")
_HEADER_EVERY = 30
_TICK_S = 1.0


class Progress:
    """A line on stderr that the next one overwrites; nothing where stderr is no terminal, or with `quiet`.

    Attributes:
        is_shown: whether there is such a line.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.is_shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._last = ""
        self._under_way: list[Callable[[float], str]] = []

    def say(self, line: str) -> None:
        """Show what is under way; an empty line clears it."""
        if self.is_shown and line != self._last:
            over = "\r\x1b[K" if self._last else ""
            print(f"{over}{line}", end="", file=sys.stderr, flush=True)
            self._last = line

    def clear(self) -> None:
        """Show that nothing is under way any more."""
        self.say("")

    def during(self, line: str, expected_s: float = 0.0) -> AbstractContextManager[None]:
        """Show what is under way, with the seconds so far, and about how many are left of `expected_s` (0: unknown)."""
        return self.follow(lambda elapsed_s: f"{line} {so_far(elapsed_s, expected_s)}")

    @contextmanager
    def follow(self, line: Callable[[float], str]) -> Iterator[None]:
        """Show each second the line for the seconds so far; if several are nested, only the innermost is shown."""
        done, began_s = threading.Event(), time.monotonic()
        self._under_way.append(line)

        def tick() -> None:
            while not done.is_set():
                if self._under_way[-1] is line:
                    self.say(line(time.monotonic() - began_s))
                done.wait(_TICK_S)

        clock = threading.Thread(target=tick, daemon=True) if self.is_shown else None
        try:
            if clock is not None:
                clock.start()
            yield
        finally:
            done.set()
            if clock is not None:
                clock.join()
            self._under_way.remove(line)
            self.clear()


def so_far(elapsed_s: float, expected_s: float) -> str:
    """Return how long something takes so far, and about how long it takes yet if known.

    >>> so_far(4.2, 10), so_far(4.2, 0)
    ('4 s, about 6 s left', '4 s')
    """
    left = f", about {max(1.0, expected_s - elapsed_s):.0f} s left" if expected_s else ""
    return f"{elapsed_s:.0f} s{left}"


class Printer:
    """Results of a command on stdout, each written at once; what is under way on stderr.

    A report is a pair: the JSON object of a result, and its lines. Both are given as functions, and only the one that
    is wanted is called.

    Args:
        as_json: print objects, a line each.
        quiet: show nothing of what is under way.

    Attributes:
        progress: what is under way.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self._as_json = as_json
        self._rows = 0
        self.progress = Progress(quiet=quiet)

    def show(
        self, *, body: Callable[[], object] | None = None, lines: Callable[[], Iterable[str]] | None = None
    ) -> None:
        """Print a result: `body` as JSON, or `lines`. A form that is left out prints nothing."""
        self.progress.clear()
        if self._as_json and body is not None:
            from gpumem_tui.report.objects import encoded

            print(encoded(body()), flush=True)
        elif not self._as_json and lines is not None:
            for line in lines():
                print(line, flush=True)

    def show_row(self, *, body: Callable[[], object], header: str, line: Callable[[], str]) -> None:
        """Print a result that is a row of an endless table: the header is repeated every 30 rows."""
        header_is_due = self._rows % _HEADER_EVERY == 0
        self._rows += 1
        self.show(body=body, lines=lambda: [*[header] * header_is_due, line()])

    def begin_table(self) -> None:
        """Have the next row come under a header."""
        self._rows = 0


def note(line: str) -> None:
    """Print a line of its own on stderr."""
    print(line, file=sys.stderr, flush=True)


def complain(message: str, code: int) -> int:
    """Print one line on stderr, marked as ours, and return the exit code."""
    print(f"gpumem-tui: {' '.join(message.split())}", file=sys.stderr)
    return code


class Complaints:
    """Complaints that last for a while, said once on stderr: again only after another one, or none."""

    def __init__(self) -> None:
        self._last = ""

    def say(self, problem: str) -> None:
        """Say it if it is new; empty for nothing."""
        if problem and problem != self._last:
            complain(problem, 0)
        self._last = problem


def is_terminal() -> bool:
    """Return whether there is a terminal to draw on.

    Textual draws on stderr and reads stdin; all three must be the terminal, and one that can be drawn on.
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)  # None where whoever started the program closed them
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def is_read_by_a_person() -> bool:
    """Return whether stdout is a terminal, even one that cannot be drawn on."""
    return sys.stdout is not None and sys.stdout.isatty()


def columns() -> int:
    """Return the width of the terminal, or COLUMNS where that is set; a pipe or a file has room for everything."""
    from shutil import get_terminal_size

    return get_terminal_size((sys.maxsize, 24)).columns


def sleep_until(due_s: float, held: Iterable[int] = ()) -> None:
    """Sleep until then (`time.monotonic`).

    Args:
        held: descriptors whose other end somebody holds open for as long as he reads.

    Raises:
        BrokenPipeError: nobody reads what is printed any more, such as over ssh once the viewer is gone.
    """
    poll = select.poll()
    with suppress(OSError, ValueError):  # a stdout that is closed, or a test's
        poll.register(sys.stdout.fileno(), 0)  # poll reports a hang-up anyway
    for descriptor in held:
        poll.register(descriptor, _HUNG_UP)
    while (left_s := due_s - time.monotonic()) > 0:
        if poll.poll(min(left_s, 60.0) * 1000):
            raise BrokenPipeError


_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""The event of a socket's hang-up; a pipe's is always reported."""


def held_stdin() -> tuple[int, ...]:
    """Return stdin if somebody holds its other end, as ssh does; else nothing."""
    poll = select.poll()
    with suppress(AttributeError, OSError, ValueError):  # it is closed, or a test's
        poll.register(sys.stdin.fileno(), _HUNG_UP)
        return () if poll.poll(0) else (sys.stdin.fileno(),)
    return ()


def written(write: Callable[[], None]) -> int:
    """Write to stdout and return the exit code: ctrl+c and a reader that leaves are ordinary ends."""
    try:
        write()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
    return 0


def printed_whole(command: Callable[[], T]) -> T | int:
    """Run a command until all that it printed is written, and return what it returns, or an exit code.

    A reader that has enough (``| head -1``) is no error; a full disk is one.
    """
    try:
        result = command()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        drop_output()
        return complain(f"the output cannot be written: {error.strerror}; free space there", EXIT_FAILED)
    return result


def drop_output() -> None:
    """Drop what stdout still holds, which is not wanted, or has no place; else it would be written at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_end(call: Callable[[], object]) -> None:
    """Have SIGTERM and SIGHUP call `call` from now on, but for a hang-up that ``nohup`` has ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: call())


@contextmanager
def interrupts(cancel: Callable[[], object]) -> Iterator[None]:
    """Have ctrl+c call `cancel`, and not end the program, for as long as the context lasts."""
    before = signal.signal(signal.SIGINT, lambda *_: cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
