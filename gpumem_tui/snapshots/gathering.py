"""Turns a snapshot's events and stacks into columns and numbers while its pickle is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumem_tui.snapshots.model import EventHistory, Stacks

_GET_SHORT = b"h"[0]


class Broken(Exception):
    """A file that is not a valid snapshot; one line says why."""


class Frames:
    """In the place of a list that turned out to be a stack of frames: its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Gathered:
    """The histories of a pickle by the list that stands for them in it, and its stacks."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._known: dict[bytes, Frames] = {}
        self._histories: dict[int, tuple[list[Any], EventHistory]] = {}

    def take_events(self, target: list[Any], events: list[Any]) -> None:
        """Put events into the columns of the list that they were to be appended to; they are empty afterwards.

        Raises:
            Broken: the list holds something else.
            TypeError, OverflowError: an event says something else than PyTorch would.
        """
        if id(target) not in self._histories:
            if target:
                raise Broken("events follow what are none")
            self._histories[id(target)] = target, EventHistory()
        history = self._histories[id(target)][1]
        for event in events:
            if type(event) is not dict or type(event.get("action")) is not str:
                raise Broken("what is no event follows one")
            action = event["action"]
            history.append(
                action,
                event.get("device_free", 0) if action == "oom" else event.get("addr", 0),
                event.get("size", 0),
                event.get("stream", 0),
                event.get("time_us", 0),
                self.stack_number(event.get("frames")),
                event.get("category", ""),
            )
            event.clear()  # what is remembered of it

    def history_of(self, trace: Any) -> Any:
        """The events that were read into a list; any other value as it is."""
        return self._histories[id(trace)][1] if id(trace) in self._histories else trace

    def stack_number(self, frames: Any) -> int:
        """The number of the stack that a value is."""
        if type(frames) is Frames:
            return frames.number
        numbers = self._frame_numbers(frames) if type(frames) is list else ()
        return self._stacks.add(numbers or ())

    def known_frames(self, references: bytes, memo: Sequence[Any]) -> Frames | None:
        """The stack that references (instructions that get a remembered value) name; None if they name something else.

        Raises:
            IndexError: one of them leads nowhere.
        """
        if references in self._known:
            return self._known[references]
        frames, at = [], 0
        while at < len(references):
            end = at + (2 if references[at] == _GET_SHORT else 5)
            frames.append(memo[int.from_bytes(references[at + 1 : end], "little")])
            at = end
        numbers = self._frame_numbers(frames)
        if numbers is None:
            return None
        found = self._known[references] = Frames(self._stacks.add(numbers))
        return found

    def _frame_numbers(self, frames: list[Any]) -> tuple[int, ...] | None:
        """The numbers of frames; None if there is something else among them."""
        found = []
        for frame in frames:
            if type(frame) is not dict or "filename" not in frame:
                return None
            found.append(self._stacks.frame(frame["filename"], frame.get("line"), frame.get("name")))
        return tuple(found)
