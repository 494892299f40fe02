"""The blocks of a device's allocator at any moment of a snapshot, and where in the program each was made.

The file shows what was held at its end, and what happened before. So the state at the start follows by undoing the
events from the end, and any other by doing them again. The allocator joins free blocks that touch, so a state is which
memory there is and which of it is taken. How large a taken block is, the event does not say (it tells the request), but
the rules of CUDACachingAllocator.cpp do: the rest of a free block is cut off if it is worth it (`should_split`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.blocks import SMALL_SEGMENT_BYTES
from gpumem_tui.simulator.allocator.caching import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, CachingAllocator
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.snapshots import model
from gpumem_tui.snapshots.model import (
    ALLOCATED,
    BEFORE,
    NO_STACK,
    PENDING,
    EventHistory,
    Frame,
    MemorySnapshot,
    Segment,
    SnapshotBlock,
)
from gpumem_tui.step import RunStage
from gpumem_tui.step.stages import stage_by_names

_NO_LIMIT = 1 << 62


class Rules:
    """The settings of a snapshot's allocator."""

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self.settings = settings_of(snapshot)
        self._round = CachingAllocator(0, self.settings).round_size
        self._max_split_bytes = self.settings.max_split_size_bytes or _NO_LIMIT
        self._rounded: dict[int, int] = {}
        self.segment_size = CachingAllocator(0, self.settings).segment_size

    def rounded(self, size_bytes: int) -> int:
        """Return the size of the block that a request needs."""
        found = self._rounded.get(size_bytes)
        if found is None:
            found = self._rounded[size_bytes] = self._round(size_bytes)
        return found

    def keeps_rest(self, size_bytes: int, rest_bytes: int, *, expandable: bool) -> bool:
        """Return whether a block of a size is left as large as the free one that it is taken from."""
        if expandable or size_bytes <= SMALL_REQUEST_BYTES:
            return rest_bytes < MIN_BLOCK_BYTES
        return size_bytes >= self._max_split_bytes or rest_bytes <= SMALL_REQUEST_BYTES


def settings_of(snapshot: MemorySnapshot) -> AllocatorSettings:
    """Read the allocator's settings; the defaults where the file has none or has some that cannot be read here."""
    found = snapshot.settings
    text = found.get("PYTORCH_CUDA_ALLOC_CONF")
    try:
        settings = AllocatorSettings.parse(text if isinstance(text, str) else "")
    except OptionError:
        settings = AllocatorSettings()
    expandable, most = found.get("expandable_segments"), found.get("max_split_size")
    if isinstance(expandable, bool):
        settings = replace(settings, expandable_segments=expandable)
    if isinstance(most, int) and 0 < most < _NO_LIMIT:
        settings = replace(settings, max_split_size_bytes=most)
    return settings


