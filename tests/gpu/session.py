"""Eight minutes on a GPU: `python -m tests.gpu.session --out DIR --budget 480`.

Runs, the most telling first: doctor and calibration; searches of a command, on the screen, under a limit, next to a
neighbour; training that is watched, attached to and dies; screens; the recorder, and next to it the programs of
`tests/gpu/programs` with what is predicted of each. Activities that need the card alone have it alone; the rest runs
side by side, as an allocator's figures are a process's own and NVML tells processes apart. Each has its time limit, and
one that fails is a line of the table.

Results are kept in DIR at once: the same command continues where it was stopped. In the end DIR has table.csv and
table.md, the recordings, state.ndjson and, in zip files of at most 15 MB, histories, screens and all that was printed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpumem_tui.memory import GIB
from gpumem_tui.report import markdown
from tests.gpu import packing
from tests.gpu.activities import Activity, Failed, Unfinished, Uses, activities
from tests.gpu.measured import Folder
from tests.gpu.outcome import (
    PREDICT_LIMIT_S,
    Comparison,
    Predicted,
    Real,
    header_lines,
    predict,
    predicting,
    summary,
    text_line,
    write_csv,
    write_markdown,
)
from tests.gpu.place import Machine, NoGpu, Place, describe
from tests.gpu.processes import Limit, TimeIsUp, kill_all, run
from tests.gpu.rows import Interpreter, NotHere, Row, load_rows
from tests.published.measurements import DEFAULT_RECORDINGS

DEFAULT_BUDGET_S = 480.0
PROGRAM_LIMIT_S = 150.0
CLOSING_S = 5.0
"""For the tables and the packing."""
ROOM_BYTES = 20 * GIB
"""About what a program takes of the GPU at most: so many run at once."""
MOST_AT_ONCE = 7

MEASURE = Path(__file__).with_name("measure.py")


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of state.ndjson: the machine, or what came of an activity.

    Attributes:
        said: what came of it, or why nothing did.
        failed: it did not do what it is for.
        real: of a program that ran.
        predicted: of a program that was predicted.
    """

    name: str
    said: str = ""
    failed: bool = False
    seconds: float = 0.0
    machine: Machine | None = None
    real: Real | None = None
    predicted: Predicted | None = None


class State:
    """DIR/state.ndjson: a line for all that is done.

    Raises:
        StateError: it is not such a file, or of another machine.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._path = folder / "state.ndjson"
        self.done: dict[str, Done] = {}
        body = self._path.read_bytes() if self._path.exists() else b""
        whole = body[: body.rfind(b"\n") + 1]  # a killed session leaves a line without its end
        try:
            lines = [msgspec.json.decode(line, type=Done) for line in whole.splitlines()]
        except msgspec.MsgspecError as error:
            raise StateError(f"{self._path} is not a session's: {error}; use another --out") from error
        for line in lines:
            if line.machine is not None and not line.machine.is_same(machine):
                raise StateError(f"{folder} holds a session of {line.machine.title}; use another --out")
            self.done[line.name] = line
        self._file = self._path.open("ab")
        self._file.truncate(len(whole))
        if not lines:
            self.add(Done(name="machine", machine=machine))

    def add(self, line: Done) -> None:
        """Keep a line at once."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        self.done[line.name] = line


