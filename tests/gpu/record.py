"""Record a real GPU, next to the simulated one under the same torch: `python -m tests.gpu.record`.

Needs one NVIDIA GPU, torch and msgspec, and nvidia-ml-py for the driver's figures; nothing else. Every run is a process
of its own. One file per GPU and torch, a line per run, written at once: recorded rows are
skipped, so a run that was stopped is resumed by the same command.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

# Imported here so that every child finds them imported. None of them touches CUDA.
import torch
import torch._subclasses.fake_tensor

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.catalog.shapes import Gpu
from tests.gpu import largest, sides
from tests.gpu.forks import Fork, ForkFailed, Write
from tests.gpu.matrix import STEPS, Configuration, Edge, configurations, edges
from tests.gpu.nvml import device_memory, driver_version
from tests.published.measurements import (
    DEFAULT_RECORDINGS,
    DataError,
    Machine,
    Recorded,
    RecordedEdge,
    RecordedRun,
    Side,
    load_recordings,
)

DEFAULT_BUDGET_S = 480.0
RUN_LIMIT_S = 120.0
REHEARSED_GPU = "h200-141gb"


class NoGpu(Exception):
    """There is nothing to record on; one line gives the reason and what to do."""


@dataclass(frozen=True)
class Lab:
    """How runs are made here. In a rehearsal the simulated GPU replaces the real one."""

    machine: Machine
    rehearsal: bool

    def real(self, configuration: Configuration) -> Callable[[Write], None]:
        if self.rehearsal:
            return partial(sides.rehearsed, configuration, self.machine.gpu)
        return partial(sides.real, configuration)

    def trial(self, edge: Edge, batch_size: int) -> Callable[[Write], None]:
        if self.rehearsal:
            return partial(largest.try_in_rehearsal, edge, batch_size, self.machine.gpu)
        return partial(largest.try_on_gpu, edge, batch_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0 when all selected runs are recorded, 2, or 4 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: tests/recordings")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that ids must contain")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, metavar="S", help="seconds, then stop")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: the simulated one replaces it")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget
    folder = options.out or DEFAULT_RECORDINGS
    if options.rehearse and folder.resolve() == DEFAULT_RECORDINGS.resolve():
        print("--rehearse measures nothing: give it an --out that is not tests/recordings", file=sys.stderr)
        return 2
    try:
        wanted = re.compile(options.only)
        lab = Lab(_rehearsed_machine() if options.rehearse else _machine(), options.rehearse)
        done = _recorded_ids(folder, lab.machine)
    except re.error as error:
        print(f"--only {options.only}: not a regular expression: {error}", file=sys.stderr)
        return 2
    except DataError as error:
        print(f"{error}; delete that line or use another --out", file=sys.stderr)
        return 2
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 4
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {folder}: {error.strerror}", file=sys.stderr)
        return 2
    tasks: list[Configuration | Edge] = [*configurations(), *edges()]
    tasks = [task for task in tasks if wanted.search(task.id)]
    left = [task for task in tasks if task.id not in done]
    print(f"{lab.machine.gpu.title}, torch {lab.machine.torch}: {len(left)} of {len(tasks)} runs to record", flush=True)
    return _record_all(lab, left, folder, deadline)


def _record_all(lab: Lab, tasks: Sequence[Configuration | Edge], folder: Path, deadline: float) -> int:
    longest_s = 0.0
    for index, task in enumerate(tasks):
        left_s = deadline - time.monotonic()
        if left_s < longest_s:
            print(f"stopped at the time budget, {len(tasks) - index} runs left: run the same command again")
            return 0
        started = time.monotonic()
        limit_s = min(RUN_LIMIT_S, max(1.0, left_s))
        recorded: Recorded = _run(lab, task, limit_s) if isinstance(task, Configuration) else _edge(lab, task, limit_s)
        _append(folder, recorded)
        longest_s = max(longest_s, time.monotonic() - started)
        print(f"[{index + 1}/{len(tasks)}] {_line(recorded)}  {time.monotonic() - started:.1f} s", flush=True)
    return 0


def _run(lab: Lab, configuration: Configuration, limit_s: float) -> RecordedRun:
    """Both sides at once: only one of them uses the GPU, the other one processor core."""
    until = time.monotonic() + limit_s
    simulated = Fork.start(partial(sides.simulated, configuration, lab.machine.gpu))
    real_side = _sided(Fork.start(lab.real(configuration)), limit_s)
    simulated_side = _sided(simulated, max(1.0, until - time.monotonic()))
    return RecordedRun(
        id=configuration.id,
        workload=configuration.workload,
        batch_size=configuration.batch_size,
        steps=STEPS,
        machine=lab.machine,
        real=real_side.side,
        simulated=simulated_side.side,
        history=real_side.history,
        simulated_history=simulated_side.history,
    )


def _sided(fork: Fork, limit_s: float) -> sides.Sided:
    try:
        return msgspec.json.decode(fork.wait(limit_s), type=sides.Sided)
    except ForkFailed as error:
        return sides.Sided(Side(error=str(error)))


def _edge(lab: Lab, edge: Edge, limit_s: float) -> RecordedEdge:
    until = time.monotonic() + limit_s
    try:
        body = Fork.start(partial(largest.predict_edge, edge, lab.machine.gpu)).wait(limit_s)
        predicted = msgspec.json.decode(body, type=largest.Predicted)
    except ForkFailed as error:
        predicted = largest.Predicted(None, str(error))

    def trial(batch_size: int) -> str:
        try:
            return Fork.start(lab.trial(edge, batch_size)).wait(max(1.0, until - time.monotonic())).decode()
        except ForkFailed as error:
            return str(error)

    # Without a prediction there is nothing to compare with, and no place to begin.
    found = largest.find(predicted.batch_size, trial) if predicted.batch_size is not None else largest.Found(None, {})
    return RecordedEdge(
        id=edge.id,
        workload=edge.workload,
        limit_bytes=edge.limit_bytes,
        machine=lab.machine,
        simulated=predicted.batch_size,
        real=found.batch_size,
        tried={str(batch_size): outcome for batch_size, outcome in found.tried.items()},
        error=predicted.error,
    )


# The file


def _append(folder: Path, recorded: Recorded) -> None:
    """Add a line, in place of one that a killed run left without its end."""
    path = folder / f"{_slug(recorded.machine.gpu.title)}-torch-{_slug(recorded.machine.torch)}.jsonl"
    whole_bytes = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
    with path.open("ab") as file:
        file.truncate(whole_bytes)
        file.write(msgspec.json.encode(recorded) + b"\n")


def _slug(text: str) -> str:
    """Lower case letters, digits, dots and dashes: what any file system and any copier takes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _recorded_ids(folder: Path, machine: Machine) -> set[str]:
    """Rows that need not run again: they ran on this GPU, torch and driver, and the real side came to an answer."""
    return {
        found.id
        for found in load_recordings(folder)
        if (found.machine.gpu.title, found.machine.torch, found.machine.driver)
        == (machine.gpu.title, machine.torch, machine.driver)
        and (found.real is not None if isinstance(found, RecordedEdge) else not found.real.error)
    }


