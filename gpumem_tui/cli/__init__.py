"""The command line. Commands that need no parsing begin at once; the others import click."""

from __future__ import annotations

import os
import sys

from gpumem_tui import __version__
from gpumem_tui.ascii import fit_streams, is_ascii_only
from gpumem_tui.errors import EXIT_INTERRUPTED, OptionError, UserError
from gpumem_tui.report.output import complain, is_terminal, printed_whole

_COMPLETION = "_GPUMEM_TUI_COMPLETE"
"""With this a shell asks click for what could be typed next (click's documentation, "Shell Completion")."""

_MONITOR_FLAGS = {"--once": "once", "--json": "as_json"}
"""By flag what it sets: `monitor` with these alone is what scripts call every minute, and starts without click.

Click parses, and refuses, everything else on a line.
"""


def main() -> None:
    """Entry point: every error a user can cause is one line on stderr and an exit code."""
    if sys.argv[1:] == ["--version"]:
        print(f"gpumem-tui, version {__version__}")
        return
    fit_streams(ascii_only=is_ascii_only())
    try:
        code = _run_command() if sys.argv[1:] or _COMPLETION in os.environ else _open()
    except UserError as error:
        code = complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _run_command() -> int:
    if "--" in sys.argv:
        from gpumem_tui.run.interpreters import begin_early

        begin_early(sys.argv[1:])
    command, *flags = sys.argv[1:] or [""]
    if command == "monitor" and _MONITOR_FLAGS.keys() >= set(flags) and _COMPLETION not in os.environ:
        from gpumem_tui.cli.asked import AskedMonitor
        from gpumem_tui.cli.here import monitor_here

        asked = AskedMonitor.of(dict.fromkeys((_MONITOR_FLAGS[flag] for flag in flags), True))
        return printed_whole(lambda: monitor_here(asked))
    from gpumem_tui.cli.commands import run

    return run()


def _open() -> int:
    if not is_terminal():
        raise OptionError("no terminal to draw on; `gpumem-tui monitor --once` and `search --plain` need none")
    from gpumem_tui.settings import load
    from gpumem_tui.tui.start import open_program

    return open_program(load())
