"""How a process ended, in a few words, from all that was seen of it: by its probe, by `run`, by the kernel."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from gpumem_tui.memory import format_bytes
from gpumem_tui.probe.documents import Exit, PostMortem, UncaughtError
from gpumem_tui.watch.records import End, ProcessState

_CRASHES = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGILL: "illegal instruction",
    signal.SIGFPE: "arithmetic error",
    signal.SIGABRT: "aborted",
    signal.SIGTRAP: "trace trap",
    signal.SIGSYS: "bad system call",
}
_INTERRUPT = "KeyboardInterrupt"


@dataclass(frozen=True)
class Evidence:
    """What is known of a process that has ended.

    Attributes:
        left_ns: wall time at which its probe said that the interpreter exits; 0 if it did not.
        last_ns: wall time of its last sign of life.
        step: its last optimizer step.
    """

    exit: Exit | None
    error: UncaughtError | None
    post_mortem: PostMortem | None
    left_ns: int
    last_ns: int
    step: int


def end_of(seen: Evidence) -> End:
    """How it ended: the first of these that is so."""
    state, phrase = _state(seen)
    exit_ = seen.exit
    when_ns = (exit_.wall_ns if exit_ is not None else 0) or seen.left_ns or seen.last_ns
    return End(
        state=state,
        phrase=phrase,
        time_s=when_ns / 1e9,
        exit_code=None if exit_ is None else exit_.exit_code,
        signal="" if exit_ is None or exit_.signal is None else signal_name(exit_.signal),
        resident_bytes=None if exit_ is None else exit_.resident_bytes,
        limit_bytes=None if exit_ is None else exit_.limit_bytes,
        limit_owner="" if exit_ is None else exit_.limit_owner,
    )


def memory_phrase(resident_bytes: int | None, limit_bytes: int | None, limit_owner: str) -> str:
    """What a process held of host memory, of which limit; empty if neither is known.

    >>> memory_phrase(15 << 30, 16 << 30, "its control group")
    '15.00 GiB resident, limit 16.00 GiB (its control group)'
    """
    held = "" if resident_bytes is None else f"{format_bytes(resident_bytes)} resident"
    bound = "" if limit_bytes is None else f"limit {format_bytes(limit_bytes)} ({limit_owner})"
    return ", ".join(part for part in (held, bound) if part)


def signal_name(number: int) -> str:
    """A signal as `kill -l` calls it.

    >>> signal_name(9)
    'SIGKILL'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _state(seen: Evidence) -> tuple[ProcessState, str]:
    exit_, error = seen.exit, _last_error(seen)
    if exit_ is not None and exit_.killed_for_memory:
        held = memory_phrase(exit_.resident_bytes, exit_.limit_bytes, exit_.limit_owner)
        return (
            ProcessState.KILLED_FOR_MEMORY,
            f"killed by the kernel as host memory ran out{f': {held}' if held else ''}",
        )
    if _ran_out(seen, error):
        return ProcessState.OUT_OF_MEMORY, ProcessState.OUT_OF_MEMORY.value
    if exit_ is not None and exit_.signal is not None:
        state, phrase = _by_signal(exit_.signal)
        at_exit = bool(seen.left_ns) and state is not ProcessState.INTERRUPTED
        return state, f"{phrase} at the interpreter's exit" if at_exit else phrase
    code = None if exit_ is None else exit_.exit_code
    if code == 0:
        return ProcessState.ENDED, "finished (exit code 0)"
    if error is not None and error.error == _INTERRUPT:
        return ProcessState.INTERRUPTED, "interrupted by Ctrl-C"
    if code is not None or error is not None:
        return ProcessState.FAILED, _failure(code, error)
    if seen.left_ns:
        return ProcessState.ENDED, ProcessState.ENDED.value
    return ProcessState.VANISHED, "killed or crashed; which of them was not seen"


def _last_error(seen: Evidence) -> UncaughtError | None:
    """The error that ended it; after one that an error hook outlived, more steps came."""
    return seen.error if seen.error is not None and seen.error.step >= seen.step else None


def _ran_out(seen: Evidence, error: UncaughtError | None) -> bool:
    """Whether memory ran out and that ended it: it was seen to, or no step came after and nothing else explains it."""
    found = seen.post_mortem
    if found is None:
        return False
    if found.fatal:
        return found.step >= seen.step
    code = None if seen.exit is None else seen.exit.exit_code
    explained = error is not None or code == 0 or (seen.exit is not None and seen.exit.signal is not None)
    return found.step >= seen.step and not explained and (bool(seen.left_ns) or code is not None)


def _by_signal(number: int) -> tuple[ProcessState, str]:
    name = signal_name(number)
    if number == signal.SIGINT:
        return ProcessState.INTERRUPTED, "interrupted by Ctrl-C (SIGINT)"
    what = _CRASHES.get(signal.Signals(number)) if number in set(signal.Signals) else None
    if what is not None:
        return ProcessState.CRASHED, f"crashed: {what} ({name})"
    return ProcessState.KILLED, f"killed ({name})"


def _failure(code: int | None, error: UncaughtError | None) -> str:
    phrase = "failed" if code is None else f"failed with exit code {code}"
    if code is not None and error is None and code > 128 and code - 128 in set(signal.Signals):
        return f"{phrase}, as after {signal_name(code - 128)}"
    if error is None:
        return phrase
    text = f"{error.error}: {error.message}" if error.message else error.error
    return f"{phrase}: {text}{f' at {error.source}' if error.source else ''}"
