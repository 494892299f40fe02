"""CUDA streams: on which one each thread works, and when memory that several use may serve again.

The caching allocator has pools for each stream, and a block stays in those of the stream that was current when its
memory came from the driver. A block that another stream uses, as `Tensor.record_stream` states, is not used again as it
is freed, but once an event, recorded on that stream then, has happened; the next request finds that out
(`insert_events` and `process_events` in c10/cuda/CUDACachingAllocator.cpp).

When that is depends on how far the GPU is behind the program. Here the GPU does nothing before it must: all streams
advance together in the order in which the program gave them work, as far as the program has waited for (an event's or
a stream's `synchronize`, a value that is read, a copy between host and device that does not say `non_blocking`), and
are never further behind than the queue of launches is long. FSDP1's rate limiter, which waits for events, so has the
effect that it has on a GPU; FSDP2 keeps references instead, and needs no events.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.caching import GRAPH_POOL, CachingAllocator
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder

DEFAULT_STREAM = 0
_STREAMS_PER_PRIORITY, _PRIORITIES = 32, 4
"""kStreamsPerPool and max_compile_time_stream_priorities in c10/cuda/CUDAStream.cpp: then streams come again."""

_LEAST_PRIORITY, _GREATEST_PRIORITY = 0, -5
"""cudaDeviceGetStreamPriorityRange since compute capability 7.0."""

assert GRAPH_POOL == 1 + _STREAMS_PER_PRIORITY * _PRIORITIES

_QUEUED_EVENTS = 2 * 1024
"""A launch waits while about 1,000 are queued (measured: stackoverflow.com/questions/53970187). Counted in allocations
and releases, since nearly each kernel writes a tensor of its own."""

_ELAPSED_MS = 1.0
"""Between any two events: no device time passes, and programs divide by it."""


class Streams:
    """The streams of one device, and the blocks that are freed while streams other than their own use them.

    Attributes:
        active: those of the GPU that is being simulated.
        recorded_uses: how many uses `record_use` got.
    """

    active: ClassVar[Streams | None] = None

    def __init__(self, recorder: TimelineRecorder, allocator: CachingAllocator) -> None:
        self._recorder = recorder
        self._allocator = allocator
        self._made: Counter[int] = Counter()
        self._home = threading.get_ident()
        self._thread = threading.local()
        self._are_switched = False
        self._switches: list[tuple[int, int]] = []
        """For the thread that runs forward: which stream is current from which autograd node on."""

        self._in_use: set[int] = set()
        self._pending: deque[tuple[int, int]] = deque()
        """Allocations that were released in use, and how many events there were then."""

        self._done = 0
        self.recorded_uses = 0

    def make(self, priority: int) -> int:
        """Return the number of a new stream; there are 32 of a priority, which come again."""
        level = min(max(-priority, 0), _PRIORITIES - 1)
        place = self._made[level] % _STREAMS_PER_PRIORITY
        self._made[level] += 1
        return 1 + level * _STREAMS_PER_PRIORITY + place

    # Which stream a thread works on.

    @property
    def current(self) -> int:
        """The stream of this thread; in backward, that of the operation that is being differentiated."""
        if not self._are_switched:
            return DEFAULT_STREAM
        chosen: int | None = getattr(self._thread, "stream", None)
        return chosen if chosen is not None else self._of_node()

    def switch(self, stream: int | None) -> int | None:
        """Make a stream the thread's own (None: none is chosen), and return what was before."""
        before: int | None = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        self._are_switched = True
        if threading.get_ident() == self._home:
            self._note_switch(stream or DEFAULT_STREAM)
        return before

    @contextmanager
    def in_graph_pool(self) -> Iterator[None]:
        """Take this thread's memory, for as long as the context, from the pool that compiled graphs have."""
        before: int | None = getattr(self._thread, "stream", None)
        self._thread.stream, self._are_switched = GRAPH_POOL, True
        try:
            yield
        finally:
            self._thread.stream = before

    def _note_switch(self, stream: int) -> None:
        node = torch._C._autograd._get_sequence_nr()
        if self._switches and self._switches[-1][0] == node:  # no operation was recorded on it
            self._switches.pop()
        if (self._switches[-1][1] if self._switches else DEFAULT_STREAM) != stream:
            self._switches.append((node, stream))

    def _of_node(self) -> int:
        """Return the stream of the node at work: the one on which its operation ran (autograd/engine.cpp)."""
        node = torch._C._current_autograd_node() if self._switches else None
        if node is None:
            return DEFAULT_STREAM
        index = bisect_right(self._switches, node._sequence_nr(), key=lambda switch: switch[0])
        return self._switches[index - 1][1] if index else DEFAULT_STREAM

    # Memory that several streams use.

    def record_use(self, number: int, stream: int) -> None:
        """Note that a stream uses an allocation, if that is not its own (`recordStream`)."""
        if stream != self._recorder.stream_of(number):
            self._in_use.add(number)
            self.recorded_uses += 1

    def free(self, number: int, block: Block) -> None:
        """Release an allocation; if others than its own stream use it, until these are done."""
        if number in self._in_use:
            self._in_use.discard(number)
            self._allocator.request_free(block, number)
            self._recorder.release_in_use(number)
            self._pending.append((number, self._recorder.position))
        else:
            self._allocator.free(block)
            self._recorder.release(number)

    def complete(self) -> None:
        """Give back what streams are done with, so that it can serve the next request."""
        if not self._pending:
            return
        done = self.done
        while self._pending and self._pending[0][1] <= done:
            number, _ = self._pending.popleft()
            self._allocator.complete_free(number)
            self._recorder.complete(number)

    @property
    def done(self) -> int:
        """Until when what the GPU was given is surely done."""
        return max(self._done, self._recorder.position - _QUEUED_EVENTS)

    @property
    def moment(self) -> int:
        """Until when the GPU was given work, for `synchronize`."""
        return self._recorder.position

    def synchronize(self, moment: int | None = None) -> None:
        """Have the program wait until the GPU has done what it was given until `moment`; None: until now."""
        self._done = max(self._done, self._recorder.position if moment is None else moment)


