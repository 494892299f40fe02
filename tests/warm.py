"""A Python that has torch imported: for each script that a test runs, a process is forked from it instead of started.

Importing torch takes longer than all else that most scripts do. Its replacement is `_CLIENT`, an
executable called ``python``: it hands its arguments, environment, directory and open files to the server, waits, and
ends as the forked process does. That one goes through what an interpreter does as it starts: `sitecustomize` is
imported, torch seems not to be, and importing it is what is waited for. Libraries that look for a GPU as they are
imported are not imported beforehand. Programs that train with transformers are forked from a second server, which has
that too and is forked from the first one when it is first wanted; likewise for what really trains, whose optimizer
loads torch's compiler.

All workers that the tests are divided among share one server. It ends with the process that started them.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_CLIENT = """#!{python} -IS
import fcntl, json, os, signal, socket, sys

arguments = sys.argv[1:]
known = arguments and (arguments[0] in ("-m", "-c", "-u", "-") or os.path.isfile(arguments[0]))
if not known:
    os.execv({python!r}, [{python!r}, *arguments])
opened = [0, 1, 2]
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        handed = number > 2 and not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    except OSError:
        continue  # that of the listing itself
    opened += [number] if handed else []
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({server!r})
task = {{
    "python": os.path.abspath(sys.argv[0]), "arguments": arguments, "directory": os.getcwd(),
    "environment": dict(os.environ), "descriptors": opened, "name": {name!r},
}}
socket.send_fds(server, [json.dumps(task).encode()], opened)
for number in opened:
    os.close(number)
code = int(server.recv(64) or b"1")
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
TORCH, TRANSFORMERS, TRAINING = "torch/bin/python", "transformers/bin/python", "training/bin/python"
"""By what each has imported as it starts; a program of whichever that notes this has transformers."""

_MAIN = """
import os, sys
if os.fork():
    os._exit(0)
sys.path.insert(0, {root!r})
from tests import warm
_ends = warm.ends
try:
    exec(warm.serve({fd}, {pid}))
    _ends(None)
except BaseException as _error:
    _ends(_error)
    raise
"""
"""The server's program: in a forked process the rest of it is the script. It is no child of the tests' process."""

_BEFOREHAND = (
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "sympy",
    "yaml",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "gpumem_tui.run.program",
    "gpumem_tui.run.libraries",
    "gpumem_tui.simulator.cuda.presented",
    "gpumem_tui.simulator.fast.repeats",
)
"""Modules that scripts and libraries import sooner or later, and that do not look for a GPU."""

_FURTHER = {
    TRANSFORMERS: ("datasets", "transformers.models.llama.modeling_llama"),
    TRAINING: ("torch._dynamo",),
}
_USES_TRANSFORMERS = re.compile(rb"\b(transformers|hugging_face|trl|peft|accelerate)\b")
"""Tells it in the words of a command, or in its script."""

_HIDDEN = ("torch", "torch._compile", "transformers")
_LARGEST_MESSAGE = 1 << 20
_MOST_FILES = 64


