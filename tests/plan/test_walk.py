"""The way of a key on the Plan screen to its number goes from module to module, and seldom back to one it left."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import nudged, opened

MOST_RETURNS = 8
_VOCABULARY = ("gpumem_tui.catalog.", "gpumem_tui.memory", "gpumem_tui.text", "gpumem_tui.errors")
"""Modules of data, which every module reads."""


def walked(do: Callable[[], object]) -> list[tuple[str, str]]:
    """Every function that `do` enters for the first time, with its module; what reads like a value, or is
    an entry of a table, is left out."""
    values = {
        function.__code__
        for name, module in list(sys.modules.items())
        if name.startswith("gpumem_tui.")
        for kind in vars(module).values()
        if isinstance(kind, type)
        for one in vars(kind).values()
        for function in [getattr(one, "fget", None) or getattr(one, "func", None)]
        if function is not None and hasattr(function, "__code__")
    }
    seen: set[CodeType] = set()
    found = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event != "call" or not module.startswith("gpumem_tui.") or module.startswith(_VOCABULARY):
            return
        is_entry = code in values or code.co_flags & inspect.CO_NESTED or code.co_name.startswith(("__", "<"))
        if code not in seen and not is_entry:
            found.append((module, code.co_name))
        seen.add(code)

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return found


def stays(functions: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """The modules one after the other, each with what is entered there before the next."""
    found: list[tuple[str, list[str]]] = []
    for module, name in functions:
        if not found or found[-1][0] != module:
            found.append((module, []))
        found[-1][1].append(name)
    return found


def test_the_walk_of_a_key_to_its_number_seldom_returns() -> None:
    state = opened(Plan(find_model("gpt2-xl"), Recipe("amp-bf16"), find_gpu("h100-80gb"), 4))
    for name, module in list(sys.modules.items()):
        if name.startswith("gpumem_tui.formula."):
            for one in vars(module).values():
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()

    def press() -> object:
        return answer(nudged(state, "seq_len", -1).plan)

    found = stays(walked(press))
    returns = len(found) - len({module for module, _ in found})
    assert returns <= MOST_RETURNS, "\n".join(f"{module}: {', '.join(names)}" for module, names in found)
