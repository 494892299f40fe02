"""Replaces what the simulated GPU replaces in torch, and nothing that the register lacks.

The register, `gpumem_tui/torch_internals.json`, has every private name of torch that the product uses: what is replaced
or only read, and by whom, why, and on which versions that was checked. For a torch newer than these versions
`profile.newer_than_checked` gives the line that every result carries; of one that lacks what is to be replaced
`MissingInTorch` is raised. Standard library only: part of it is used before torch is imported.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Replaced:
    """Attributes of torch that are replaced together.

    Attributes:
        by: the rooms that have the bodies.
        why: what would be wrong without.
        names: qualified; a star represents any.
        checked_on: versions of torch.
    """

    by: tuple[str, ...]
    why: str
    names: tuple[str, ...]
    checked_on: tuple[str, ...]


def _register() -> tuple[Replaced, ...]:
    text = (Path(__file__).parents[1] / "torch_internals.json").read_text(encoding="utf-8")
    register = json.loads(text)
    with_versions = ({"checked_on": register["checked_on"], **entry} for entry in register["replaced"])
    return tuple(Replaced(**{name: _fixed(value) for name, value in entry.items()}) for entry in with_versions)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


REGISTER = _register()
ANSWERS = (
    "torch.cuda.*", "torch.accelerator.*", "torch.version.*", "torch.backends.*", "torch._C._cuda_*",
    "torch._C._get_accelerator",
)  # fmt: skip
"""Names that stay replaced while torch's compiler works: answers about the GPU, which it asks for as well."""


class MissingInTorch(RuntimeError):
    """This version of torch lacks what the simulated GPU replaces; one line."""


_ABSENT = object()
_replaced: list[tuple[Any, str, Any]] = []
"""The present replacements: owner, name and former value, the first replaced first."""


class Replacements(ExitStack):
    """Attributes of torch that are others within the context."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add one that is missing."""
        _entry_of(owner, name)
        before = (owner, name, vars(owner).get(name, _ABSENT))
        _replaced.append(before)
        self.callback(_put_back, before)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function by one that gets it as its first argument."""
        before = original(owner, name)

        @functools.wraps(before)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(before, *args, **kwargs)

        self.set(owner, name, wrapped)


def _put_back(before: tuple[Any, str, Any]) -> None:
    position = next(place for place, one in enumerate(_replaced) if one is before)
    del _replaced[position]
    _put(*before)


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


@contextmanager
def without_replacements(names: tuple[str, ...], kept: tuple[str, ...] = ()) -> Iterator[None]:
    """Have torch be within the context as it was before `Replacements`.

    Args:
        names: qualified names; a star represents any.
        kept: names that stay replaced anyway.
    """
    found = [one for one in _replaced if _is_named(qualified(*one[:2]), names, kept)]
    now = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in found]
    for before in reversed(found):
        _put(*before)
    try:
        yield
    finally:
        for one in now:
            _put(*one)


@functools.cache
def _is_named(name: str, names: tuple[str, ...], kept: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, one) for one in names) and not any(fnmatchcase(name, one) for one in kept)


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute, or add one that is missing, for as long as the process lives."""
    _entry_of(owner, name)
    setattr(owner, name, value)


def is_replaced(value: Any) -> bool:
    """Return whether something of torch's is what `Replacements` has put another in the place of."""
    return any(value is before for _, _, before in _replaced)


def extend(owner: Any, name: str, value: Any) -> None:
    """Add to a list, which others may have bound, for as long as the process lives."""
    original(owner, name).append(value)


def replace_everywhere(owner: ModuleType, name: str, value: Any) -> None:
    """Replace a module's function wherever torch's own modules have bound it by now."""
    before = original(owner, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("torch.")]:
        if vars(module).get(name) is before:
            setattr(module, name, value)


def original(owner: Any, name: str) -> Any:
    """Return what is to be replaced.

    Raises:
        MissingInTorch: there is no such thing.
    """
    entry = _entry_of(owner, name)
    try:
        return getattr(owner, name)
    except AttributeError:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        raise MissingInTorch(
            f"torch {version} has no {qualified(owner, name)}, which the simulated GPU replaces as it is in torch "
            f"{', '.join(entry.checked_on)}: train under that version, or search on a real GPU"
        ) from None


def qualified(owner: Any, name: str) -> str:
    """Return an attribute's name in the register."""
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return f"{owner.__name__}.{name}"


@functools.cache
def entry_of(name: str) -> Replaced | None:
    """Return the entry that a qualified name is in; None for none."""
    return next((entry for entry in REGISTER if any(fnmatchcase(name, one) for one in entry.names)), None)


def is_checked(name: str) -> bool:
    """Return whether what a qualified name represents was checked on the version of torch that is loaded."""
    entry = entry_of(name)
    return entry is not None and ".".join(sys.modules["torch"].__version__.split(".")[:2]) in entry.checked_on


def _entry_of(owner: Any, name: str) -> Replaced:
    found = entry_of(qualified(owner, name))
    if found is None:
        raise LookupError(f"{qualified(owner, name)} is replaced without an entry in gpumem_tui/torch_internals.json")
    return found
