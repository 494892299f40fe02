"""The fork server: a Python that imports torch once, and forks a fresh child for each request.

Run as a script by path, possibly by a Python that has never heard of the package: it makes this copy of gpumem_tui
importable there, and nothing else of the installation that it lies in. Standard library and torch only. It speaks with
`interpreters.ForkServer` over a socket of messages: a `Task` as JSON with the child's three descriptors comes in;
``pid N`` and, when the child has ended, ``exit CODE`` go out.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # any interpreter may be given with --python, and is to say that it is too old
    from typing import NoReturn, TypedDict

    class Task(TypedDict):
        """What one child has otherwise than this process: its directory, and variables; None removes one."""

        directory: str
        environment: dict[str, str | None]


DESCRIPTORS = 3
"""Of a child: its commands, its events, its lifeline."""

LARGEST_MESSAGE = 1 << 16
_USED_BY_EVERY_STEP = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "gpumem_tui.simulator.cuda.presented",
    "gpumem_tui.simulator.fast.tracing",
    "gpumem_tui.run.cuda_recorder",
    "gpumem_tui.step.run",
    "gpumem_tui.workload.standard",
    "gpumem_tui.workload.user_file",
)
"""What the step of a simulated GPU imports sooner or later."""


def serve(control_fd: int, *, simulated: bool) -> NoReturn:
    """Fork a child for every message, one after the other, until the other side closes the socket.

    Args:
        control_fd: a socket of type SEQPACKET.
        simulated: whether the requests are for simulated GPUs; decides what is imported.
    """
    with suppress(Exception):  # the child imports again, and reports what is wrong
        _import_torch(simulated)
    gc.collect()
    gc.freeze()  # else each child's first collection copies every page
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, DESCRIPTORS)
        if not message:
            os._exit(0)
        child = _fork(control, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, f"pid {child}")
        _, status = os.waitpid(child, 0)
        _send(control, f"exit {os.waitstatus_to_exitcode(status)}")


def _import_torch(simulated: bool) -> None:
    """Import what every request needs; nothing that depends on the request, and nothing that starts CUDA."""
    if not simulated:
        import torch

        return
    from gpumem_tui.importing import after_import
    from gpumem_tui.simulator.fast.uncompiled import exclude_nothing, leave_compiler_unloaded

    after_import("torch._compile", exclude_nothing)
    import torch

    leave_compiler_unloaded(torch)
    for name in _USED_BY_EVERY_STEP:
        import_module(name)
    from gpumem_tui.simulator.device.gpu import register

    register()


def _fork(control: socket.socket, task: Task, descriptors: list[int]) -> int:
    """Start a child. Returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of torch's libraries know of forks
        child = os.fork()
    if child == 0:
        control.close()
        _become_child(task, descriptors)
    return child


def _become_child(task: Task, descriptors: list[int]) -> NoReturn:
    """Do one request in a session of its own."""
    os.setsid()
    os.chdir(task["directory"])
    for name, value in task["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    commands, events, lifeline = descriptors
    os.dup2(commands, 0)
    os.close(commands)
    from gpumem_tui.run.main import main

    main(events, lifeline)


def _send(control: socket.socket, word: str) -> None:
    try:
        control.send(word.encode())
    except OSError:
        sys.exit(0)  # whoever asked is gone; the child's lifeline ends it


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
    if sys.version_info < (3, 10):  # noqa: UP036  any interpreter may be given with --python
        sys.exit(f"Python {sys.version.split()[0]} is too old to train under: 3.10 or newer is needed")
    sys.path[0] = os.getcwd()
    _import_package()
    if sys.argv[2] == "commands":
        from gpumem_tui.run.command_server import serve_commands

        serve_commands(socket.socket(fileno=int(sys.argv[1])))
    else:
        serve(int(sys.argv[1]), simulated=sys.argv[2] == "simulated")
