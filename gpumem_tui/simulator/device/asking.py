"""Why a program asks for a value: whether to continue, which way, or how large something is; read from its own code."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType

from gpumem_tui.step.sites import callers, is_own

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")
_LEAVING = {*dis.hasjrel, *dis.hasjabs, *(dis.opmap.get(name) for name in _ENDS)}
"""The instructions after which code continues elsewhere."""


def is_checked() -> bool:
    """Return whether the program checks values: whether a function whose name sounds like a check asks for them."""
    return any(word in frame.f_code.co_name for frame in callers(sys._getframe(1)) for word in ("valid", "check"))


def passes_on() -> bool | None:
    """Return the truth value by which the code that is asking for one does not raise; None where it would not anyway.

    Asked by a conditional jump, of which one way raises without any other jump: ``assert x.max() > 0``,
    ``if (x < 0).any(): raise``, and `torch._assert`.
    """
    for frame in callers(sys._getframe(1)):
        truth = _truth_that_passes(frame.f_code, frame.f_lasti)
        if truth is not None or is_own(frame.f_code.co_filename):
            return truth
    return None


def decides() -> bool:
    """Return whether the code that is asking for a value compares it at once, to go one way or another."""
    for frame in callers(sys._getframe(1)):
        if is_own(frame.f_code.co_filename):
            return _is_compared(frame.f_code, frame.f_lasti)
    return False


@lru_cache(None)
def _is_compared(code: CodeType, at: int) -> bool:
    """Return whether a conditional jump follows an instruction, with nothing but constants and a comparison between."""
    following = [one.opname for one in dis.get_instructions(code) if one.offset > at]
    first = next(
        (name for name in following if not name.startswith(("LOAD_", "COMPARE_OP", "UNARY_NOT", "TO_BOOL"))), ""
    )
    return "IF_TRUE" in first or "IF_FALSE" in first


@lru_cache(None)
def _truth_that_passes(code: CodeType, at: int) -> bool | None:
    following = [one for one in dis.get_instructions(code) if one.offset >= at]
    test = following[1 if following[0].opname == "TO_BOOL" else 0]
    if not test.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_when = test.opname.endswith("IF_TRUE")
    ways = {not jumps_when: test.offset + 2, jumps_when: test.argval}
    raising = [truth for truth, start in ways.items() if _only_raises(following, start)]
    return not raising[0] if len(raising) == 1 else None


def _only_raises(instructions: Sequence[dis.Instruction], start: int) -> bool:
    """Return whether the code from an offset on comes to a ``raise`` before it jumps or returns."""
    end = next((one for one in instructions if one.offset >= start and one.opcode in _LEAVING), None)
    return end is not None and end.opname == "RAISE_VARARGS"
