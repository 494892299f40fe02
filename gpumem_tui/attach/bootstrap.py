"""What runs first inside a process that is being attached to: finds the probe and starts it, and says how it went.

Its source text is sent over and executed there, in a namespace of its own, so it may use nothing but the standard
library of Python 3.9 and must leave nothing behind.
"""

from __future__ import annotations


def attach(path: str, archive: str, answer: str) -> None:
    """Start the probe; nothing that goes wrong reaches the process.

    Args:
        path: folder that holds the package, in the process's own file system; or the archive's place, if there is one.
        archive: the package as a zip file, in base64, where its files cannot be seen from here; else empty.
        answer: the file to say in how it went, in the private folder where the probe publishes.
    """
    import json
    import os
    import sys

    problem = ""
    try:
        _make_private(os.path.dirname(answer))
        if archive:
            _unpack(path, archive)
        problem = _start(path)
    except Exception as error:  # noqa: BLE001  told to whoever attaches; training goes on
        problem = f"{type(error).__name__}: {error}"
    try:
        descriptor = os.open(answer, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"schema": 1, "problem": problem, "has_torch": "torch" in sys.modules}, file)
    except OSError:
        return  # whoever attaches waits in vain and says so


def _start(path: str) -> str:
    """Load the package from there, without changing the program's import path, and start the probe; or say why not."""
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    if "gpumem_tui" not in sys.modules:
        spec = PathFinder.find_spec("gpumem_tui", [path])
        if spec is None or spec.loader is None:
            raise ImportError(f"the probe is not in {path}")
        sys.modules["gpumem_tui"] = package = module_from_spec(spec)
        spec.loader.exec_module(package)
    from gpumem_tui.probe.entry import attach

    return attach("attach")


def _make_private(folder: str) -> None:
    """Make the folder where the probe publishes, or see that nobody else made it."""
    import os

    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if found.st_uid != os.getuid() or found.st_mode & 0o170077 != 0o040000:
            raise PermissionError(f"{folder} is not a private folder of this user") from None


def _unpack(path: str, archive: str) -> None:
    import base64
    import os

    temporary = f"{path}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(base64.b64decode(archive))
    os.rename(temporary, path)
