"""Options of a Python in a command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?|pypy\d*")
_TAKES_VALUE = "WX"
_IGNORES_SITE = {"I": "isolated mode", "E": "PYTHONPATH is ignored", "S": "no site module"}


def bypass(command: Sequence[str]) -> str:
    """The option of a Python in the command that makes it ignore PYTHONPATH or sitecustomize, with the reason.

    Empty if there is none.
    """
    words = iter(command)
    if not any(_PYTHON.fullmatch(os.path.basename(word)) for word in words):
        return ""
    for word in words:  # what follows the interpreter's name
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return ""
        for letter in word[1:]:
            if letter in _IGNORES_SITE:
                return f"`python -{letter}` ({_IGNORES_SITE[letter]})"
            if letter in "cm":
                return ""
            if letter in _TAKES_VALUE:
                if word.endswith(letter):
                    next(words, None)
                break
    return ""
