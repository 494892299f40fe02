"""A plan for a command without a screen: its runs one after the other, then JSON or Markdown on stdout."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpumem_tui.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.plan.command_report import command_plan_json, command_plan_markdown
from gpumem_tui.plan.command_runs import CommandRuns, WhatIf
from gpumem_tui.plan.injected import CommandChange
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.control import Cancelled, Control, Unusable
from gpumem_tui.search.headless import CommandLog
from gpumem_tui.search.process import ChildDied


def show(config: SearchConfig, batch_size: int, wanted: Sequence[str] | None, *, as_json: bool, quiet: bool) -> int:
    """Trace, print, and return the exit code. Ctrl-C ends the runs; what is known by then is printed all the same.

    Args:
        wanted: the changes to try, empty for all that can be made; None for none.
        quiet: do not show what the command prints.
    """
    control = Control()
    before = signal.signal(signal.SIGINT, lambda *_: control.cancel())
    try:
        plan, interrupted = _planned(config, batch_size, wanted, control, quiet=quiet)
    except Cancelled:
        return EXIT_INTERRUPTED
    except Unusable as error:
        print(f"gpumem-tui: {error}", file=sys.stderr)
        return error.exit_code
    except ChildDied as error:
        print(f"gpumem-tui: tracing failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGINT, before)
    if as_json:
        print(json.dumps(command_plan_json(plan)))
    else:
        print(command_plan_markdown(plan), end="")
    return EXIT_INTERRUPTED if interrupted else 0


def _planned(
    config: SearchConfig, batch_size: int, wanted: Sequence[str] | None, control: Control, *, quiet: bool
) -> tuple[CommandPlan, bool]:
    """The plan with its what-ifs, and whether it was interrupted before they all had run."""
    runs = CommandRuns(config, batch_size, tuple(wanted or ()))
    predicted, changes, refused = runs.trace(control, CommandLog(config, quiet=quiet).show)
    plan = CommandPlan(config, batch_size, predicted)
    if wanted is None:
        return plan, False
    tried: list[WhatIf] = []
    try:
        for found in _tried(plan, runs, changes, control, quiet=quiet):
            tried.append(found)
    except Cancelled:
        if not quiet:
            print(" interrupted", file=sys.stderr)
    left = [WhatIf(change, Unknown("not run: the plan was interrupted")) for change in changes[len(tried) :]]
    return replace(plan, what_ifs=(*tried, *left, *refused)), bool(left)


def _tried(
    plan: CommandPlan, runs: CommandRuns, changes: Sequence[CommandChange], control: Control, *, quiet: bool
) -> Iterator[WhatIf]:
    """Every change, run; a line each on stderr. What the command prints is not shown again."""
    for number, change in enumerate(changes, 1):
        if not quiet:
            print(f"what-if {number} of {len(changes)}: {change.name} …", end="", file=sys.stderr, flush=True)
        found = runs.trace_change(change, plan.base, control, lambda _: None)
        if not quiet:
            print(f" {_outcome(plan, found)}", file=sys.stderr, flush=True)
        yield found


def _outcome(plan: CommandPlan, found: WhatIf) -> str:
    if isinstance(found.traced, Unknown):
        return found.traced.reason
    return format_bytes(found.traced.at(plan.batch_size).peak_allocated_bytes)