class BlockState:
    """The blocks held after some event; `step` continues to the next.

    Attributes:
        held: taken blocks by address.
        memory: what is there to take them from, by address.
        allocated_bytes, reserved_bytes: as PyTorch counts them.
    """

    def __init__(
        self,
        device: int,
        rules: Rules,
        history: EventHistory,
        held: dict[int, SnapshotBlock],
        memory: dict[int, Segment],
    ) -> None:
        self._device = device
        self._rules = rules
        self._history = history
        self.held = held
        self.memory = memory
        self.event = BEFORE
        self.allocated_bytes = sum(block.size_bytes for block in held.values() if block.is_allocated)
        self.reserved_bytes = sum(found.size_bytes for found in memory.values())
        self._starts = sorted(memory)
        self._large = sorted(address for address, block in held.items() if block.size_bytes > SMALL_REQUEST_BYTES)

    def step(self) -> int:
        """Apply the next event; returns its action."""
        history = self._history
        self.event += 1
        event = self.event
        action = history.actions[event]
        address, size = history.addresses[event], history.sizes[event]
        if action == model.ALLOC:
            self._take(address, size, event)
        elif action == model.FREE_REQUESTED:
            block = self.held.get(address)
            if block is not None and block.is_allocated:
                block.state = PENDING
                self.allocated_bytes -= block.size_bytes
        elif action == model.FREE_COMPLETED:
            self._drop(address)
        elif action in (model.SEGMENT_ALLOC, model.SEGMENT_MAP):
            self._add(_memory_of_event(self._device, history, event))
        elif action in (model.SEGMENT_FREE, model.SEGMENT_UNMAP):
            self._remove(address, size)
        return action

    def free_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield every free block: its address, its size, and the address of the memory that it is in."""
        taken = sorted(self.held)
        for start in self._starts:
            address, end = start, start + self.memory[start].size_bytes
            for index in range(bisect_left(taken, start), bisect_left(taken, end)):
                if taken[index] > address:
                    yield address, taken[index] - address, start
                address = taken[index] + self.held[taken[index]].size_bytes
            if end > address:
                yield address, end - address, start

    def _take(self, address: int, requested_bytes: int, event: int) -> None:
        history = self._history
        size = self._rules.rounded(requested_bytes)
        if size > SMALL_REQUEST_BYTES:
            size = self._with_slack(address, size)
            insort(self._large, address)
        self._drop(address)
        self.held[address] = SnapshotBlock(
            address=address,
            size_bytes=size,
            requested_bytes=requested_bytes,
            state=ALLOCATED,
            stack=history.stacks[event],
            category=history.category_names[history.categories[event]],
            event=event,
        )
        self.allocated_bytes += size

    def _with_slack(self, address: int, size: int) -> int:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return size
        memory = self.memory[self._starts[index]]
        end = self._starts[index] + memory.size_bytes
        following = bisect_right(self._large, address)
        if following < len(self._large):
            end = min(end, self._large[following])
        rest = end - address - size
        keeps = rest >= 0 and self._rules.keeps_rest(size, rest, expandable=memory.is_expandable)
        return size + rest if keeps else size

    def _drop(self, address: int) -> None:
        block = self.held.pop(address, None)
        if block is None:
            return
        if block.is_allocated:
            self.allocated_bytes -= block.size_bytes
        if block.size_bytes > SMALL_REQUEST_BYTES:
            index = bisect_left(self._large, address)
            if index < len(self._large) and self._large[index] == address:
                del self._large[index]

    def _add(self, memory: Segment) -> None:
        self.reserved_bytes += memory.size_bytes
        _join(self.memory, self._starts, memory)

    def _remove(self, address: int, size_bytes: int) -> None:
        self.reserved_bytes -= _part(self.memory, self._starts, address, size_bytes)


def _join(memory: dict[int, Segment], starts: list[int], added: Segment) -> None:
    """Put memory in its place; mapped parts of an expandable segment that touch become one."""
    if added.address in memory:
        return
    insort(starts, added.address)
    memory[added.address] = added
    if not added.is_expandable:
        return
    index = bisect_left(starts, added.address)
    for left in (index, index - 1):
        if 0 <= left < len(starts) - 1:
            one, other = memory[starts[left]], memory[starts[left + 1]]
            if one.is_expandable and other.is_expandable and starts[left] + one.size_bytes == starts[left + 1]:
                whole = one.size_bytes + other.size_bytes
                memory[starts[left]] = replace(one, size_bytes=whole, is_small=one.is_small and other.is_small)
                del memory[starts.pop(left + 1)]


def _part(memory: dict[int, Segment], starts: list[int], address: int, size_bytes: int) -> int:
    """Take memory away, the middle of a mapped part too; returns how much there was of it."""
    index = bisect_right(starts, address) - 1
    if index < 0:
        return 0
    start = starts[index]
    found = memory[start]
    end = start + found.size_bytes
    if address >= end:
        return 0
    last = min(end, address + size_bytes)
    del memory[starts.pop(index)]
    for first, after in ((start, address), (last, end)):
        if after > first:
            insort(starts, first)
            memory[first] = replace(found, address=first, size_bytes=after - first)
    return last - address


def last_state(snapshot: MemorySnapshot, device: int) -> tuple[dict[int, SnapshotBlock], dict[int, Segment]]:
    """Return what the file states was held when it was written: taken blocks and memory, by address."""
    held: dict[int, SnapshotBlock] = {}
    memory: dict[int, Segment] = {}
    for segment in snapshot.segments:
        if segment.device != device:
            continue
        memory[segment.address] = replace(segment, blocks=())
        for block in segment.blocks:
            if not block.is_free:
                held[block.address] = replace(block)
    return held, memory


def first_state(snapshot: MemorySnapshot, device: int) -> BlockState:
    """Work out the state before the first event: the last one, with every event undone."""
    history, rules = snapshot.history(device), Rules(snapshot)
    held, memory = last_state(snapshot, device)
    starts = sorted(memory)
    for event in range(len(history) - 1, -1, -1):
        action = history.actions[event]
        address, size = history.addresses[event], history.sizes[event]
        if action == model.ALLOC:
            held.pop(address, None)
        elif action == model.FREE_COMPLETED:
            held[address] = SnapshotBlock(address, rules.rounded(size), size, PENDING, history.stacks[event])
        elif action == model.FREE_REQUESTED:
            if address in held:
                held[address].state = ALLOCATED
            else:
                held[address] = SnapshotBlock(address, rules.rounded(size), size, ALLOCATED, history.stacks[event])
        elif action in (model.SEGMENT_ALLOC, model.SEGMENT_MAP):
            _part(memory, starts, address, size)
        elif action in (model.SEGMENT_FREE, model.SEGMENT_UNMAP):
            _join(memory, starts, _memory_of_event(device, history, event))
    return BlockState(device, rules, history, held, memory)


def _memory_of_event(device: int, history: EventHistory, event: int) -> Segment:
    """Return what a segment event is about. Small requests have segments of a size of their own (kSmallBuffer)."""
    size = history.sizes[event]
    return Segment(
        device=device,
        address=history.addresses[event],
        size_bytes=size,
        stream=history.streams[event],
        is_small=size == SMALL_SEGMENT_BYTES,
        is_expandable=history.actions[event] in (model.SEGMENT_MAP, model.SEGMENT_UNMAP),
    )


# Where a block was made

NOWHERE = "no stack"
_BEFORE_RECORDING = "before the recording"
NOT_RECORDED = "not recorded"
_PARAMETERS, _FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = "model", "forward", "backward", "optimizer", "elsewhere"
_TITLES = {bucket.value: bucket.title for bucket in Bucket}
_MAKES_MODEL = {"_apply", "convert", "reset_parameters"}
_IN_AUTOGRAD = "in autograd's thread"
_ENGINE = "torch::autograd::Engine"
_NODE = re.compile(r"\btorch::autograd::(?:\w+::)*(\w+)::apply\b")
"""A node of autograd's graph (torch/csrc/autograd/function.h): what it computes is in its class's name."""
_OF_BACKWARD = re.compile(r"(\w+)Backward\d*")
_OPERATOR = re.compile(r"\bat::_ops::(?!(?:new_)?empty)(\w+)::")
"""An operator's call (torchgen's Operators.h); those that make tensors do so for another, mostly."""
_PLUMBING = re.compile(
    r"torch::unwind|torch::CapturedTraceback|torch::\w+::.*gather|c10::.*Alloc|at::.*detail::_?empty"
)
"""The innermost frames of every stack: what walks it, and what allocates for operators."""


class Places:
    """Answers for one snapshot, each stack looked at once."""

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self._stacks = snapshot.stacks
        self._lines: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self._stages: dict[int, str] = {NO_STACK: RunStage.TRAIN.value}
        self._are_events_placed = any(any(history.stacks) for history in snapshot.histories)
        self._before = _BEFORE_RECORDING if any(history.is_recorded for history in snapshot.histories) else NOT_RECORDED
        self.are_categories_named = any(
            any(history.categories) for history in snapshot.histories
        ) or any(block.category for segment in snapshot.segments for block in segment.blocks)  # fmt: skip

    def line(self, stack: int) -> str:
        """Return the innermost line that is not torch's or Python's own: ``folder/file.py:12 function``.

        Without a frame of Python's it is what autograd or an operator was at.
        """
        if stack not in self._lines:
            self._lines[stack] = _line(self._stacks[stack]) or self.operator(stack) or NOWHERE
        return self._lines[stack]

    def place(self, held: SnapshotBlock) -> str:
        """Return the `line` of a block, or other hints on where it was made.

        Where others have Python's frames and one has none, it was made in a thread that Python knows nothing of.
        """
        if held.stack != NO_STACK:
            return self.line(held.stack)
        if held.event == BEFORE:
            return self._before
        return _IN_AUTOGRAD if self._are_events_placed else NOWHERE

    def operator(self, stack: int) -> str:
        """Return the innermost operator, or else frame, that is not the allocator's own; "" without a stack."""
        frames = self.frames(stack)
        called = next((found[1] for frame in frames if (found := _OPERATOR.search(frame.function))), "")
        return called or (frames[0].function if frames else "")

    def frames(self, stack: int) -> Sequence[Frame]:
        """Return a stack without what is innermost in every one: the allocator, and what walks the stack."""
        frames = self._stacks[stack]
        first = next((index for index, frame in enumerate(frames) if not _PLUMBING.match(frame.function)), 0)
        return frames[first:]

    def stage(self, stack: int) -> str:
        """Return the stage of the run that functions on a stack are named for; a training's where none is."""
        if stack not in self._stages:
            named = stage_by_names(frame.function for frame in self._stacks[stack])
            self._stages[stack] = (named or RunStage.TRAIN).value
        return self._stages[stack]

    def category(self, held: SnapshotBlock) -> str:
        """Return a block's category, as the file names it, else as its stack suggests."""
        if held.category:
            return _TITLES.get(held.category, held.category)
        if held.stack == NO_STACK:
            nowhere = self.place(held)
            return _BACKWARD if nowhere == _IN_AUTOGRAD else nowhere
        if held.stack not in self._categories:
            self._categories[held.stack] = _part_of_training(self._stacks[held.stack])
        return self._categories[held.stack]