def _line(recorded: Recorded) -> str:
    if isinstance(recorded, RecordedEdge):
        return f"{recorded.id}: largest batch {recorded.real}, predicted {recorded.simulated}"
    if recorded.real.error or recorded.simulated.error:
        sides_ = (("real", recorded.real), ("simulated", recorded.simulated))
        return f"{recorded.id}: " + "; ".join(f"{name}: {side.error}" for name, side in sides_ if side.error)
    differences = [
        recorded.simulated.peak_bytes(kind) - recorded.real.peak_bytes(kind) for kind in ("allocated", "reserved")
    ]
    return f"{recorded.id}: simulated − real: allocated {differences[0]:+,} B, reserved {differences[1]:+,} B"


# The machine


def _machine() -> Machine:
    """The machine, asked in a child, since asking touches CUDA.

    Raises:
        NoGpu: torch finds no CUDA device here.
    """
    try:
        body = Fork.start(_describe).wait(RUN_LIMIT_S)
    except ForkFailed as error:
        raise NoGpu(f"the GPU cannot be described: {error}") from error
    if not body.startswith(b"{"):
        raise NoGpu(f"{body.decode()}; run this on a machine with an NVIDIA GPU, or try it with --rehearse")
    return msgspec.json.decode(body, type=Machine)


def _describe(write: Write) -> None:
    if not torch.cuda.is_available():
        write(f"torch {torch.__version__} finds no CUDA device".encode())
        return
    properties = torch.cuda.get_device_properties(0)
    memory = device_memory()
    gpu = Gpu(
        name="recorded",
        title=properties.name,
        kind="datacenter",
        total_bytes=memory["total_bytes"] if isinstance(memory, dict) else properties.total_memory,
        cuda_total_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        source="torch.cuda and NVML of the recording machine",
        multiprocessors=properties.multi_processor_count,
    )
    write(msgspec.json.encode(Machine(str(torch.__version__), driver_version(), gpu, _facts())))


def _facts() -> dict[str, str]:
    """Versions and flags that can change the bytes."""
    facts = {
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "matmul.allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "alloc_conf": sides.allocator_options(),
    }
    return {name: value for name, value in facts.items() if value}


def _rehearsed_machine() -> Machine:
    gpu = find_gpu(REHEARSED_GPU)
    gpu = replace(gpu, title=f"rehearsal on a simulated {gpu.title}")
    return Machine(str(torch.__version__), "rehearsal", gpu, {"rehearsal": "True"})


if __name__ == "__main__":
    sys.exit(main())