class StateError(Exception):
    """A folder that a session cannot continue in; one line."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An activity as the session runs it: `work` returns the line to keep."""

    activity: Activity
    work: Callable[[float], Done]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, 2 for what cannot be done, or 4 without a GPU."""
    options = _parser().parse_args(arguments)
    options.out = options.out.absolute()  # what is started here has a folder of its own
    deadline = time.monotonic() + options.budget - CLOSING_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is done is packed even so
    try:
        wanted = re.compile(options.only)
        machine = describe(options.python, rehearse=options.rehearse)
        python = Interpreter(options.python, machine.capability)
        options.out.mkdir(parents=True, exist_ok=True)
        state = State(options.out, machine)
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 4
    except (NotHere, StateError, re.error) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--out {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpumem-session-", ignore_cleanup_errors=True) as scratch:
        work = options.out / "work"
        place = Place(machine, python, work, Path(scratch), options.clones)
        steps = [step for step in _steps(place) if wanted.search(step.activity.name)]
        ended = {name for name, done in state.done.items() if not (options.retry and done.failed)}
        left = [step for step in steps if step.activity.name not in ended]
        print(f"{machine.title}: {len(left)} of {len(steps)} activities to do", flush=True)
        try:
            work.mkdir(exist_ok=True)
            _run_all(left, state, deadline, _lanes(machine, options.n))
        except OSError as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 2
        finally:
            kill_all()
            code = _close(options.out, machine, state, len(steps))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.session", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, metavar="S", help="seconds, then stop")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="runs the programs (default: this)")
    parser.add_argument("--clones", type=Path, metavar="DIR", help="a folder of clones, such as DIR/nanoGPT")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that names must contain")
    parser.add_argument("-n", type=int, default=0, metavar="N", help="programs at once (default: as GPU and CPUs bear)")
    parser.add_argument("--retry", action="store_true", help="do again what failed")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: the simulated one replaces it")
    return parser


def _lanes(machine: Machine, wanted: int) -> dict[str, int]:
    """How many run at once: on the GPU, and on processors alone."""
    processors = len(os.sched_getaffinity(0))
    on_gpu = wanted or max(1, min(MOST_AT_ONCE, machine.total_bytes // ROOM_BYTES, processors // 2))
    return {"gpu": on_gpu, "processor": max(1, processors - on_gpu - 1)}


# Activities


def _steps(place: Place) -> list[Step]:
    """All there is to do, the most telling first; predictions after each program that they are of."""
    on: Uses = "processor" if place.machine.rehearsal else "gpu"
    sides: tuple[tuple[str, Uses, float, Callable[[Place, Row, float], Done]], ...] = (
        ("real", on, PROGRAM_LIMIT_S, _measured),
        ("predicted", "processor", PREDICT_LIMIT_S, _predicted),
    )
    programs = [
        Step(activity=Activity(f"{kind}.{row.name}", uses, limit_s, lambda *_: ""), work=partial(work, place, row))
        for row in load_rows()
        for kind, uses, limit_s, work in sides
    ]
    acts = [Step(activity=each, work=partial(_acted, place, each)) for each in activities()]
    return [*acts, *programs]


def _acted(place: Place, activity: Activity, limit_s: float) -> Done:
    try:
        return Done(name=activity.name, said=activity.work(place, Limit(limit_s)))
    except Unfinished:
        raise
    except (Failed, TimeIsUp) as error:
        return Done(name=activity.name, said=str(error), failed=True)
    except ImportError as error:
        return Done(name=activity.name, said=f"needs {error.name}, which is not here", failed=True)


def _measured(place: Place, row: Row, limit_s: float) -> Done:
    """Run a row's program; in a rehearsal as a command on the simulated GPU."""
    name = f"real.{row.name}"
    nothing = Real(name=row.name, command=row.command)
    result = place.work / f"{row.name}.json"
    result.unlink(missing_ok=True)
    folder = place.folder(row.name)
    try:
        place.python.check(row)
        command = [place.python.path, str(MEASURE), str(result), *row.words(place.clones)]
        if place.machine.rehearsal:
            ended = predicting(command, row, place.gpu, place.clones, folder, limit_s)
        else:
            cwd = row.folder(place.clones) if row.clone else folder
            env = {"MASTER_PORT": _free_port(), **row.variables()}
            ended = run(command, place.work / row.name, limit_s, env, cwd)
    except (NotHere, TimeIsUp) as error:
        return Done(name=name, failed=True, real=msgspec.structs.replace(nothing, error=str(error)))
    why = "" if ended.code == 0 else ended.last_line
    try:
        found = msgspec.json.decode(result.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, msgspec.MsgspecError):
        return Done(name=name, failed=True, real=msgspec.structs.replace(nothing, error=why or "it wrote no figures"))
    known = {key: found[key] for key in Real.__struct_fields__ if key in found}
    known.update(name=row.name, command=row.command, error=why)
    return Done(name=name, failed=bool(why), real=msgspec.convert(known, Real))


