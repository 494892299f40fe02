"""Reads the pickle of a memory snapshot without executing anything: there are only containers, text and numbers here.

An unpickler of its own, for three reasons. There is no way to a class or a function in it, so there is nothing to
forbid. It takes the events of a trace into columns as they come, instead of a dictionary each, remembers of an event's
parts only the number of its stack, and returns each part of the file to the kernel once it is read: in all 1.4 times
the columns' bytes. And it has limits, so that a file of a few bytes cannot take the machine's memory. The format:
pickletools.py of CPython, protocols 2 to 5.
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from collections.abc import Callable, Mapping
from typing import ClassVar, NoReturn

from gpumem_tui.snapshots.model import EventHistory, SnapshotError, Stacks
from gpumem_tui.text import shortened


class Broken(Exception):
    """A file that is not a valid snapshot; one line gives the reason."""


class Frames:
    """In the place of a list that turned out to be a stack of frames: its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Gathered:
    """The histories of a pickle by the list that represents them in it, and its stacks."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._known: dict[bytes, Frames] = {}
        self._histories: dict[int, tuple[list[object], EventHistory]] = {}

    def take_events(self, target: list[object], events: list[object]) -> None:
        """Put events into the columns of the list that they were to be appended to; they are empty afterwards.

        Raises:
            Broken: the list holds something else.
            TypeError, OverflowError: an event holds something else than PyTorch would write.
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

    def history_of(self, trace: object) -> object:
        """Return the events that were read into a list; any other value as it is."""
        return self._histories[id(trace)][1] if id(trace) in self._histories else trace

    def stack_number(self, frames: object) -> int:
        """Return the number of the stack that a value is."""
        if type(frames) is Frames:
            return frames.number
        numbers = self._frame_numbers(frames) if type(frames) is list else ()
        return self._stacks.add(numbers or ())

    def known_frames(self, references: bytes, memo: Mapping[int, object]) -> Frames | None:
        """Find the stack that references (instructions that get a remembered value) name; None if it is none.

        Raises:
            KeyError: one of them leads nowhere.
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

    def _frame_numbers(self, frames: list[object]) -> tuple[int, ...] | None:
        """Return the numbers of frames; None if there is something else among them."""
        found = []
        for frame in frames:
            if type(frame) is not dict or "filename" not in frame:
                return None
            found.append(self._stacks.frame(frame["filename"], frame.get("line"), frame.get("name")))
        return tuple(found)


# The unpickler

Progress = Callable[[float], None]
"""Told how much of a file is read, from 0 to 1; what it raises ends the reading."""

_MOST_STACKED = 200_000
"""Values on the stack at once; a pickler puts lists and dictionaries together from batches of 1,000."""
_MOST_KEYS = 100_000
_MOST_CONTAINERS = 3_000_000
"""Lists, dictionaries and tuples that are kept. The events of a trace are none."""
_MEMO_GAP = 1024
_LONGEST_INSTRUCTION = 32
"""Bytes of a key with its number: what is wrong within so many of the end is that the rest is missing."""
_BYTES_A_MEMO = 4
"""A pickler memorizes no more often than this; it takes more bytes to write anything that is worth it."""
_SOME_MEMOS = 100_000

_FRAMES = re.compile(rb"\](?:\x94|q.|r.{4})\(((?:h.|j.{4})+)e", re.DOTALL)
"""A list of frames that were all named before: an empty list, memorized, then references to them. Equal bytes are equal
stacks, which makes most of a snapshot one look-up each."""

Data = bytes | mmap.mmap


_U1, _U2, _U4, _I4, _U8, _F8 = (struct.Struct(layout) for layout in ("<B", "<H", "<I", "<i", "<Q", ">d"))
_REPORT_BYTES = 1 << 20
_STOP, _GLOBAL, _STACK_GLOBAL, _MEMOIZE, _MARK_CODE, _LONG_SHORT = b"."[0], b"c"[0], 0x93, 0x94, b"("[0], 0x8A
_GET_SHORT, _GET_LONG, _INT_SHORT, _INT_TWO, _INT_FOUR, _EMPTY_LIST, _SET_ITEMS = b"hjKMJ]u"
_PAIR = b"\x86\x94"
"""The end of a tuple of two, memorized: an event's `pool_id` since torch 2.9."""

