"""Errors that a user causes, separate from faults of the program."""

from __future__ import annotations


class OptionError(Exception):
    """An invalid option: one line that names it, says what is wrong with it and how to fix it."""


def named(error: BaseException) -> str:
    """The name of an error's type; of one that only fake tensors raise, of the type that a real GPU's would have."""
    kind = type(error)
    while kind.__module__.startswith("torch._subclasses"):
        kind = kind.__base__  # type: ignore[assignment]
    return kind.__name__


def in_one_line(error: BaseException) -> str:
    """An error's own words without their line breaks, and with CUDA's name where the simulated GPU stands for it."""
    return " ".join(str(error).split()).replace("simgpu:0", "cuda:0")
