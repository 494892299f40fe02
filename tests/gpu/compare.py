"""Where the simulated GPU and a recorded one part: `python -m tests.gpu.compare`.

For each recorded run the peaks of both and the first event of their histories that differs, with the operator that the
simulated GPU ran there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import get_args

from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.gpu.history import HistoryError, unpack, unpack_timeline
from tests.gpu.placement import Differs, check
from tests.published.measurements import DEFAULT_RECORDINGS, DataError, Kind, RecordedRun, load_recordings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 2 without recordings."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compare", description=__doc__)
    parser.add_argument("--recordings", type=Path, default=DEFAULT_RECORDINGS, metavar="DIR")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that ids must contain")
    options = parser.parse_args(arguments)
    try:
        recordings = load_recordings(options.recordings)
        runs = [r for r in recordings if isinstance(r, RecordedRun) and re.search(options.only, r.id)]
    except (DataError, re.error) as error:
        print(error, file=sys.stderr)
        return 2
    if not runs:
        print(f"no such recording in {options.recordings}: make some with python -m tests.gpu.record", file=sys.stderr)
        return 2
    for run in runs:
        print(f"{run.id}  ({run.machine.gpu.title}, torch {run.machine.torch})")
        for line in report(run):
            print(f"  {line}")
    return 0


def report(run: RecordedRun) -> Iterator[str]:
    """The words for one run."""
    failures = [
        f"{name}: {side.error}" for name, side in (("real", run.real), ("simulated", run.simulated)) if side.error
    ]
    if failures:
        yield from failures
        return
    for kind in get_args(Kind):
        real_bytes, simulated_bytes = run.real.peak_bytes(kind), run.simulated.peak_bytes(kind)
        error_percent = 100 * (simulated_bytes / real_bytes - 1)
        yield (
            f"{kind:11}  real {real_bytes:>15,} B  simulated {simulated_bytes:>15,} B  "
            f"{simulated_bytes - real_bytes:+,} B ({error_percent:+.3f} %)"
        )
    if not run.history or not run.simulated_history:
        unavailable = {**run.simulated.unavailable, **run.real.unavailable}
        yield f"no history: {unavailable.get('history', 'not recorded')}"
        return
    try:
        history = unpack(run.history)
        settings = AllocatorSettings.parse(run.machine.facts.get("alloc_conf", ""))
        yield f"allocator: {check(history, settings).segments} segments as the model takes them"
        yield f"first difference: {first_difference(history.timeline, unpack_timeline(run.simulated_history))}"
    except Differs as error:
        yield f"allocator: {error}"
    except HistoryError as error:
        yield str(error)


def first_difference(real: Timeline, simulated: Timeline) -> str:
    """The first event at which two runs of one program part, in words; ``none`` if they do not."""
    marks = {mark.event: mark for mark in real.marks}
    place = ""
    for event, (ours, theirs) in enumerate(zip_longest(real.events, simulated.events)):
        if event in marks:
            place = f" (step {marks[event].step}, {marks[event].phase.value})"
        same_size = None not in (ours, theirs) and real.sizes[abs(ours) - 1] == simulated.sizes[abs(theirs) - 1]
        if ours != theirs or not same_size:
            return f"event {event}{place}: real {_event(real, ours)}, simulated {_event(simulated, theirs)}"
    return "none"


def _event(timeline: Timeline, number: int | None) -> str:
    """An event in words, with where its allocation was made."""
    if number is None:
        return "has ended"
    index = abs(number) - 1
    site = timeline.site_table[timeline.sites[index]] if timeline.sites else None
    origin = " ".join(filter(None, (site.operator, site.module, site.source))) if site is not None else ""
    verb = "allocates" if number > 0 else "releases"
    return f"{verb} {timeline.sizes[index]:,} B" + (f" [{origin}]" if origin else "")


if __name__ == "__main__":
    sys.exit(main())
