"""The command line. Without arguments the program opens at once; only with them is click imported to parse them."""

from __future__ import annotations

import os
import sys

from gpumem_tui import __version__
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, OptionError
from gpumem_tui.report.output import complain, is_terminal, replace_unencodable

_COMPLETION = "_GPUMEM_TUI_COMPLETE"
"""With this a shell asks click for what could be typed next (click's documentation, "Shell Completion")."""


def main() -> None:
    """Entry point: every error a user can cause is one line on stderr and an exit code."""
    if sys.argv[1:] == ["--version"]:
        print(f"gpumem-tui, version {__version__}")
        return
    replace_unencodable()
    try:
        code = _run_command() if sys.argv[1:] or _COMPLETION in os.environ else _open()
    except OptionError as error:
        code = complain(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _run_command() -> int:
    if "--" in sys.argv:
        from gpumem_tui.run.interpreters import begin_early

        begin_early(sys.argv[1:])
    from gpumem_tui.cli.commands import run

    return run()


def _open() -> int:
    if not is_terminal():
        raise OptionError("no terminal to draw on; `gpumem-tui monitor --once` and `search --plain` need none")
    from gpumem_tui.settings import load
    from gpumem_tui.tui.start import open_program

    return open_program(load())
