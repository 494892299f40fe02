"""A user's own workload: a Python file with `build`, `make_batch` and `train_step`."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gpumem_tui.step.workload import Workload, WorkloadError
from gpumem_tui.workload.errors import TWO_DEVICES, located, typed

_SIGNATURES = {
    "build": "build(device)",
    "make_batch": "make_batch(batch_size, device)",
    "train_step": "train_step(model, optimizer, batch)",
}
_loads = itertools.count()


def load_workload_file(file: Path, name: str = "") -> Workload:
    """Load the workload of ``FILE.py``, or of the attribute `name` in it.

    `name` may be an instance, a class (instantiated without arguments) or a module that has the three functions. The
    file is run, with its folder first on ``sys.path``, so it can import its neighbours now and while it trains.

    Raises:
        WorkloadError: the file cannot be run or lacks one of the functions.
    """
    source = str(file)
    if not file.is_file():
        raise WorkloadError(f"--workload {source}: there is no such file; check the path")
    if file.suffix != ".py":
        raise WorkloadError(f"--workload {source}: not a Python file; give a .py file, or FILE.py:NAME")
    owner = _owner(_import(file), source, name)
    for function, signature in _SIGNATURES.items():
        if not callable(getattr(owner, function, None)):
            where = f"{source}: {name}" if name else source
            raise WorkloadError(f"--workload {where} has no {function}; define {signature}")
    return _FileWorkload(name or file.stem, source, owner)


def _import(file: Path) -> ModuleType:
    module_name = f"gpumem_tui_workload_{next(_loads)}"
    spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    if spec is None or spec.loader is None:
        raise WorkloadError(f"--workload {file}: Python cannot load it; give a .py file")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[module_name] = module  # dataclasses and pickling look a class's module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        sys.path.remove(folder)
        raise WorkloadError(f"--workload {_describe(error, file)}") from error
    return module


def _describe(error: BaseException, file: Path) -> str:
    """Return what went wrong while `file` was imported, where, and what to do about it, in one line."""
    if isinstance(error, SyntaxError):
        elsewhere = error.filename is not None and error.filename != str(file.resolve())
        at = _at(error.filename if elsewhere else file, error.lineno)
        return f"{at}: syntax error: {error.msg}; fix it"
    where = _at(file, _line(error, file))
    if isinstance(error, SystemExit):
        return f'{where}: exits while being imported; move its script part under if __name__ == "__main__":'
    if isinstance(error, ModuleNotFoundError):
        return f"{where}: {typed(error)}; install it for {sys.executable}"
    return f"{where}: {typed(error)}; fix it"


def _at(file: Path | str | None, line: int | None) -> str:
    return f"{file}:{line}" if line is not None else str(file)


def _line(error: BaseException, file: Path) -> int | None:
    """Return the line of `file` that was running when the error was raised, however deep below it; None if none was."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file.resolve())
    ]
    return lines[-1] if lines else None


def _owner(module: ModuleType, source: str, name: str) -> Any:
    """Return what has the three functions: the module, or its attribute `name`, instantiated if it is a class."""
    if not name:
        return module
    if not hasattr(module, name):
        raise WorkloadError(f"--workload {source}: defines no {name}; name a class or object of that file")
    attribute: Any = getattr(module, name)
    if not isinstance(attribute, type):
        return attribute
    try:
        return attribute()
    except Exception as error:
        raise WorkloadError(
            f"--workload {source}: {name}() raised {typed(error)}; make it work without arguments"
        ) from error


@contextmanager
def _explained() -> Iterator[None]:
    """Have an exit within the file's functions be an error, and say what to do where devices are mixed."""
    try:
        yield
    except SystemExit as error:
        raise WorkloadError(f"the step ends the program: {located(error)}") from error
    except RuntimeError as error:
        if TWO_DEVICES not in str(error):
            raise
        raise WorkloadError(f"the step fails: {located(error)}") from error


@dataclass(frozen=True)
class _FileWorkload:
    """The user's functions, with what `build` returns checked."""

    name: str
    source: str
    owner: Any

    def build(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        with _explained():
            built: object = self.owner.build(device)
        if not isinstance(built, tuple) or len(built) != 2:
            raise self._bad_build(f"returned {_kind(built)}")
        model, optimizer = built
        if not isinstance(model, nn.Module):
            raise self._bad_build(f"returned {_kind(model)} as the model")
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise self._bad_build(f"returned {_kind(optimizer)} as the optimizer")
        return model, optimizer

    def make_batch(self, batch_size: int, device: torch.device) -> object:
        with _explained():
            return self.owner.make_batch(batch_size, device)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: object) -> None:
        with _explained():
            self.owner.train_step(model, optimizer, batch)

    def _bad_build(self, what: str) -> WorkloadError:
        code = getattr(self.owner.build, "__code__", None)
        where = f"{self.source}:{code.co_firstlineno}" if code is not None else self.source
        return WorkloadError(
            f"--workload {where}: build {what}; return (model, optimizer): a torch.nn.Module and a "
            "torch.optim.Optimizer or None"
        )


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"an object of type {type(value).__qualname__}"