def _of_active() -> Streams:
    if Streams.active is None:
        raise RuntimeError("no simulated GPU is active: wrap the step in simulator.device.gpu.simulate()")
    return Streams.active


class _Waited:
    """The common part of a stream and an event: they are waited for, and wait for others."""

    _moment: int | None = None
    """Until when the GPU was given work; None for now."""

    def wait(self, *_: object) -> None:
        """Do nothing: all streams advance together."""

    wait_stream = wait_event = wait

    def synchronize(self) -> None:
        """Wait until the GPU has done this."""
        _of_active().synchronize(self._moment)

    def query(self) -> bool:
        """Answer that it is done, and wait: so does who asks again and again."""
        self.synchronize()
        return True


class SimulatedEvent(_Waited):
    """An event of the simulated GPU, in the place of `torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._moment = 0

    def record(self, *_: object) -> None:
        """Note until when the GPU was given work."""
        self._moment = _of_active().moment

    def elapsed_time(self, *_: object) -> float:
        """Return milliseconds to another event."""
        return _ELAPSED_MS


class SimulatedStream(_Waited):
    """`torch.cuda.Stream`: two are equal if their numbers are."""

    device_index = 0
    device_type = 1

    def __init__(self, _device: object = None, priority: int = 0, *, stream_id: int | None = None, **_: object) -> None:
        self.priority = max(min(priority, _LEAST_PRIORITY), _GREATEST_PRIORITY)
        self.stream_id = _of_active().make(self.priority) if stream_id is None else stream_id
        self._before: list[int | None] = []

    @property
    def cuda_stream(self) -> int:
        """The driver's handle, of which 0 is the default stream's."""
        return self.stream_id

    @property
    def device(self) -> torch.device:
        """The GPU, by CUDA's name."""
        return torch.device("cuda", 0)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return _LEAST_PRIORITY, _GREATEST_PRIORITY

    def is_capturing(self) -> bool:
        """Return whether work is captured in a graph."""
        return False

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Record an event, or a new one."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def __enter__(self) -> SimulatedStream:
        self._before.append(_of_active().switch(self.stream_id))
        return self

    def __exit__(self, *_: object) -> None:
        _of_active().switch(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash((SimulatedStream, self.stream_id))


class ExternalStream(SimulatedStream):
    """`torch.cuda.ExternalStream`: a stream by the driver's handle."""

    def __init__(self, stream_ptr: int, _device: object = None, **_: object) -> None:
        super().__init__(stream_id=stream_ptr)


class StreamContext:
    """`torch.cuda.stream` and `torch.cuda.StreamContext`: the thread works on a stream within; on None as before."""

    def __init__(self, stream: SimulatedStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()
