"""Acts on the machine, such as ending a process, and the one place that refuses them in a read-only program."""

from __future__ import annotations

from enum import Enum

from textual.dom import DOMNode

from gpumem_tui.tui.kit.textual_internals import KeysInOrder, Result


class Act(Enum):
    """Something that changes the machine or a process on it; the value says that it is not done."""

    END = "no process is ended"
    ATTACH = "no probe is put into a process"
    LOOK = "no process is asked to record a step"
    SEARCH = "no search is started"
    WRITE = "no file is written or deleted"


TO_PROCESSES = frozenset({Act.END, Act.ATTACH, Act.LOOK})
"""What is done to processes that others may have started."""
EVERY_ACT = frozenset(Act)


class ActingApp(KeysInOrder[Result]):
    """An app whose screens ask, right before they act, whether they may.

    Attributes:
        forbidden: what it does not do.
    """

    forbidden: frozenset[Act] = frozenset()


def permitted(node: DOMNode, act: Act) -> bool:
    """Whether the program of a screen or widget does this: for the keys that are offered."""
    app = node.app
    return not isinstance(app, ActingApp) or act not in app.forbidden


def refused(node: DOMNode, act: Act) -> bool:
    """Called right before acting: True, after a notice to the user, if the program does not do this."""
    if permitted(node, act):
        return False
    node.app.notify(refusal(act), severity="warning")
    return True


def refusal(act: Act) -> str:
    """The notice to the user."""
    return f"read-only: {act.value}"
