"""Activities of a session with the program itself on a GPU: each reports its outcome in a line."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.gpu import screens
from tests.gpu.place import Place
from tests.gpu.processes import Ended, Limit, Started, TimeIsUp
from tests.gpu.rows import PROGRAMS, ROOT

if TYPE_CHECKING:
    from tests.terminal.terminal import Terminal

_DIES_WITHOUT_GPU = ROOT / "tests" / "probe" / "scripts" / "out_of_memory.py"

Uses = Literal["card", "gpu", "processor"]
"""The card alone; the GPU next to others; processors only."""


class Failed(Exception):
    """An activity did not do what it is for; one line."""


@dataclass(frozen=True)
class Activity:
    """Something to do.

    Attributes:
        work: does it within so many seconds, and returns what came of it in a line.
        limit_s: how long it may take.
        least_s: with less time left it is not begun.
    """

    name: str
    uses: Uses
    limit_s: float
    work: Callable[[Place, Limit], str]
    least_s: float = 10.0


def _ok(ended: Ended, *codes: int) -> Ended:
    if ended.code not in (codes or (0,)):
        raise Failed(f"exit code {ended.code}: {ended.last_line}")
    return ended


def _json(text: str) -> list[dict[str, Any]]:
    """The objects of JSON lines."""
    try:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    except ValueError as error:
        raise Failed(f"not JSON: {error}") from error


# The machine


def _doctor(place: Place, limit: Limit) -> str:
    ended = _ok(place.program("doctor", "doctor", "--json", limit_s=limit.left_s), 0, 4)
    (said,) = _json(ended.output)
    checks = [check for check in said["checks"] if check["status"] not in ("ok", "skip")]
    return "all is well" if not checks else "; ".join(f"{check['name']}: {check['found']}" for check in checks)


def _calibrate(place: Place, limit: Limit) -> str:
    path = place.work / "calibration.toml"
    ended = place.program("calibrate", "doctor", "--calibrate", "--output", str(path), limit_s=limit.left_s)
    _ok(ended)
    return " ".join(ended.output.split())[:300]


def _readings(place: Place, limit: Limit) -> str:
    with _trained(place, "readings", limit):
        reading = _ok(place.program("readings", "monitor", "--once", "--json", limit_s=limit.left_s))
        text = _ok(place.program("readings", "monitor", "--once", log="readings-text", limit_s=limit.left_s)).output
        free = place.program("readings", "free", "--json", log="readings-free", limit_s=limit.left_s)
    _ok(free, 0, 3)
    gpus = _json(reading.output)[0]["gpus"]
    if not text.strip():
        raise Failed("monitor --once printed nothing")
    return "; ".join(f"GPU {gpu['index']}: {len(gpu['processes'] or ())} processes" for gpu in gpus)


# Searches


def _searched(name: str, *arguments: str, neighbour: bool = False) -> Callable[[Place, Limit], str]:
    def work(place: Place, limit: Limit) -> str:
        with _trained(place, name, limit) if neighbour else contextlib.nullcontext():
            words = ["search", "--json", "--gpu", place.gpu, *arguments]
            command = [place.python.path if word == "PYTHON" else word for word in words]
            ended = place.program(name, *command, limit_s=limit.left_s)
        results = [each for each in _json(ended.output) if each.get("event") == "result"]
        if not results:
            raise Failed(ended.last_line)
        return _found(results[-1])

    return work


def _found(result: dict[str, Any]) -> str:
    traced = result.get("traced") or {}
    keys = ("max_batch_size", "may_fit_batch_size")
    ends = sorted({int(traced[key]) for key in keys if traced.get(key) is not None})
    return f"predicted {' to '.join(map(str, ends)) or 'nothing'}; {result['message']}"


# Training that is watched

_COUNTED = ("parameters", "gradients", "optimizer")


@contextlib.contextmanager
def _trained(place: Place, name: str, limit: Limit, *flags: str, probed: bool = False) -> Iterator[Training]:
    """A program that trains meanwhile, in its third step or later."""
    training = Training(place, name, limit.left_s, flags, probed)
    try:
        training.wait(min(60.0, limit.left_s))
        yield training
    finally:
        training.process.kill()


class Training:
    """long_train.py at work, perhaps under `run`; it writes what it truly holds."""

    def __init__(self, place: Place, name: str, limit_s: float, flags: tuple[str, ...], probed: bool) -> None:
        self._truth = place.truth(name)
        words = [*place.training(name, limit_s), *flags]
        under = [sys.executable, "-m", "gpumem_tui", "run", "--"] if probed else []
        self.process: Started = place.start(name, [*under, *words], f"{name}-training")

    def wait(self, limit_s: float, step: int = 2) -> None:
        """Until it has made some steps."""
        end = time.monotonic() + limit_s
        while not self._truth.exists() or self.says()["step"] < step:
            if not self.process.is_running:
                raise Failed(f"the training ended: {self.process.wait(1.0).last_line}")
            if time.monotonic() > end:
                raise TimeIsUp(f"the training made no {step} steps within {limit_s:.0f} s")
            time.sleep(0.1)

    def says(self) -> dict[str, int]:
        """Its true memory, in bytes, and its pid."""
        said: dict[str, int] = json.loads(self._truth.read_text())
        return said


def _watched(place: Place, limit: Limit) -> str:
    with _trained(place, "watched", limit, probed=True) as training:
        truth = training.says()
        return _looked(place, "watched", truth, limit)


def _attached(place: Place, limit: Limit) -> str:
    with _trained(place, "attached", limit) as training:
        truth = training.says()
        pid = str(truth["pid"])
        ended = place.program("attached", "attach", "--yes", pid, log="attached-attach", limit_s=limit.left_s)
        attached = " ".join(_ok(ended).output.split())
        training.wait(limit.left_s, training.says()["step"] + 3)
        return f"{_looked(place, 'attached', truth, limit)}; {attached[:160]}"


def _looked(place: Place, name: str, truth: dict[str, int], limit: Limit) -> str:
    """Watch a process, then look into it; the figures of both next to its own count."""
    pid = str(truth["pid"])
    sample = place.start(name, [sys.executable, "-m", "gpumem_tui", "watch", "--json", pid], f"{name}-watch")
    look = place.program(name, "look", "--json", pid, log=f"{name}-look", limit_s=limit.left_s / 2)
    place.program(name, "look", "--plain", pid, log=f"{name}-look-text", limit_s=limit.left_s / 2)
    sample.kill()
    _ok(look)
    (found,) = _json(look.output)
    device = max(found["devices"], key=lambda each: each["peak_bytes"] or 0)
    (place.work / f"{name}-truth.json").write_text(json.dumps(truth))
    differences = [f"{key} {device['highest'][key] - truth[key]:+,} B" for key in _COUNTED]
    return f"look next to the program's own count: {', '.join(differences)}"


def _death(place: Place, limit: Limit) -> str:
    words = place.training("death", limit.left_s)
    dies = [place.python.path, str(_DIES_WITHOUT_GPU), "3"] if place.machine.rehearsal else [*words, "--oom"]
    ended = place.program("death", "run", "--", *dies, log="death-training", limit_s=limit.left_s)
    if ended.code == 0:
        raise Failed("it did not run out of memory")
    said = _ok(place.program("death", "watch", "--post-mortem", limit_s=limit.left_s))
    place.program("death", "watch", "--post-mortem", "--json", log="death-json", limit_s=limit.left_s)
    return " ".join(said.output.split())[:300]


# A command that is made to fit

_FITTED = PROGRAMS / "fitted.py"


def _fit(place: Place, limit: Limit) -> str:
    """Fit a command to the card and train it: the batch and the passes of the line are those that trained."""
    line, ended = _fits(place, "fit", limit)
    size, passes = re.search(r"batch ([\d,]+)", line), re.search(r"× ([\d,]+) passes", line)
    assert size is not None, "it names a batch"
    wanted = f"{passes[1] if passes else '1'} x {size[1]}"
    if not place.machine.rehearsal and f"trained 12 steps of {wanted}" not in ended.output.replace(",", ""):
        raise Failed(f"{line}; it did not train {wanted}: {ended.last_line}")
    return line


def _fit_death(place: Place, limit: Limit) -> str:
    """Fit a command whose samples grow later: its end names the bucket that grew."""
    line, ended = _fits(place, "fit-death", limit, "--grow")
    grew = re.search(r"since the trial these grew: .*", ended.errors)
    if place.machine.rehearsal:
        return line
    if grew is None:
        raise Failed(f"{line}; nothing said what grew: {ended.last_line}")
    return f"{line}; {grew[0]}"


def _fits(place: Place, name: str, limit: Limit, *more: str) -> tuple[str, Ended]:
    rehearsed = ["--dry-run"] if place.machine.rehearsal else []
    command = [place.python.path, str(_FITTED), "--bs", "{batch}", "--accum", "{accumulation}", *more]
    words = ["fit", "--gpu", place.gpu, "--target-batch", "256", *rehearsed, "--", *command]
    ended = place.program(name, *words, limit_s=limit.left_s)
    _ok(ended, 0, *([1] if more else []))
    line = re.search(r"gpumem-tui: (batch .* GiB.*)", ended.errors)
    if line is None:
        raise Failed(f"it did not say which batch: {ended.last_line}")
    return line[1], ended


# The terminal program

_SETTLING_S = 1.0
"""The wanted text is on the screen, and the rest of it comes."""


def _screen(name: str, *arguments: str, until: str, within: str = "") -> Callable[[Place, Limit], str]:
    """Run the terminal program; keep its screen once `within` is found on it, and `until`, or when time is up."""

    def work(place: Place, limit: Limit) -> str:
        words = [place.gpu if word == "GPU" else word for word in arguments]
        words += place.training(name, limit.left_s) if arguments[0] == "run" else []
        with _shown(place, name, *words) as shown:
            if within:
                _comes(shown, within, limit)
                screens.keep(shown.screen, place.work / f"{name}-running")
            _comes(shown, until, limit)
        return f"{name}.svg and .txt are kept"

    return work


@contextlib.contextmanager
def _shown(place: Place, name: str, *words: str) -> Iterator[Terminal]:
    """The program in a terminal; its last screen is kept in any case."""
    from tests.terminal.terminal import terminal

    env = place.environment(name)
    with terminal(*words, env=env, python=sys.executable, cwd=place.folder(name)) as shown:
        try:
            yield shown
        finally:
            screens.keep(shown.screen, place.work / name)


def _comes(shown: Terminal, pattern: str, limit: Limit) -> None:
    try:
        shown.wait_until(lambda text: re.search(pattern, text) is not None, pattern, limit.left_s)
    except AssertionError as error:
        raise Failed(f"{pattern} did not come on the screen") from error
    settled_s = time.monotonic() + _SETTLING_S
    shown.wait_until(lambda _: time.monotonic() > settled_s, "the rest of it")


def _monitor_screen(place: Place, limit: Limit) -> str:
    """The Monitor with a process that is watched, then that process."""
    name = "screen-monitor"
    with _trained(place, name, limit, probed=True) as training, _shown(place, name, "monitor") as shown:
        pid = str(training.says()["pid"])
        _comes(shown, f" {pid} ", limit)
        screens.keep(shown.screen, place.work / f"{name}-all")
        shown.press(f"/{pid}\r")
        shown.press("\x1b[B")
        _comes(shown, "l look", limit)
        screens.keep(shown.screen, place.work / f"{name}-row")
        shown.press("\r")
        _comes(shown, "started by", limit)
    return f"{name}.svg and .txt are kept"


# The recorder

_LAST_RUN_S = 8.0
"""A run that it began within its budget ends after it."""


def _record(place: Place, limit: Limit) -> str:
    budget = ["--budget", f"{limit.left_s - _LAST_RUN_S:.0f}"]
    words = [sys.executable, "-m", "tests.gpu.record", "--out", str(place.work.parent.resolve()), *budget]
    words += ["--rehearse"] if place.machine.rehearsal else []
    ended = _ok(place.start("record", words, "record").wait(limit.left_s))
    lines = ended.output.splitlines()
    if "stopped at the time budget" in ended.output:
        raise Unfinished(lines[-1])
    return lines[0]


class Unfinished(Exception):
    """Something is left to do for the next call; one line."""


_SIXTH_TRIAL = r"Trial ([6-9]|\d\d) "
_TENTH_STEP = r"\n .?1\d \d+\.\d"  # as long_train.py prints it
_TRACED = r"(?s)\A(?!.*tracing).*✓ fits"
_GPT = ("PYTHON", str(PROGRAMS / "gpt_compiled.py"), "--mode", "none", "--bs", "{batch}")
_LORA = ("PYTHON", str(PROGRAMS / "trainer_llama.py"), "--lora", "--bs", "{batch}")
_RAMP = ("search", "--gpu", "GPU", "--model", "gpt2", "--strategy", "ramp")


def activities() -> list[Activity]:
    """The activities before the programs, the most telling first."""
    ramp = _screen("screen-search", *_RAMP, within=_SIXTH_TRIAL, until="VERIFIED")
    shared = _searched("search-share", "--share", "--limit", "16GiB", "--", *_GPT, neighbour=True)
    return [
        Activity("doctor", "card", 60, _doctor),
        Activity("calibrate", "card", 90, _calibrate, 30),
        Activity("search-command", "card", 120, _searched("search-command", "--", *_GPT), 40),
        Activity("screen-search", "card", 120, ramp, 40),
        Activity("search-limit", "card", 120, _searched("search-limit", "--limit", "24GiB", "--", *_LORA), 40),
        Activity("search-share", "card", 120, shared, 40),
        Activity("fit", "card", 120, _fit, 40),
        Activity("fit-death", "card", 120, _fit_death, 40),
        Activity("watched", "gpu", 120, _watched, 30),
        Activity("attached", "gpu", 120, _attached, 30),
        Activity("death", "gpu", 120, _death, 30),
        Activity("readings", "gpu", 90, _readings, 20),
        Activity("screen-monitor", "gpu", 90, _monitor_screen, 20),
        Activity("screen-run", "gpu", 90, _screen("screen-run", "run", "--tui", "--", until=_TENTH_STEP), 20),
        Activity("screen-plan", "processor", 120, _screen("screen-plan", "plan", "--gpu", "GPU", until=_TRACED), 20),
        Activity("record", "gpu", 1e9, _record, 20),
    ]
