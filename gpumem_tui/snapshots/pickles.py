"""Reads the pickle of a memory snapshot without executing anything: there are only containers, text and numbers here.

An unpickler of its own, for three reasons. There is no way to a class or a function in it, so there is nothing to
forbid. It takes the events of a trace into columns as they come, instead of a dictionary each, so that memory stays a
fraction of what Python's unpickler needs. And it has limits, so that a file of a few bytes cannot take the machine's
memory. The format: pickletools.py of CPython, protocols 2 to 5.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from gpumem_tui.snapshots.gathering import Broken, Frames, Gathered
from gpumem_tui.snapshots.model import SnapshotError, Stacks
from gpumem_tui.text import shortened

Progress = Callable[[float], None]
"""Told how much of a file is read, from 0 to 1; what it raises ends the reading."""

_MARK = object()
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


class SnapshotUnpickler:
    """Reads one pickle.

    Args:
        data: all of it.
        stacks: where the stacks that it names are put.
    """

    def __init__(self, data: Data, stacks: Stacks, progress: Progress) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._most_memos = _SOME_MEMOS + self._size // _BYTES_A_MEMO
        self._containers = 0
        self.gathered = Gathered(stacks)
        self._progress = progress
        self._reported = 0

    def load(self) -> Any:
        """The value; a list of events is a `History` in it, and a stack of frames a number in `stacks`.

        Raises:
            SnapshotError: the file is broken or ends early, or it asks for a Python object.
        """
        data, codes = self._data, _CODES
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    return self._finished(self._stack[-1])
                action = codes[code]
                if action is None:
                    raise Broken(f"it holds {code:#04x}, which is no instruction")
                action(self)
        except Broken as error:
            raise SnapshotError(f"is broken at byte {self._at:,}: {error}") from None
        except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
            if self._at >= self._size - _LONGEST_INSTRUCTION:
                raise SnapshotError(
                    f"ends in the middle, after {self._size:,} bytes: it was not written to its end"
                ) from error
            raise SnapshotError(f"is broken at byte {self._at:,}") from error

    # What instructions are made of

    def _take(self, count: int) -> bytes:
        start = self._at
        if count < 0 or count > self._size - start:
            self._at = self._size
            raise IndexError
        self._at = start + count
        return self._data[start : self._at]

    def _number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self._take(layout.size))[0]

    def _push(self, value: Any) -> None:
        if len(self._stack) > _MOST_STACKED:
            raise Broken("its values are nested or listed beyond what a snapshot has")
        self._stack.append(value)

    def _count(self) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise Broken(f"it holds more than {_MOST_CONTAINERS:,} lists and dictionaries beside its events")

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _remember(self, index: int) -> None:
        value, memo = self._stack[-1], self._memo
        if index == len(memo):
            memo.append(value)
        elif index < len(memo):
            memo[index] = value
        elif index - len(memo) < _MEMO_GAP:
            memo.extend([None] * (index - len(memo)))
            memo.append(value)
        else:
            raise Broken("it remembers values in no order")
        if len(memo) > self._most_memos:
            raise Broken("it remembers more values than it can hold")

    # Instructions

    def _nothing(self) -> None:
        """A part begins here (protocol 2 and 4)."""

    def _protocol(self) -> None:
        self._take(1)

    def _frame(self) -> None:
        self._take(8)

    def _mark(self) -> None:
        if len(self._marks) > _MOST_STACKED:
            raise Broken("its values are nested beyond what a snapshot has")
        self._marks.append(len(self._stack))

    def _get_short(self) -> None:
        self._push(self._memo[self._take(1)[0]])

    def _get_long(self) -> None:
        self._push(self._memo[self._number(_U4)])

    def _put_short(self) -> None:
        self._remember(self._take(1)[0])

    def _put_long(self) -> None:
        self._remember(self._number(_U4))

    def _memorize(self) -> None:
        self._remember(len(self._memo))

    def _int_short(self) -> None:
        self._push(self._take(1)[0])

    def _int_two(self) -> None:
        self._push(self._number(_U2))

    def _int_four(self) -> None:
        self._push(self._number(_I4))

    def _long_short(self) -> None:
        self._push(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def _float(self) -> None:
        self._push(self._number(_F8))

    def _text_short(self) -> None:
        self._push(self._take(self._take(1)[0]).decode("utf-8", "surrogatepass"))

    def _text_long(self) -> None:
        self._push(self._take(self._number(_U4)).decode("utf-8", "surrogatepass"))

    def _text_longest(self) -> None:
        self._push(self._take(self._number(_U8)).decode("utf-8", "surrogatepass"))

    def _bytes_short(self) -> None:
        self._push(self._take(self._take(1)[0]))

    def _bytes_long(self) -> None:
        self._push(self._take(self._number(_U4)))

    def _bytes_longest(self) -> None:
        self._push(self._take(self._number(_U8)))

    def _dictionary(self) -> None:
        self._count()
        found: dict[Any, Any] = {}
        self._push(found)
        data, at = self._data, self._at
        if data[at] == _MEMOIZE and data[at + 1] == _MARK_CODE:
            self._memorize()
            self._at = at + 2
            if not self._plain_items(found):
                self._mark()

    def _plain_items(self, found: dict[Any, Any]) -> bool:
        """Set the keys of an event, most of what a snapshot consists of, without a detour over the stack.

        Keys that were named before, and values that are numbers, named before, or stacks. True if that was all of the
        dictionary, else what follows goes the usual way.
        """
        data, memo, at = self._data, self._memo, self._at
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
                found[key] = memo[int.from_bytes(data[after:at], "little")]
            elif code == _INT_SHORT:
                found[key], at = data[after], after + 1
            elif code == _LONG_SHORT and data[after] <= 8:
                at = after + 1 + data[after]
                found[key] = int.from_bytes(data[after + 1 : at], "little", signed=True)
            elif code == _INT_FOUR:
                at = after + 4
                found[key] = int.from_bytes(data[after:at], "little", signed=True)
            elif code == _GET_SHORT:
                found[key], at = memo[data[after]], after + 1
            elif code == _INT_TWO:
                at = after + 2
                found[key] = int.from_bytes(data[after:at], "little")
            elif code == _EMPTY_LIST:
                self._at = after
                self._list()
                value = self._stack.pop()
                if type(value) is not Frames:  # its items follow
                    self._stack += [key, value]
                    self._marks.append(len(self._stack) - 2)
                    return True
                found[key] = value
                at = self._at
            else:
                break
        self._at = at
        if data[at] == _SET_ITEMS:
            self._at += 1
            return True
        return False

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
                self._memorize()
            else:
                self._remember(int.from_bytes(self._data[found.start() + 2 : self._at], "little"))
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
            self._reported = self._at
            self._progress(self._at / self._size)

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise Broken("it appends to what is no list")
        if values and type(values[0]) is dict and "action" in values[0]:
            self.gathered.take_events(target, values)
            self._containers -= len(values)
        else:
            target.extend(values)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, pairs: list[Any]) -> None:
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

    def _finished(self, value: Any) -> Any:
        """The value with its events in place of the lists that they were read into."""
        self._progress(1.0)
        traces = value.get("device_traces") if type(value) is dict else None
        if type(traces) is list:
            value["device_traces"] = [self.gathered.history_of(trace) for trace in traces]
        return value


_U2, _U4, _I4, _U8, _F8 = (struct.Struct(layout) for layout in ("<H", "<I", "<i", "<Q", ">d"))
_REPORT_BYTES = 1 << 20
_STOP, _GLOBAL, _STACK_GLOBAL, _MEMOIZE, _MARK_CODE, _LONG_SHORT = b"."[0], b"c"[0], 0x93, 0x94, b"("[0], 0x8A
_GET_SHORT, _GET_LONG, _INT_SHORT, _INT_TWO, _INT_FOUR, _EMPTY_LIST, _SET_ITEMS = b"hjKMJ]u"

_Action = Callable[[SnapshotUnpickler], None]
_U = SnapshotUnpickler
_CODES: list[_Action | None] = [None] * 256


def _constant(value: Any) -> _Action:
    return lambda unpickler: unpickler._push(value)


for _code, _action in {
    b"\x80": _U._protocol,
    b"\x95": _U._frame,
    b"(": _U._mark,
    b"h": _U._get_short,
    b"j": _U._get_long,
    b"q": _U._put_short,
    b"r": _U._put_long,
    b"\x94": _U._memorize,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _U._int_short,
    b"M": _U._int_two,
    b"J": _U._int_four,
    b"\x8a": _U._long_short,
    b"G": _U._float,
    b"\x8c": _U._text_short,
    b"X": _U._text_long,
    b"\x8d": _U._text_longest,
    b"C": _U._bytes_short,
    b"B": _U._bytes_long,
    b"\x8e": _U._bytes_longest,
    b"}": _U._dictionary,
    b"]": _U._list,
    b")": _constant(()),
    b"t": _U._tuple,
    b"\x85": lambda unpickler: unpickler._tuple_of(1),
    b"\x86": lambda unpickler: unpickler._tuple_of(2),
    b"\x87": lambda unpickler: unpickler._tuple_of(3),
    b"a": _U._append,
    b"e": _U._appends,
    b"s": _U._set_item,
    b"u": _U._set_items,
    **dict.fromkeys(
        [b"c", b"\x93", b"R", b"b", b"i", b"o", b"\x81", b"\x92", b"\x82", b"\x83", b"\x84", b"P", b"Q"], _U._refuse
    ),
}.items():
    _CODES[_code[0]] = _action
