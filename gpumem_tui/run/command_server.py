"""Runs a script in a process forked from a Python that has torch imported, as a fresh one would run it.

Run as a script by path, possibly by a Python that has never heard of the package: it makes this copy of gpumem_tui
importable there, and nothing else of the installation that it is in. Standard library and torch only.

Modules imported beforehand seem absent until the script imports them. Where that could make a difference (a module
of the script's own has such a name, the script sets what torch reads as it is imported, another torch is found) the
process becomes a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib.util
import json
import multiprocessing.process
import os
import signal
import socket
import struct
import sys
import termios
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

LARGEST_MESSAGE = 1 << 18
DESCRIPTORS = 4
"""File descriptors of a run: standard input, output, its supervisor's lifeline and status."""

_USED_BY_EVERY_TRIAL = (
    "gpumem_tui.run.command_trial",
    "gpumem_tui.run.libraries",
    "gpumem_tui.simulator.allocator.replay",
    "gpumem_tui.simulator.compiled.following",
    "gpumem_tui.simulator.cuda.presented",
    "gpumem_tui.simulator.device.gpu",
    "gpumem_tui.simulator.device.scratch",
    "gpumem_tui.simulator.fast.repeats",
)
_TORCH = "torch"
_READ_BY_TORCH = ("TORCH", "PYTORCH", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "PYTHON")
"""How names of variables begin that torch, or a library of its, reads as it is imported."""

_READ_LATER = "ALLOC_CONF"
"""How names end of those that are read with the first allocation only."""


def serve_commands(control: socket.socket) -> None:
    """Fork a process for every message, several at a time. Returns in such a process only, when the script is over.

    Raises:
        SystemExit: there is no torch, or importing it prints something, which is for the command to print.
    """
    del sys.path[0]
    at_exit: list[Callable[[], None]] = []
    atexit.register(lambda: [call() for call in at_exit])  # the first is called last, as of a fresh interpreter
    hidden = _import_beforehand()
    (printed,) = struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, bytes(4)))
    if printed:
        sys.exit(1)
    gc.freeze()  # else each process's first collection copies every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, DESCRIPTORS)
        if not message:
            os._exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of torch's libraries know of forks
            is_child = os.fork() == 0
        if is_child:
            control.close()
            _supervise(json.loads(message), descriptors, hidden, at_exit)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _import_beforehand() -> dict[str, ModuleType]:
    """Import what every trial needs, and take out of `sys.modules` again what a fresh interpreter lacks."""
    from gpumem_tui.importing import after_import
    from gpumem_tui.simulator.fast.uncompiled import exclude_nothing

    before = set(sys.modules)
    after_import("torch._compile", exclude_nothing)
    gc.disable()
    importlib.import_module(_TORCH)
    for name in _USED_BY_EVERY_TRIAL:
        importlib.import_module(name)
    from gpumem_tui.simulator.device.gpu import register

    register()
    gc.enable()
    visible = sys.stdlib_module_names | {"gpumem_tui"}
    names = [name for name in sys.modules if name not in before and name.partition(".")[0] not in visible]
    return {name: sys.modules.pop(name) for name in names}


def _supervise(
    task: dict[str, Any], descriptors: Sequence[int], hidden: dict[str, ModuleType], at_exit: list[Callable[[], None]]
) -> None:
    """Be the supervisor of a run, in a session of its own; returns in the process that it starts."""
    from gpumem_tui.run import supervise

    os.setsid()
    os.environ.clear()
    os.environ.update(task["environment"])
    stdin_fd, stdout_fd, lifeline_fd, status_fd = descriptors
    for fd, number in ((stdin_fd, 0), (stdout_fd, 1), (stdout_fd, 2)):
        os.dup2(fd, number)
    for fd in {stdin_fd, stdout_fd}:
        os.close(fd)
    supervise.main(lifeline_fd, status_fd, lambda: _run(task["words"], hidden, at_exit))


def _run(words: list[str], hidden: dict[str, ModuleType], at_exit: list[Callable[[], None]]) -> None:
    """Run a command, a Python and a script, to its end."""
    from gpumem_tui.run import session
    from gpumem_tui.run.command_trial import take_part

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script, *_ = arguments = [word for word in words[1:2] if word != "-u"] + words[2:]
    folder = os.path.dirname(os.path.realpath(script))
    beforehand = _Beforehand(words, hidden)
    beside = {name.partition(".")[0] for name in os.listdir(folder)}
    if beside & {name.partition(".")[0] for name in (*hidden, *sys.modules)}:
        beforehand.start_afresh()
    hidden[_TORCH].default_generator.seed()
    if "numpy.random" in hidden:
        hidden["numpy.random"].seed()
    sys.argv, sys.orig_argv = arguments, [sys.orig_argv[0], *words[1:]]
    sys.path.insert(0, folder)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    sys.meta_path.insert(0, beforehand)
    session.begin(os.environ["GPUMEM_TUI_TRIAL"], take_part, at_exit.append)
    main = sys.modules["__main__"] = ModuleType("__main__")
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __builtins__=sys.modules["builtins"], __annotations__={})
    vars(main).update(__cached__=None)
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, vars(main))  # noqa: S102 - the user's own script
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter shows it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


class _Beforehand:
    """Finds modules that have been imported and seem not to be: importing torch brings all of them back.

    Args:
        words: the command.
        modules: by name.
    """

    def __init__(self, words: list[str], modules: dict[str, ModuleType]) -> None:
        self._words, self._modules = words, modules
        self._environment = dict(os.environ)

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Return the specification of a module that is there; None of any other."""
        module = self._modules.get(name)
        if module is None or module.__spec__ is None:
            return None
        if path is None:
            found = PathFinder.find_spec(name)
            if found is None or found.origin != module.__spec__.origin:
                self.start_afresh()
        locations = module.__spec__.submodule_search_locations
        spec = ModuleSpec(name, _Loader(self, module), origin=module.__spec__.origin, is_package=locations is not None)
        spec.submodule_search_locations = locations
        spec.has_location = module.__spec__.has_location
        return spec

    def bring_back(self, name: str) -> None:
        """Have all that belongs to a module be there, as one that is imported has imported it; with torch, all else."""
        if name == _TORCH and _read_by_torch(os.environ) != _read_by_torch(self._environment):
            self.start_afresh()
        top = name.partition(".")[0]
        names = [one for one in self._modules if name == _TORCH or one.partition(".")[0] == top]
        for one in names:
            sys.modules.setdefault(one, self._modules.pop(one))

    def start_afresh(self) -> None:
        """Become a fresh interpreter that runs the command from its beginning."""
        from gpumem_tui.run import supervise

        sys.stdout.flush()
        sys.stderr.flush()
        os.environ.clear()
        os.environ.update(self._environment)
        supervise.run_command(self._words)


class _Loader(Loader):
    def __init__(self, beforehand: _Beforehand, module: ModuleType) -> None:
        self._beforehand, self._module = beforehand, module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - Python's
        """Return the module, which is there already."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: all was run as the module was imported."""
        self._beforehand.bring_back(module.__name__)
        module.__spec__ = self._spec


def _read_by_torch(environment: Any) -> dict[str, str]:
    """Return the variables that are read as torch is imported."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_BY_TORCH) and not name.endswith(_READ_LATER)
    }


def _import_package() -> None:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "gpumem_tui", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpumem_tui"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036  any interpreter may run a command
        sys.exit(1)
    _import_package()
    serve_commands(socket.socket(fileno=int(sys.argv[1])))