def _free_port() -> str:
    """A port for the ranks of one program, of which several run at once."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _predicted(place: Place, row: Row, limit_s: float) -> Done:
    name = f"predicted.{row.name}"
    try:
        place.python.check(row)
    except NotHere as error:
        return Done(name=name, failed=True, predicted=Predicted(error=str(error)))
    return Done(
        name=name, predicted=predict(row, place.python.path, place.predicted_gpu, place.clones, limit_s)
    )  # fmt: skip


# In which order


def _run_all(steps: Sequence[Step], state: State, deadline: float, lanes: dict[str, int]) -> None:
    """Run steps in their order, as many side by side as may be, until all are done or the time is up.

    Raises:
        OSError: what was done cannot be kept.
    """
    waiting = list(steps)
    running: dict[Future[Done | None], Step] = {}
    with ThreadPoolExecutor(sum(lanes.values()) + 1) as pool:
        try:
            while waiting or running:
                for step in _startable(waiting, [each.activity for each in running.values()], lanes):
                    waiting.remove(step)
                    left_s = deadline - time.monotonic()
                    if left_s >= step.activity.least_s:
                        running[pool.submit(_timed, step, min(step.activity.limit_s, left_s), deadline)] = step
                if running:
                    _collect(running, state, deadline)
                if time.monotonic() >= deadline:
                    waiting.clear()
                    kill_all()
        except BaseException:
            kill_all()  # else leaving the pool waits for what runs
            raise


def _collect(running: dict[Future[Done | None], Step], state: State, deadline: float) -> None:
    """Wait until one of them ends, or the time is up, and keep what came of it."""
    left_s = max(0.1, deadline - time.monotonic())
    for future in wait(running, left_s, return_when=FIRST_COMPLETED).done:
        del running[future]
        if (done := future.result()) is not None:
            state.add(done)
            print(f"{done.seconds:5.0f} s  {_line(done)}", flush=True)


def _startable(waiting: Sequence[Step], running: Sequence[Activity], lanes: dict[str, int]) -> list[Step]:
    """The activities that may start now. One that needs the card alone holds up all that comes after it on the GPU."""
    found: list[Step] = []
    uses = [activity.uses for activity in running]
    gpu_is_open = "card" not in uses
    for step in waiting:
        need = step.activity.uses
        if need == "processor":
            if uses.count(need) < lanes[need]:
                found.append(step)
                uses.append(need)
        elif gpu_is_open:
            if need == "card":
                gpu_is_open = False
                if "gpu" in uses:
                    continue
            elif uses.count(need) >= lanes[need]:
                continue
            found.append(step)
            uses.append(need)
    return found


def _timed(step: Step, limit_s: float, deadline: float) -> Done | None:
    """The line to keep; None for what the end of the session stopped: the next call does it."""
    began_s = time.monotonic()
    try:
        done = step.work(limit_s)
    except Unfinished as error:
        print(f"{step.activity.name}: {error}", flush=True)
        return None
    except Exception as error:  # noqa: BLE001  any error: it is one line of the table
        done = Done(name=step.activity.name, said=f"{type(error).__name__}: {error}", failed=True)
    if time.monotonic() >= deadline and limit_s < step.activity.limit_s:
        return None
    return msgspec.structs.replace(done, seconds=time.monotonic() - began_s)


def _line(done: Done) -> str:
    figures: Real | Predicted | None = done.real or done.predicted
    if figures is None:
        return f"{done.name}: {'FAILED: ' if done.failed else ''}{done.said}"
    said = figures.error or f"{figures.allocated / GIB:.3f} GiB allocated, {figures.reserved / GIB:.3f} reserved"
    return f"{done.name}: {said}"


# Results


def _close(folder: Path, machine: Machine, state: State, total: int) -> int:
    """Print and write the table, then pack. Returns the exit code."""
    rows = _compared(state)
    acted = [done for done in state.done.values() if not (done.real or done.predicted or done.machine)]
    if rows:
        print(*header_lines(), *map(text_line, rows), *summary(rows), sep="\n")
    for done in acted:
        print(_line(done))
    table = markdown.table(
        ["activity", "what came of it", "s"],
        [
            [done.name, f"{'FAILED: ' if done.failed else ''}{done.said}".replace("|", "\\|"), f"{done.seconds:.0f}"]
            for done in acted
        ],
    )
    undone = total - sum(done.machine is None for done in state.done.values())
    try:
        (folder / "work").mkdir(exist_ok=True)
        (folder / "work" / "machine.toml").write_text(machine.toml(), encoding="utf-8")
        write_csv(folder / "table.csv", rows)
        write_markdown(folder / "table.md", machine.title, rows, [table])
        if too_many := packing.pack(folder / "work", folder):
            print(f"no room in four files of 15 MB, left in {folder / 'work'}: {', '.join(too_many)}")
    except OSError as error:
        print(f"{folder}: {error.strerror}: what is missing there comes with the next call", file=sys.stderr)
        return 2
    print(f"{undone} activities left: run the same command again" if undone > 0 else f"all is done; attach {folder}")
    return 0


def _compared(state: State) -> list[Comparison]:
    """Every row of which there is something, with its cause where an earlier session found one."""
    causes = {
        name: cause.why
        for path in sorted(DEFAULT_RECORDINGS.glob("*/causes.toml"))
        for name, cause in Folder(path.parent).causes.items()
    }
    found = []
    for row in load_rows():
        real, predicted = (state.done.get(f"{side}.{row.name}") for side in ("real", "predicted"))
        if real is None and predicted is None:
            continue
        found.append(
            Comparison(
                name=row.name,
                kind=row.kind,
                real=(real and real.real) or Real(name=row.name, command=row.command, error="not run yet"),
                predicted=(predicted and predicted.predicted) or Predicted(error="not predicted yet"),
                cause=causes.get(row.name, ""),
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
