"""A trial of a command, in one of its processes: from the interpreter's start to the report of what happened.

Imports next to nothing before torch is imported: every Python process of the command loads it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys

from gpumem_tui.importing import after_import

TYPE_CHECKING = False  # as type checkers read it; importing typing takes longer than all of the rest
if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from gpumem_tui.command.link import Link

STACK_FILE = "stack-"
"""And the process id: where a process writes its stack."""

STACK_SIGNAL = signal.SIGRTMAX - 1


def begin(directory: str) -> None:
    """Follow this process: once it imports torch it is part of the trial, and an error that ends it is reported.

    Args:
        directory: where the request and the socket of who asked for it are.
    """
    _write_stack_at_signal(directory)
    session = _Session(directory)
    after_import("torch._compile", session.compiler_imported)
    after_import("torch", lambda _: session.torch_imported())
    sys.excepthook = session.excepthook
    atexit.register(session.ended)
    os.register_at_fork(after_in_child=session.leave)


def _write_stack_at_signal(directory: str) -> None:
    """At a signal, write down the source line that the main thread is at."""
    file = open(os.path.join(directory, f"{STACK_FILE}{os.getpid()}"), "w")  # noqa: SIM115  open as long as the process
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)


class _Session:
    """What one process knows of the trial."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._link: Link | None = None
        self._is_child = False
        self._before = sys.excepthook

    def link(self) -> Link:
        """The connection to who asked for the trial."""
        from gpumem_tui.command.link import Link

        if self._link is None:
            self._link = Link(self._directory)
        return self._link

    def compiler_imported(self, module: ModuleType) -> None:
        """The way to torch's compiler is there, and nothing has used it yet."""
        from gpumem_tui.simulator.uncompiled import exclude_nothing
        from gpumem_tui.trial.events import decode_request

        if decode_request(self.link().request()).simulated:
            exclude_nothing(module)

    def torch_imported(self) -> None:
        from gpumem_tui.command.trial import take_part

        take_part(self.link())

    def leave(self) -> None:
        """This is a forked child, such as a data loader's worker: what is reported is its parent's."""
        self._is_child = True
        if self._link is not None:
            self._link.leave()

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error ends this process."""
        if not self._is_child:
            from gpumem_tui.command.errors import described

            self.link().failed(described(error))
        self._before(kind, error, trace)

    def ended(self) -> None:
        """The interpreter exits, and has called all other exit handlers."""
        if self._link is None or self._is_child:
            return
        self._link.ended()
        if self._link.has_all_steps:  # to take apart what a long run leaves would take a second
            from gpumem_tui.output_lines import flush_output

            flush_output()
            os._exit(0)