def start(folder: Path, ends_with: int) -> None:
    """Make `TORCH` and `TRANSFORMERS` in a folder, and serve whoever starts one. Each is as in a virtual environment.

    A program whose first argument is this Python, run by the real one, takes it for its own (`sys.executable`): it
    starts cold, and what it starts by that name is warm.

    Args:
        ends_with: the process whose end ends the server.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = str(folder / "server.sock")
    listener.bind(address)
    listener.listen(64)
    for name in (TORCH, *_FURTHER):
        client = folder / name
        client.parent.mkdir(parents=True)
        client.write_text(_CLIENT.format(python=sys.executable, server=address, name=name))
        client.chmod(0o755)
        _make_environment(client.parents[1])
    root = str(Path(__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", _MAIN.format(root=root, fd=listener.fileno(), pid=ends_with)],
        env={**os.environ, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=(listener.fileno(),),
        start_new_session=True,
        check=True,
    )
    listener.close()


def _make_environment(folder: Path) -> None:
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve().parent
    (folder / "pyvenv.cfg").write_text(f"home = {base}\n")
    packages = Path(sysconfig.get_path("purelib"))
    (folder / "lib" / packages.parent.name).mkdir(parents=True)
    (folder / "lib" / packages.parent.name / packages.name).symlink_to(packages)


def serve(listener_fd: int, ends_with: int) -> CodeType:
    """Fork a process for each client. Returns in such a process only, with what is to run in it."""
    atexit.register(_leave)  # the first is called last
    try:
        ended = os.pidfd_open(ends_with)
    except ProcessLookupError:
        os._exit(0)
    from gpumem_tui.importing import after_import
    from gpumem_tui.simulator.fast.uncompiled import exclude_nothing

    after_import("torch._compile", exclude_nothing)
    _import_all(_BEFOREHAND)
    listener = socket.socket(fileno=listener_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    further: dict[str, socket.socket] = {}
    waits_for: list[int | socket.socket] = [listener, ended]
    while ended not in select.select(waits_for, [], [])[0]:
        client, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(client, _LARGEST_MESSAGE, _MOST_FILES)
        name = _wanted(json.loads(message))
        if name in _FURTHER:
            if name not in further:
                further[name], requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    _close(listener, client, ended, *further.values(), *streams)
                    return _serve_further(requests, _FURTHER[name])
                requests.close()
            socket.send_fds(further[name], [message], [client.fileno(), *streams])
        elif os.fork() == 0:
            _close(listener, ended, *further.values())
            return _watched(message, client, streams)
        _close(client, *streams)
    os._exit(0)


def _serve_further(requests: socket.socket, names: Sequence[str]) -> CodeType:
    """Do this with more imported, for what the first server hands on, until that ends."""
    _import_all(names)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LARGEST_MESSAGE, _MOST_FILES)
        if not message:
            os._exit(0)
        client, streams = socket.socket(fileno=descriptors[0]), descriptors[1:]
        if os.fork() == 0:
            _close(requests)
            return _watched(message, client, streams)
        _close(client, *streams)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of each process copies every page


def _wanted(task: dict[str, Any]) -> str:
    words = task["arguments"]
    script = Path(task["directory"], next((word for word in words if word.endswith(".py")), ""))
    text = script.read_bytes() if script.is_file() else b""
    if _USES_TRANSFORMERS.search(" ".join(words).encode() + b" " + text) is not None:
        return TRANSFORMERS
    name: str = task["name"]
    return name


def _close(*opened: socket.socket | int) -> None:
    for one in opened:
        if isinstance(one, int):
            os.close(one)
        else:
            one.close()


def _watched(message: bytes, client: socket.socket, streams: Sequence[int]) -> CodeType:
    """Fork once more, and end what is forked with its client, or tell that how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        client.close()
        return _become(json.loads(message), streams)
    _close(*streams)
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([client.fileno(), ended], [], [])
    if ended not in ready:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(task: dict[str, Any], streams: Sequence[int]) -> CodeType:
    """Be what an interpreter is as its program begins. Returns the program."""
    os.setsid()
    os.chdir(task["directory"])
    multiprocessing.process.ORIGINAL_DIR = task["directory"]  # type: ignore[attr-defined]
    sys.executable = task["python"]  # what starts a script over several GPUs runs it by this
    multiprocessing.spawn.set_executable(task["python"])
    os.environ.clear()
    os.environ.update(task["environment"])
    highest = max(*task["descriptors"], *streams) + 1
    for number, fd in zip(task["descriptors"], [_moved(fd, highest) for fd in streams], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  as long as the process
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    ours = {str(Path(__file__).parents[2]), ""}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, path), *(entry for entry in sys.path if entry not in ours)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "sitecustomize")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Stash({name: sys.modules.pop(name) for name in _HIDDEN if name in sys.modules}))
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    arguments = task["arguments"][1:] if task["arguments"][0] == "-u" else task["arguments"]
    return _program(arguments)


def _moved(fd: int, lowest: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved


def _program(arguments: list[str]) -> CodeType:
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        module = f"import runpy; runpy._run_module_as_main({arguments[1]!r})"
        assert runpy is not None
        return compile(module, "<string>", "exec")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        return compile(arguments[1], "<string>", "exec")
    script = arguments[0]
    sys.argv = arguments
    if script == "-":
        sys.path.insert(0, "")
        return compile(sys.stdin.read(), "<stdin>", "exec")
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    main: Any = sys.modules["__main__"]
    main.__file__ = script
    for name in ("warm", "os", "sys"):
        vars(main).pop(name, None)
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec")


def ends(error: BaseException | None) -> None:
    """Take note of how the program ends; what it has left to do at its end comes before `_leave`."""
    if error is None:
        _codes.append(0)
    elif isinstance(error, SystemExit):
        _codes.append(error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None))
    elif not isinstance(error, KeyboardInterrupt):
        _codes.append(1)


_codes: list[int] = []


def _leave() -> None:
    """End without the interpreter's teardown: to take all these modules apart takes as long as many a script."""
    if _codes:
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(_codes[-1])


class _Stash:
    """Finds modules that have been imported and seem not to be: importing one gives that object back."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        module = self._modules.get(name)
        if module is None:
            return None
        locations = getattr(module, "__path__", None)
        spec = ModuleSpec(name, _Loader(module), origin=module.__file__, is_package=locations is not None)  # type: ignore[arg-type]
        if locations is not None:
            spec.submodule_search_locations = list(locations)
        return spec


class _Loader:
    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformers":
            importlib.import_module("torch")  # as it does where it was not imported beforehand
        module.__spec__ = self._spec
