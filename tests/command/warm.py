"""A Python that has torch imported: for each script that a test runs, a process is forked from it instead of started.

Importing torch takes longer than all else that most scripts do. What is started in its stead is `_CLIENT`, an
executable called ``python``: it hands its arguments, environment, directory and standard streams to the server, waits,
and ends as the forked process does. That one goes through what an interpreter does as it starts: `sitecustomize` is
imported, torch seems not to be, and importing it is what is waited for. Libraries that look for a GPU as they are
imported are not imported beforehand. What trains with transformers is forked from a second server, which has that too
and is forked from the first one when it is first wanted.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing.process
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-u")):
    os.execv({python!r}, [{python!r}, *arguments])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({server!r})
task = {{
    "python": os.path.abspath(sys.argv[0]), "arguments": arguments, "directory": os.getcwd(),
    "environment": dict(os.environ),
}}
socket.send_fds(server, [json.dumps(task).encode()], [0, 1, 2])
code = int(server.recv(64) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_MAIN = "import sys; sys.path.insert(0, {root!r}); from tests.command import warm; exec(warm.serve({fd}))"
"""The server's program: in a forked process the rest of it is the script."""

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
"""What scripts and libraries import sooner or later, and what does not look for a GPU."""

_OF_TRANSFORMERS = ("datasets", "transformers.models.llama.modeling_llama")
_USES_TRANSFORMERS = re.compile(rb"\b(transformers|hugging_face|trl|peft|accelerate)\b")
"""Tells it in the words of a command, or in its script."""

_HIDDEN = ("torch", "torch._compile", "transformers")
_LARGEST_MESSAGE = 1 << 20


@contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    """Make a Python in a folder, and serve whoever starts it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = str(folder / "server.sock")
    listener.bind(address)
    listener.listen(64)
    client = folder / "python"
    client.write_text(_CLIENT.format(python=sys.executable, server=address))
    client.chmod(0o755)
    root = str(Path(__file__).parents[2])
    server = subprocess.Popen(
        [sys.executable, "-c", _MAIN.format(root=root, fd=listener.fileno())],
        env={**os.environ, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""},
        pass_fds=(listener.fileno(),),
    )
    listener.close()
    try:
        yield str(client)
    finally:
        server.kill()
        server.wait()


def serve(listener_fd: int) -> CodeType:
    """Fork a process for each client. Returns in such a process only, with what is to run in it."""
    from gpumem_tui.importing import after_import
    from gpumem_tui.simulator.fast.uncompiled import exclude_nothing

    after_import("torch._compile", exclude_nothing)
    _import_all(_BEFOREHAND)
    listener = socket.socket(fileno=listener_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    second: socket.socket | None = None
    while True:
        client, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(client, _LARGEST_MESSAGE, 3)
        if _uses_transformers(json.loads(message)):
            if second is None:
                second, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    _close(listener, second, client, *streams)
                    return _serve_second(requests)
                requests.close()
            socket.send_fds(second, [message], [client.fileno(), *streams])
        elif os.fork() == 0:
            _close(listener, *([second] if second is not None else []))
            return _watched(message, client, streams)
        _close(client, *streams)


def _serve_second(requests: socket.socket) -> CodeType:
    """Do the same with transformers imported, for what the first server hands on, until that ends."""
    _import_all(_OF_TRANSFORMERS)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LARGEST_MESSAGE, 4)
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


def _uses_transformers(task: dict[str, Any]) -> bool:
    words = task["arguments"]
    script = Path(task["directory"], next((word for word in words if word.endswith(".py")), ""))
    text = script.read_bytes() if script.is_file() else b""
    return _USES_TRANSFORMERS.search(" ".join(words).encode() + b" " + text) is not None


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
    os.environ.clear()
    os.environ.update(task["environment"])
    for number, fd in enumerate(streams):
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
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    main: Any = sys.modules["__main__"]
    main.__file__ = script
    for name in ("warm", "sys"):
        vars(main).pop(name, None)
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec")


class _Stash:
    """Finds modules that have been imported and seem not to be: importing one gives back the same."""

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
