"""Runs first inside a process that is being attached to: finds the probe, starts it and reports the outcome.

Its source text is sent over and executed there, in a namespace of its own, so it may use nothing but the standard
library of Python 3.9 and must leave nothing behind.
"""

from __future__ import annotations

WATCHING = "watching"
"""The probe watches from the next step on, or once the process has imported torch."""
ALREADY = "already watched"
IMPORTING_TORCH = "importing torch"
"""Torch is just being imported; another answer follows when that is done."""
LOADS_DATA = "loads data"
"""The process is a worker of a DataLoader, and the probe was not started."""


def attach(path: str, archive: str, answer: str) -> None:
    """Start the probe; nothing that goes wrong reaches the process.

    Args:
        path: folder that holds the package, in the process's own file system; or the archive's place, if there is one.
        archive: the package as a zip file, in base64, where its files cannot be seen from here; else empty.
        answer: the file to say in how it went, in the private folder where the probe publishes: JSON with one of the
            states above, why the probe could not be started (`problem`), and whether there is torch (`has_torch`).
    """
    import os
    import sys

    folder, name = os.path.split(answer)
    torch = sys.modules.get("torch")
    importing = getattr(getattr(torch, "__spec__", None), "_initializing", False)

    def say(state: str, problem: str = "") -> None:
        _say(folder, name, {"state": state, "problem": problem, "has_torch": torch is not None})

    try:
        try:  # the folder where the probe publishes, which this user made if it is there
            os.makedirs(folder, 0o700)
        except FileExistsError:
            os.close(_opened(folder))
        if getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None) is not None:
            say(LOADS_DATA)
            return
        if archive:
            _write(folder, os.path.basename(path), _decoded(archive))
        before, problem = _start(path)
        if importing and not problem:
            from gpumem_tui.importing import after_import
            from gpumem_tui.probe import entry

            say(IMPORTING_TORCH)
            after_import("torch", lambda _: say(WATCHING, entry.attach("attach")))
        else:
            say(ALREADY if before else WATCHING, problem)
    except Exception as error:  # noqa: BLE001  reported to whoever attaches; training continues
        say("", f"{type(error).__name__}: {error}")


def _start(path: str) -> tuple[bool, str]:
    """Load the package from there, without changing the program's import path, and start the probe.

    Returns:
        Whether it was there before, and why this process cannot be watched, empty if it can.
    """
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    if "gpumem_tui" not in sys.modules:
        spec = PathFinder.find_spec("gpumem_tui", [path])
        if spec is None or spec.loader is None:
            raise ImportError(f"the probe is not in {path}")
        sys.modules["gpumem_tui"] = package = module_from_spec(spec)
        spec.loader.exec_module(package)
    from gpumem_tui.probe import entry

    return entry.is_attached(), entry.attach("attach")


def _opened(folder: str) -> int:
    """Open that folder, which must be no link and this user's alone; return its descriptor."""
    import os

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{folder} is not a private folder of this user")
    return descriptor


def _say(folder: str, name: str, content: dict[str, object]) -> None:
    import json

    try:
        _write(folder, name, json.dumps(content).encode())
    except Exception:  # noqa: BLE001  whoever attaches gets no answer, and reports that
        return


def _write(folder: str, name: str, content: bytes) -> None:
    """Make a file there, or replace it, as a whole."""
    import os

    directory = _opened(folder)
    try:
        temporary = f".{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(content)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(directory)


def _decoded(archive: str) -> bytes:
    import base64

    return base64.b64decode(archive)
