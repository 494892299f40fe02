"""Every error that a user can cause names the next thing to type, or the file and line to change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gpumem_tui

PACKAGE = Path(gpumem_tui.__file__).parent
USER_ERRORS = {
    "OptionError", "UsageError", "BadParameter", "ClickException", "CatalogError", "NoClosedFormError", "ShapeError",
    "PlanError", "SettingsError", "RecordingError", "NotCalibrated", "CannotRun",
    "CannotSignal", "complain", "NoTorchError", "WorkloadError", "Unusable",
}  # fmt: skip
_ACTS = re.compile(
    r"`[^`]+`|(?<![\w-])--[a-z]|did you mean"
    r"|\{[^}]*(?:remedy|list_living|elsewhere|instead|otherwise|by_hand|how_to|rewriting|suggestion|located|line)"
    r"|\b(?:add|ask|change|check|choose|close|compare|correct|delete|enlarge|fetch|fix|free|freeze|give|install|join"
    r"|leave|lower|make|name|open|pick|raise|reinstall|remove|return|run|see|set|start|take|train|try|turn|type|upgrade"
    r"|use|wait|write)\b",
    re.IGNORECASE,
)
_OPTION = re.compile(r"\A--[^:]*: ")
_PASSED_ON = re.compile(
    r"[^:]{0,60}(?:: |memory |\} )\{[^}.]*(?:error|reason|wrong|why|problem)[^}.]*\}|\{[^}]*\}|.{0,12}"
)
"""Another error's message, with the option or the place before it."""


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the literal text of a message, with a gap for each value in it; nothing for one that is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else ""
            for part in node.values
        )
    elif isinstance(node, ast.BinOp):
        yield "".join([*_texts(node.left), *_texts(node.right)])
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)


def _raised(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each error for users that a file makes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_notice = isinstance(last := node.args[-1], ast.Constant) and last.value == 0
            if name in USER_ERRORS and not is_notice:
                yield from (
                    (node.lineno, text)
                    for text in [" ".join(text for arg in node.args for text in _texts(arg))]
                    if text
                )


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if any(name in path.read_text() for name in USER_ERRORS)]


def test_every_error_of_a_user_names_the_next_step() -> None:
    lacking = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in FILES
        for line, text in _raised(path)
        if not _PASSED_ON.fullmatch(text) and not _ACTS.search(_OPTION.sub("", text))
    ]
    assert not lacking, "\n".join(lacking)