_Action = Callable[["SnapshotUnpickler"], object]


# Makers of instructions, by the layout of the number that follows


def _constant(value: object) -> _Action:
    return lambda self: self._push(value)


def _skip(count: int) -> _Action:
    return lambda self: self._take(count)


def _get(layout: struct.Struct) -> _Action:
    return lambda self: self._push(self._remembered(self._number(layout)))


def _put(layout: struct.Struct) -> _Action:
    return lambda self: self._remember(self._number(layout), self._stack[-1])


def _plain(layout: struct.Struct) -> _Action:
    return lambda self: self._push(self._number(layout))


def _sized(layout: struct.Struct, value_of: Callable[[bytes], object]) -> _Action:
    """Make what pushes the value of as many bytes as a number in that layout states."""
    return lambda self: self._push(value_of(self._take(self._number(layout))))


def _text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _int_of(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _bytes_of(data: bytes) -> bytes:
    return data


_IN_MEMO = -1
_SMALL = 1 << 8


def _number_of_pair(pair: tuple[object, ...]) -> int:
    """Return a number below -1 for two small numbers, such as an event's `pool_id`; 0 for anything else."""
    if len(pair) != 2:
        return 0
    one, other = pair
    if type(one) is type(other) is int and 0 <= one < _SMALL and 0 <= other < _SMALL:
        return -2 - one * _SMALL - other
    return 0


class SnapshotUnpickler:
    """A reader of one pickle.

    Args:
        data: all of it.
        stacks: where the stacks that it names are put.
    """

    def __init__(self, data: Data, stacks: Stacks, progress: Progress) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self._numbers = array("i")
        self._dictionaries: list[int] = []
        self._most_memos = _SOME_MEMOS + self._size // _BYTES_A_MEMO
        self._containers = 0
        self.gathered = Gathered(stacks)
        self._progress = progress
        self._reported = 0

    def load(self) -> object:
        """Read the value; a list of events is an `EventHistory` in it, and a stack of frames a number in `stacks`.

        Raises:
            SnapshotError: the file is broken or ends early, or it asks for a Python object.
        """
        data, codes = self._data, self._CODES
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    return self._finished(self._stack[-1])
                action = codes.get(code)
                if action is None:
                    raise Broken(f"it holds {code:#04x}, which is no instruction")
                action(self)
        except Broken as error:
            raise SnapshotError(f"is broken at byte {self._at:,}: {error}") from None
        except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
            if self._at >= self._size - _LONGEST_INSTRUCTION:
                raise SnapshotError(
                    f"ends in the middle, after {self._size:,} bytes: it was not written to its end; copy it again"
                ) from error
            raise SnapshotError(f"is broken at byte {self._at:,}") from error

    # Parts of instructions

    def _take(self, count: int) -> bytes:
        start = self._at
        if count < 0 or count > self._size - start:
            self._at = self._size
            raise IndexError
        self._at = start + count
        return self._data[start : self._at]

    def _number(self, layout: struct.Struct) -> int:
        number: int = layout.unpack(self._take(layout.size))[0]
        return number

    def _push(self, value: object) -> None:
        if len(self._stack) > _MOST_STACKED:
            raise Broken("its values are nested or listed beyond what a snapshot has")
        self._stack.append(value)

    def _count(self) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise Broken(f"it holds more than {_MOST_CONTAINERS:,} lists and dictionaries next to its events")

    def _since_mark(self) -> list[object]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _remember(self, index: int, value: object) -> None:
        """Memorize a value: what every event has one of as a number in a column, anything else in a dictionary."""
        numbers = self._numbers
        if index >= len(numbers):
            if index - len(numbers) >= _MEMO_GAP:
                raise Broken("it remembers values in no order")
            numbers.extend([_IN_MEMO] * (index + 1 - len(numbers)))
            if index >= self._most_memos:
                raise Broken("it remembers more values than it can hold")
        else:
            self._memo.pop(index, None)
        if type(value) is Frames:
            numbers[index] = value.number
        elif type(value) is tuple and (number := _number_of_pair(value)):
            numbers[index] = number
        else:
            numbers[index] = _IN_MEMO
            self._memo[index] = value
            if type(value) is dict:
                self._dictionaries.append(index)

    def _remembered(self, index: int) -> object:
        """Return a memorized value.

        Raises:
            KeyError, IndexError: no value has that number, or it was an event.
        """
        number = self._numbers[index]
        if number == _IN_MEMO:
            return self._memo[index]
        return Frames(number) if number >= 0 else divmod(-number - 2, _SMALL)

    def _forget(self, values: list[object]) -> None:
        """Drop events from what is memorized: they are in their columns."""
        events = set(map(id, values))
        for index in self._dictionaries:
            if id(self._memo.get(index)) in events:
                del self._memo[index]
        self._dictionaries = []

    # Instructions

    def _mark(self) -> None:
        if len(self._marks) > _MOST_STACKED:
            raise Broken("its values are nested beyond what a snapshot has")
        self._marks.append(len(self._stack))

    def _memorize(self) -> None:
        self._remember(len(self._numbers), self._stack[-1])

    def _dictionary(self) -> None:
        self._count()
        found: dict[object, object] = {}
        self._push(found)
        data, at = self._data, self._at
        if data[at] == _MEMOIZE and data[at + 1] == _MARK_CODE:
            self._dictionaries.append(len(self._numbers))
            self._memo[len(self._numbers)] = found
            self._numbers.append(_IN_MEMO)
            memorized, containers = len(self._numbers), self._containers
            if not self._plain_items(found, at + 2):
                found.clear()
                for index in range(memorized, len(self._numbers)):
                    self._memo.pop(index, None)
                del self._numbers[memorized:]
                self._containers = containers
                self._at = at + 2
                self._mark()

    def _plain_items(self, found: dict[object, object], at: int) -> bool:
        """Set the keys of an event, most of what a snapshot consists of, without a detour over the stack.

        Keys that were named before, and values that are numbers, named before, or stacks. True if that was all of the
        dictionary. Else nothing of it counts, and it is read the usual way from its first key: whether a number is the
        value of a key, or the first of a tuple, shows only in what follows it.
        """
        data, memo = self._data, self._memo
        while True:
            code = data[at]
            if code == _GET_LONG:
                key, value_at = memo[int.from_bytes(data[at + 1 : at + 5], "little")], at + 5
            elif code == _GET_SHORT:
                key, value_at = memo[data[at + 1]], at + 2
            else:
                break
            if type(key) is not str:
                break
            code, after = data[value_at], value_at + 1
            if code == _GET_LONG:
                at = after + 4
                index = int.from_bytes(data[after:at], "little")
                found[key] = memo[index] if index in memo else self._remembered(index)
            elif code == _INT_SHORT:
                if data[after + 1] == _INT_SHORT and data[after + 3 : after + 5] == _PAIR:
                    pair = data[after], data[after + 2]
                    found[key], at = pair, after + 5
                    self._remember(len(self._numbers), pair)
                else:
                    found[key], at = data[after], after + 1
            elif code == _LONG_SHORT and data[after] <= 8:
                at = after + 1 + data[after]
                found[key] = int.from_bytes(data[after + 1 : at], "little", signed=True)
            elif code == _INT_FOUR:
                at = after + 4
                found[key] = int.from_bytes(data[after:at], "little", signed=True)
            elif code == _GET_SHORT:
                index, at = data[after], after + 1
                found[key] = memo[index] if index in memo else self._remembered(index)
            elif code == _INT_TWO:
                at = after + 2
                found[key] = int.from_bytes(data[after:at], "little")
            elif code == _EMPTY_LIST:
                self._at = after
                self._list()
                value = self._stack.pop()
                if type(value) is not Frames:  # its items follow
                    break
                found[key] = value
                at = self._at
            else:
                break
        self._at = at + 1
        return data[at] == _SET_ITEMS

    def _tuple(self) -> None:
        self._count()
        self._push(tuple(self._since_mark()))

    def _tuple_of(self, count: int) -> None:
        self._count()
        values = self._stack[-count:]
        if len(values) != count:
            raise IndexError
        del self._stack[-count:]
        self._push(tuple(values))

    def _list(self) -> None:
        found = _FRAMES.match(self._data, self._at - 1)
        if found is not None and (frames := self.gathered.known_frames(found[1], self._memo)) is not None:
            self._push(frames)
            self._at = found.start(1) - 1
            if self._data[found.start() + 1] == _MEMOIZE:
                self._numbers.append(frames.number)
            else:
                self._remember(int.from_bytes(self._data[found.start() + 2 : self._at], "little"), frames)
            self._at = found.end()
            return
        self._count()
        self._push([])

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._since_mark())
        if self._at - self._reported > _REPORT_BYTES:
            self._progress(self._at / self._size)
            if isinstance(self._data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                start, end = (at // mmap.PAGESIZE * mmap.PAGESIZE for at in (self._reported, self._at))
                self._data.madvise(mmap.MADV_DONTNEED, start, end - start)
            self._reported = self._at

    def _extend(self, values: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise Broken("it appends to what is no list")
        if values and type(values[0]) is dict and "action" in values[0]:
            self.gathered.take_events(target, values)
            self._forget(values)
            self._containers -= len(values)
        else:
            target.extend(values)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set(self, pairs: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise Broken("it sets keys of what is no dictionary")
        for index in range(0, len(pairs), 2):
            key = pairs[index]
            if type(key) not in (str, int):
                raise Broken("a dictionary has keys that are neither text nor numbers")
            target[key] = pairs[index + 1]
        if len(target) > _MOST_KEYS:
            raise Broken("a dictionary has more keys than any in a snapshot")

    def _refuse(self) -> NoReturn:
        """Refuse what refers to a class or a function: it is neither looked up nor called."""
        code, stack = self._data[self._at - 1], self._stack
        name = "a Python object"
        if code == _GLOBAL:
            rest = bytes(self._data[self._at : self._at + 200]).split(b"\n")
            name = ".".join(part.decode("utf-8", "replace") for part in rest[:2])
        elif code == _STACK_GLOBAL and len(stack) > 1:
            name = ".".join(str(part)[:80] for part in stack[-2:] if isinstance(part, str))
        raise SnapshotError(
            f"asks for {shortened(name)}: a memory snapshot holds no such thing, and nothing of it was loaded"
        )

    def _finished(self, value: object) -> object:
        """Return the value with its events in place of the lists that they were read into."""
        self._progress(1.0)
        if type(value) is dict and type(traces := value.get("device_traces")) is list:
            value["device_traces"] = [self.gathered.history_of(trace) for trace in traces]
        return value

    _CODES: ClassVar[dict[int, _Action]] = {
        b"\x80"[0]: _skip(1),
        b"\x95"[0]: _skip(8),
        b"("[0]: _mark,
        b"h"[0]: _get(_U1),
        b"j"[0]: _get(_U4),
        b"q"[0]: _put(_U1),
        b"r"[0]: _put(_U4),
        b"\x94"[0]: _memorize,
        b"N"[0]: _constant(None),
        b"\x88"[0]: _constant(True),
        b"\x89"[0]: _constant(False),
        b"K"[0]: _plain(_U1),
        b"M"[0]: _plain(_U2),
        b"J"[0]: _plain(_I4),
        b"\x8a"[0]: _sized(_U1, _int_of),
        b"\x8b"[0]: _sized(_I4, _int_of),
        b"G"[0]: _plain(_F8),
        b"\x8c"[0]: _sized(_U1, _text_of),
        b"X"[0]: _sized(_U4, _text_of),
        b"\x8d"[0]: _sized(_U8, _text_of),
        b"C"[0]: _sized(_U1, _bytes_of),
        b"B"[0]: _sized(_U4, _bytes_of),
        b"\x8e"[0]: _sized(_U8, _bytes_of),
        b"}"[0]: _dictionary,
        b"]"[0]: _list,
        b")"[0]: _constant(()),
        b"t"[0]: _tuple,
        b"\x85"[0]: lambda self: self._tuple_of(1),
        b"\x86"[0]: lambda self: self._tuple_of(2),
        b"\x87"[0]: lambda self: self._tuple_of(3),
        b"a"[0]: _append,
        b"e"[0]: _appends,
        b"s"[0]: _set_item,
        b"u"[0]: lambda self: self._set(self._since_mark()),
        **dict.fromkeys(b"c\x93Rbio\x81\x92\x82\x83\x84PQ", _refuse),
    }
    """The function of each instruction."""
