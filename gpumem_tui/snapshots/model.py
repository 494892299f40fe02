"""A memory snapshot stored compactly: events as columns, each stack and each frame once."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec

from gpumem_tui.text import shortened

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
(
    ALLOC,
    FREE_REQUESTED,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    OOM,
    SNAPSHOT,
) = range(len(ACTIONS))
UNKNOWN_ACTION = len(ACTIONS)
"""The code of actions of later versions, which add nothing about memory."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Device = Annotated[int, msgspec.Meta(ge=-1, le=1 << 16)]

_ACTION_NUMBERS = {name: number for number, name in enumerate(ACTIONS)}
_LONGEST_TEXT = 300
_MOST_LINES = 1 << 31
NO_STACK = 0


class SnapshotError(Exception):
    """A file that is no snapshot, or one that cannot be read; one line."""


class Frame(NamedTuple):
    """A place in a program. `line` is 0 where it is not known."""

    file: str
    line: int
    function: str


class Stacks:
    """Stacks by number, each kept once: a tuple of frame numbers, the innermost first. Number 0 is the empty one.

    Names in frames are somebody else's text: control characters are taken out here, once.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._frame_numbers: dict[Frame, int] = {}
        self._stacks: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): NO_STACK}

    def __len__(self) -> int:
        return len(self._stacks)

    def __getitem__(self, number: int) -> tuple[Frame, ...]:
        return tuple(self.frames[frame] for frame in self._stacks[number])

    def frame(self, file: object, line: object, function: object) -> int:
        """Return the number of a frame; what is no text or number in it counts as not known.

        A path of Windows has slashes from here on, as every other.
        """
        number = line if isinstance(line, int) and 0 <= line < _MOST_LINES else 0
        found = Frame(_with_slashes(_text(file)), number, _text(function))
        if found not in self._frame_numbers:
            self._frame_numbers[found] = len(self.frames)
            self.frames.append(found)
        return self._frame_numbers[found]

    def add(self, frames: tuple[int, ...]) -> int:
        """Return the number of a stack."""
        if frames not in self._numbers:
            self._numbers[frames] = len(self._stacks)
            self._stacks.append(frames)
        return self._numbers[frames]


def _text(value: object) -> str:
    return shortened(value, _LONGEST_TEXT) if isinstance(value, str) else ""


_WINDOWS_PATH = re.compile(r"(?:[A-Za-z]:[\\/]|\\\\|[^/]*\\[^/]*$)")
"""A drive, a server, or separators that are all backslashes (Python's `ntpath`)."""


def _with_slashes(file: str) -> str:
    return file.replace("\\", "/") if "\\" in file and _WINDOWS_PATH.match(file) else file


@dataclass
class EventHistory:
    """The events of one device, a column each.

    Attributes:
        addresses: of an ``oom``, what the device had free.
        times_us: wall clock in microseconds; 0 where it was not recorded.
        stacks: numbers in `Stacks`.
        categories: indices into `category_names`; the first is "", for events that name none.
    """

    actions: bytearray = field(default_factory=bytearray)
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    streams: array[int] = field(default_factory=lambda: array("q"))
    times_us: array[int] = field(default_factory=lambda: array("q"))
    stacks: array[int] = field(default_factory=lambda: array("i"))
    categories: bytearray = field(default_factory=bytearray)
    category_names: list[str] = field(default_factory=lambda: [""])

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def is_recorded(self) -> bool:
        """Return whether there is an event of memory; the one that marks that a snapshot was taken is none."""
        return any(self.actions.count(action) for action in range(SNAPSHOT))

    def append(  # noqa: PLR0913 - a column each
        self, action: str, address: int, size_bytes: int, stream: int, time_us: int = 0, stack: int = NO_STACK,
        category: str = "",
    ) -> None:  # fmt: skip
        """Add an event.

        Raises:
            TypeError, OverflowError: a value that is no number, or none that an address or a size can be.
        """
        self.addresses.append(address)
        self.sizes.append(size_bytes)
        self.streams.append(stream)
        self.times_us.append(time_us)
        self.stacks.append(stack)
        self.actions.append(_ACTION_NUMBERS.get(action, UNKNOWN_ACTION))
        self.categories.append(self._category(category) if category else 0)

    def _category(self, name: str) -> int:
        clean = _text(name)
        if clean not in self.category_names:
            if len(self.category_names) > 255:
                return 0
            self.category_names.append(clean)
        return self.category_names.index(clean)


ALLOCATED, PENDING, INACTIVE = "active_allocated", "active_pending_free", "inactive"
BEFORE = -1
"""The event that made a block which was there before the first."""


@dataclass(slots=True)
class SnapshotBlock:
    """A part of a segment, as it was when the snapshot was taken, or as it is followed from event to event.

    Attributes:
        requested_bytes: what the program asked for; of a free block 0.
        state: `ALLOCATED`, `INACTIVE`, or `PENDING`: the program gave it back while another stream may still use it.
        stack, category: as the file has them; the category is "" where it names none.
        event: that made it, or `BEFORE`.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    stack: int = NO_STACK
    category: str = ""
    event: int = BEFORE

    @property
    def is_free(self) -> bool:
        """Return whether it can be given again."""
        return self.state == INACTIVE

    @property
    def is_allocated(self) -> bool:
        """Return whether the program holds it."""
        return self.state == ALLOCATED


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Memory that the allocator holds of the driver's in one piece; of an expandable one, a mapped part of it.

    Attributes:
        pool: the id of a private pool (of a CUDA graph, for example); (0, 0) for the usual one.
        blocks: what it consists of as the snapshot was taken; empty at the moments before, as it is followed.
    """

    device: int
    address: int
    size_bytes: int
    stream: int
    is_small: bool
    pool: tuple[int, int] = (0, 0)
    is_expandable: bool = False
    blocks: tuple[SnapshotBlock, ...] = ()

    @cached_property
    def taken(self) -> tuple[tuple[int, int], ...]:
        """The runs of bytes in use, as (offset, bytes), in order."""
        runs: list[tuple[int, int]] = []
        for block in self.blocks:
            offset = block.address - self.address
            if block.is_free:
                continue
            if runs and sum(runs[-1]) == offset:
                runs[-1] = runs[-1][0], runs[-1][1] + block.size_bytes
            else:
                runs.append((offset, block.size_bytes))
        return tuple(runs)

    @cached_property
    def free_sizes(self) -> tuple[int, ...]:
        """The bytes of each free block."""
        return tuple(block.size_bytes for block in self.blocks if block.is_free)

    @property
    def free_bytes(self) -> int:
        """The bytes of all free blocks together."""
        return sum(self.free_sizes)

    @property
    def largest_free_bytes(self) -> int:
        """The bytes of the largest free block; 0 if missing."""
        return max(self.free_sizes, default=0)


class Annotation(msgspec.Struct, frozen=True):
    """Something that the program said of a moment, e.g. that a phase begins: an entry of ``external_annotations``."""

    name: str = ""
    stage: str = ""
    device: Device = 0
    time_us: Signed = 0


@dataclass(frozen=True)
class MemorySnapshot:
    """A memory snapshot that was read from a file.

    Attributes:
        kind: "pickle", "JSON" or "reduced JSON".
        size_bytes: of the file.
        settings: the allocator's, as far as the file has them.
        histories: by device; a device without events has an empty one.
    """

    name: str
    kind: str
    size_bytes: int
    stacks: Stacks
    histories: tuple[EventHistory, ...]
    segments: tuple[Segment, ...]
    settings: Mapping[str, object]
    annotations: tuple[Annotation, ...]

    @property
    def devices(self) -> list[int]:
        """The devices that hold memory or have events of it; [0] for a file without any."""
        named = {segment.device for segment in self.segments}
        return sorted(named | {device for device, history in enumerate(self.histories) if history.is_recorded}) or [0]

    @property
    def unused_devices(self) -> list[int]:
        """The devices that the file has a place for, and nothing else of."""
        return [device for device in range(len(self.histories)) if device not in self.devices]

    def history(self, device: int) -> EventHistory:
        """Return what happened on a device."""
        return self.histories[device] if 0 <= device < len(self.histories) else EventHistory()
