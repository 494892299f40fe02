"""A process of a followed command: from the interpreter's start to the report of what happened.

Imports next to nothing before torch is imported: every Python process of the command loads it. Standard library only.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys

from gpumem_tui.importing import Uncollected, after_import

TYPE_CHECKING = False  # as type checkers read it; importing typing takes longer than all of the rest
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType

    from gpumem_tui.run.events import ChildEvent, Request

REQUEST_FILE, SOCKET_FILE = "request.json", "events.sock"
STACK_FILE = "stack-"
"""And the process id: where a process writes its stack."""

STACK_SIGNAL = signal.SIGRTMAX - 1
CONCLUDE_SIGNAL = signal.SIGRTMAX - 2
"""Asks a process that trains to report the steps that it has made, and to end."""


def begin(
    directory: str,
    take_part: Callable[[Reporter], None],
    at_exit: Callable[[Callable[[], None]], object] = atexit.register,
) -> None:
    """Follow this process: once it imports torch it is part of the trial, and an error that ends it is reported.

    Args:
        directory: where the request and the socket of who asked for it are.
        take_part: called once torch is imported.
        at_exit: registers what is called last as the interpreter exits.
    """
    _write_stack_at_signal(directory)
    session = _Session(directory)
    after_import("torch._compile", session.compiler_imported)
    after_import("torch", lambda torch: session.torch_imported(torch, take_part), Uncollected())
    sys.meta_path.append(_TorchFirst())
    sys.excepthook = session.excepthook
    at_exit(session.ended)
    _end_before_exit(session)
    os.register_at_fork(after_in_child=session.leave)


IMPORT_TORCH = frozenset(
    ("flash_attn", "flash_attn_interface", "xformers", "apex", "transformer_engine", "causal_conv1d", "mamba_ssm")
)
"""Packages that import torch by themselves, and may have stand-ins once it is (simulator/standins/register.py)."""


class _TorchFirst:
    """Imports torch where a program imports one of these packages before it, which is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec that is found once torch is imported; None of any other module."""
        if name.partition(".")[0] not in IMPORT_TORCH or "torch" in sys.modules:
            return None
        try:
            import torch  # noqa: F401
        except ImportError:
            return None
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))  # type: ignore[arg-type]
        return next((spec for spec in found if spec is not None), None)


def _write_stack_at_signal(directory: str) -> None:
    """Have a signal write down the source line that the main thread is at."""
    file = open(os.path.join(directory, f"{STACK_FILE}{os.getpid()}"), "w")  # noqa: SIM115  open as long as the process
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)


def _end_before_exit(session: _Session) -> None:
    """Have `os._exit`, by which programs leave without the exit handlers, report the end first."""
    exit_at_once = os._exit

    def report_and_exit(status: int) -> None:
        os._exit = exit_at_once
        session.ended()
        exit_at_once(status)

    os._exit = report_and_exit  # type: ignore[assignment]  # typed as never to return, which it does not


class _Session:
    """The facts that one process has about its trial."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._reporter: Reporter | None = None
        self._is_child = False
        self._before = sys.excepthook
        self._error: BaseException | None = None
        """The reported end of the process."""

    def reporter(self) -> Reporter:
        """Return the connection to who asked for the trial, made at the first call."""
        if self._reporter is None:
            self._reporter = Reporter(self._directory)
        return self._reporter

    def torch_imported(self, torch: ModuleType, take_part: Callable[[Reporter], None]) -> None:
        """Take part in the trial, unless this torch is too old to be asked for what that takes."""
        from gpumem_tui.run.events import Failed, Ready
        from gpumem_tui.simulator.allocator.profile import profile_for, too_old

        reporter, version = self.reporter(), torch.__version__
        request = reporter.request
        if request.simulated and (reason := too_old(version)):
            reporter.report(Ready.of(version, profile_for(version, request.gpu)))
            reporter.conclude(Failed("torch", f"torch {version} of {sys.executable} {reason}"))
            os._exit(1)
        self._keep_what_workers_leave()
        take_part(reporter)
        atexit.register(self._tell_of_error)  # before the trial takes it for an end without one

    def _keep_what_workers_leave(self) -> None:
        """Have sockets of workers lie in the trial's folder: workers end with the trial, and would leave theirs."""
        from multiprocessing import process

        process.current_process()._config["tempdir"] = self._directory  # type: ignore[attr-defined]

    def compiler_imported(self, module: ModuleType) -> None:
        """Note that the way to torch's compiler is there, and nothing has used it yet."""
        from gpumem_tui.simulator.fast.uncompiled import exclude_nothing

        if self.reporter().request.simulated:
            exclude_nothing(module)

    def leave(self) -> None:
        """Stay out of it in a forked child, such as a data loader's worker: what is reported is its parent's."""
        self._is_child = True
        if self._reporter is not None:
            self._reporter.leave()

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the error that ends this process."""
        if not self._is_child:
            self._failed(error)
            if self.reporter().runs_again:
                return
            if self.reporter().does_not_fit:
                error, trace = error.with_traceback(None), None
                error.__cause__ = error.__context__ = None
        self._before(kind, error, trace)

    def _failed(self, error: BaseException) -> None:
        from gpumem_tui.workload.errors import described

        self._error = error
        self.reporter().failed(described(error), error)

    def _tell_of_error(self) -> None:
        """Report the error that ended this process, as the interpreter keeps it, if our `excepthook` was not called.

        Programs and libraries put their own in its place, as rich does, and those that log errors.
        """
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception) and error is not self._error and not self._is_child:
            self._failed(error)

    def ended(self) -> None:
        """Report the end: the interpreter exits, and has called all other exit handlers."""
        if self._reporter is None or self._is_child:
            return
        self._reporter.ended()
        if self._reporter.has_all_steps:  # taking apart what a long run leaves would take a second
            from gpumem_tui.text import flush_output

            flush_output()
            os._exit(0)


class Reporter:
    """The connection of one process of a command to who asked for the trial.

    Events go out as JSON lines; ``pause`` and ``resume`` come in, and are read at the end of each step.

    Attributes:
        is_concluded: the outcome was sent. `has_all_steps`: all steps that were asked for were made.
        runs_again: the error that ends it is not to be shown, as it is run once more without it.
        does_not_fit: its error is the answer that was asked for, and is shown as one line.
        steps: returns the optimizer steps so far. `on_end`: called as the interpreter exits.
        on_error: called with the words of an error that ends the process, and with it; it may conclude otherwise.
    """

    def __init__(self, directory: str) -> None:
        import socket
        import threading

        from gpumem_tui.launchers import ranks_here
        from gpumem_tui.run.events import Joined

        self._directory = directory
        self._request: Request | None = None
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        self._lock = threading.Lock()
        self.is_concluded = False
        self.has_all_steps = False
        self.runs_again = False
        self.does_not_fit = False
        self.steps: Callable[[], int] = lambda: 0
        self.on_end: Callable[[], None] = lambda: None
        self.on_error: Callable[[str, BaseException], None] = lambda *_: None
        try:
            self._socket.connect(os.path.join(directory, SOCKET_FILE))
        except OSError:  # who asked is gone, and all of this is about to be ended
            self._socket = None
            return
        place = ranks_here(os.environ)
        self.report(Joined(os.getpid(), place.rank or 0, place.world_size or 1, " ".join(sys.argv[:1])))

    @property
    def request(self) -> Request:
        """The request."""
        from gpumem_tui.run.events import decode_request

        if self._request is None:
            with open(os.path.join(self._directory, REQUEST_FILE), "rb") as file:
                self._request = decode_request(file.read())
        return self._request

    def report(self, event: ChildEvent) -> None:
        """Send an event; a receiver that is gone is no error of the program's."""
        from gpumem_tui.run.events import encode

        with self._lock:
            try:
                if self._socket is not None:
                    self._socket.sendall(encode(event))
            except OSError:
                pass

    def conclude(self, event: ChildEvent) -> None:
        """Send the outcome of the trial. The first one counts."""
        if not self.is_concluded:
            self.is_concluded = True
            self.report(event)

    def failed(self, detail: str, error: BaseException) -> None:
        """Send the error that ends this process."""
        from gpumem_tui.run.events import Failed

        self.on_error(detail, error)
        no_torch = isinstance(error, ImportError) and error.name == "torch"
        self.conclude(Failed("torch" if no_torch else "workload", detail))

    def ended(self) -> None:
        """Say that the interpreter exits."""
        from gpumem_tui.run.events import Ended

        self.on_end()
        if not self.is_concluded:
            self.report(Ended(self.steps()))

    def leave(self) -> None:
        """Let go of the connection in a forked child."""
        import threading

        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self.is_concluded = True
        self.on_end = lambda: None
        self.on_error = lambda *_: None
        self._lock = threading.Lock()

    def wait_while_paused(self) -> None:
        """Come back at once, or after a pause when the run is resumed or ended."""
        import select

        paused = False
        while self._socket is not None:
            if not paused and not select.select([self._socket], [], [], 0)[0]:
                return
            try:
                words = self._socket.recv(1024)
            except OSError:
                return
            paused = words.rstrip().endswith(b"pause")
            if not paused:  # it continues, or who asked is gone
                return