def frame_text(frame: Frame) -> str:
    """Write a frame in a line."""
    if not frame.file:
        return frame.function or "?"
    return f"{frame.file}:{frame.line} {frame.function}".rstrip()


def _line(frames: Sequence[Frame]) -> str:
    own = next((frame for frame in frames if _is_program(frame.file)), None)
    if own is not None:
        return f"{'/'.join(own.file.split('/')[-2:])}:{own.line} {own.function}".rstrip()
    python = next((frame for frame in frames if frame.file.endswith(".py")), None)
    if python is not None:
        return f"{'/'.join(python.file.split('/')[-2:])}:{python.line} {python.function}".rstrip()
    node = next((found[1] for frame in frames if (found := _NODE.search(frame.function))), "")
    if node == "AccumulateGrad":
        return "backward: gradients that are kept"
    if differentiated := _OF_BACKWARD.fullmatch(node):
        operator = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", differentiated[1]).lower()
        return f"backward of {operator}"
    return _IN_AUTOGRAD if any(_ENGINE in frame.function for frame in frames) else ""


_PYTHONS_OWN = re.compile(r"[A-Za-z]:/(?:.*/)?(?:[^/]*(?:python|conda|env)[^/]*|envs/[^/]+)/Lib/", re.IGNORECASE)
"""Python's own library on Windows: `Lib` of an installation, of Anaconda or of an environment."""


def _is_program(file: str) -> bool:
    """Neither torch's nor Python's own, and Python at all; notebooks' cells have names of their own."""
    if not file.endswith(".py") and "ipython-input" not in file and "ipykernel" not in file:
        return False
    if "/torch/" in file or file.startswith("torch/"):
        return False
    return "-packages/" in file or ("/lib/python3" not in file and not _PYTHONS_OWN.match(file))


def _part_of_training(frames: Sequence[Frame]) -> str:
    """Tell in which part of a training step a stack was taken, by torch's own frames in it."""
    part = _OTHER
    for file, _, function in frames:
        if "torch/optim/" in file:
            return _OPTIMIZER
        if file.endswith("torch/autograd/graph.py") or _ENGINE in function:
            return _BACKWARD
        if file.endswith("torch/nn/modules/module.py") and "call_impl" in function:
            part = _FORWARD
        elif part == _OTHER and "torch/nn/" in file and (function in _MAKES_MODEL or function == "__init__"):
            part = _PARAMETERS
    return part
