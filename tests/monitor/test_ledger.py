"""A device's rows sum to its total, regardless of the driver and the processes say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumem_tui.ledger import Ledger, LedgerRow
from gpumem_tui.memory import GIB, MIB, Bucket, Unknown, Value
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import HOLDERS, GpuProcess, HostProcess, Memory, ProcessKind

_MEMORY = Memory(total_bytes=80 * GIB, reserved_bytes=GIB, used_bytes=30 * GIB, free_bytes=49 * GIB)
_NOT_AVAILABLE = Unknown("not available")


def _process(pid: int, used_bytes: Value) -> GpuProcess:
    return GpuProcess(pid, ProcessKind.COMPUTE, used_bytes, sm_percent=0, host=Unknown("not looked up"))


def _ledger(memory: Memory, *processes: GpuProcess) -> Ledger[GpuProcess]:
    ledger = device_ledger(memory, processes)
    assert not isinstance(ledger, Unknown)
    return ledger


def _row(ledger: Ledger[GpuProcess], kind: Bucket) -> LedgerRow[GpuProcess]:
    (row,) = (row for row in ledger.rows if row.kind is kind)
    return row


_sizes = st.integers(0, 200 * GIB)
_memories = st.builds(
    lambda reserved, used, free, gap, known: Memory(
        total_bytes=reserved + used + free + gap,
        reserved_bytes=reserved if known else Unknown("an old driver"),
        used_bytes=used if known else used + reserved,
        free_bytes=free,
    ),
    _sizes,
    _sizes,
    _sizes,
    st.integers(0, GIB),
    st.booleans(),
)
_lists = st.lists(st.one_of(_sizes, st.just(_NOT_AVAILABLE)), max_size=12).map(
    lambda sizes: tuple(_process(pid, size_bytes) for pid, size_bytes in enumerate(sizes))
)


@given(_memories, _lists)
def test_known_rows_sum_to_the_total(memory: Memory, processes: tuple[GpuProcess, ...]) -> None:
    ledger = _ledger(memory, *processes)
    assert sum(row.size_bytes for row in ledger.rows if isinstance(row.size_bytes, int)) == memory.total_bytes
    assert all(row.size_bytes >= 0 for row in ledger.rows if isinstance(row.size_bytes, int))
    assert _row(ledger, Bucket.FREE).size_bytes == memory.free_bytes
    assert {row.process for row in ledger.rows if row.kind is Bucket.PROCESS} == set(processes)


@given(_memories, _lists)
def test_processes_hold_what_they_say_unless_it_is_more_than_is_used(
    memory: Memory, processes: tuple[GpuProcess, ...]
) -> None:
    rows = [row for row in _ledger(memory, *processes).rows if row.process is not None]
    claims = [p.used_bytes for p in processes if isinstance(p.used_bytes, int)]
    exceeds = sum(claims) > memory.used_bytes
    for row in rows:
        assert row.process is not None
        if isinstance(row.process.used_bytes, Unknown) or not exceeds:
            assert (row.size_bytes, row.note) == (row.process.used_bytes, "")
    if exceeds:
        assert sum(row.size_bytes for row in rows if isinstance(row.size_bytes, int)) == memory.used_bytes
        assert any("exceed what is used" in row.note for row in rows)


_anything = st.integers(0, 2**64)


@given(st.builds(Memory, _anything, st.one_of(_anything, st.just(_NOT_AVAILABLE)), _anything, _anything), _lists)
def test_no_figures_raise(memory: Memory, processes: tuple[GpuProcess, ...]) -> None:
    ledger = device_ledger(memory, processes)
    assert isinstance(ledger, (Unknown, Ledger))


def test_a_ledger_of_everyone() -> None:
    ledger = _ledger(_MEMORY, _process(2, 5 * GIB), _process(1, 20 * GIB))
    assert [(row.kind, row.size_bytes) for row in ledger.rows] == [
        (Bucket.DRIVER_RESERVED, GIB),
        (Bucket.PROCESS, 20 * GIB),
        (Bucket.PROCESS, 5 * GIB),
        (Bucket.UNACCOUNTED, 5 * GIB),
        (Bucket.FREE, 49 * GIB),
    ]
    assert _row(ledger, Bucket.UNACCOUNTED).note == HOLDERS


def test_nothing_unaccounted_needs_no_explanation() -> None:
    assert _row(_ledger(_MEMORY, _process(1, 30 * GIB)), Bucket.UNACCOUNTED) == LedgerRow(Bucket.UNACCOUNTED, 0)


def test_unknown_memory_makes_no_ledger() -> None:
    assert device_ledger(Unknown("not supported"), ()) == Unknown("not supported")


def test_an_old_drivers_reserve_is_within_what_nobody_holds() -> None:
    ledger = _ledger(replace(_MEMORY, reserved_bytes=Unknown("old"), used_bytes=31 * GIB), _process(1, 30 * GIB))
    assert _row(ledger, Bucket.DRIVER_RESERVED).size_bytes == Unknown("old")
    assert _row(ledger, Bucket.UNACCOUNTED).size_bytes == GIB
    assert _row(ledger, Bucket.UNACCOUNTED).note.startswith("the driver's reserve, ")


def test_processes_of_unknown_size_are_listed_and_what_they_hold_is_unaccounted() -> None:
    """As under WSL, or in a container that does not see other users' shares."""
    ledger = _ledger(_MEMORY, _process(1, _NOT_AVAILABLE), _process(2, 10 * GIB), _process(3, _NOT_AVAILABLE))
    assert sum(size for kind in Bucket if isinstance(size := ledger.size_bytes(kind), int)) == ledger.total_bytes
    assert ledger.size_bytes(Bucket.PROCESS) == 10 * GIB
    assert _ledger(_MEMORY, _process(1, _NOT_AVAILABLE)).size_bytes(Bucket.PROCESS) == _NOT_AVAILABLE
    unaccounted = _row(ledger, Bucket.UNACCOUNTED)
    assert unaccounted.size_bytes == 20 * GIB
    assert unaccounted.note.startswith("2 listed processes of unknown size (not available), ")


def test_a_list_that_was_not_permitted_is_said_where_its_memory_is() -> None:
    processes: Reading[tuple[GpuProcess, ...]] = Unknown("no permission")
    ledger = device_ledger(_MEMORY, processes, holders="virtual machines")
    assert not isinstance(ledger, Unknown)
    unaccounted = _row(ledger, Bucket.UNACCOUNTED)
    assert unaccounted.size_bytes == 30 * GIB
    assert unaccounted.note == "all processes (their list: no permission), virtual machines"


def test_processes_that_exceed_what_is_used_are_scaled_and_say_so() -> None:
    ledger = _ledger(_MEMORY, _process(1, 30 * GIB), _process(2, 10 * GIB))
    first, second = (row for row in ledger.rows if row.kind is Bucket.PROCESS)
    assert (first.size_bytes, second.size_bytes) == (22.5 * GIB, 7.5 * GIB)
    assert second.note == "scaled down from 10.00 GiB: the processes' figures exceed what is used"
    assert second.process is not None
    assert second.process.used_bytes == 10 * GIB, "the process itself keeps what NVML said"


def test_figures_that_contradict_each_other_are_named() -> None:
    ledger = device_ledger(Memory(GIB, 100 * MIB, 2 * GIB, 0), ())
    assert ledger == Unknown("the driver's figures do not add up: 2.00 GiB used and 100.0 MiB reserved of 1.00 GiB")


def test_memory_neither_used_nor_free_is_unaccounted() -> None:
    unaccounted = _row(_ledger(replace(_MEMORY, free_bytes=48 * GIB), _process(1, 30 * GIB)), Bucket.UNACCOUNTED)
    assert unaccounted.size_bytes == GIB
    assert unaccounted.note.startswith("1.00 GiB that the driver calls neither used nor free, ")


def test_the_server_of_mps_is_pointed_out() -> None:
    server = HostProcess(7, 1, "root", "nvidia-cuda-mps-server", "nvidia-cuda-mps-server", 0.0, 0.0, 0)
    ledger = _ledger(_MEMORY, replace(_process(7, 30 * MIB), host=server))
    (row,) = (row for row in ledger.rows if row.kind is Bucket.PROCESS)
    assert row.note == "MPS server: before Volta it holds its clients' memory too"


def test_free_is_at_most_what_is_outside_of_what_is_used() -> None:
    """A driver's figures are read one after another: more may be called free than is left of the total."""
    ledger = _ledger(replace(_MEMORY, free_bytes=55 * GIB), _process(1, 30 * GIB))
    assert _row(ledger, Bucket.FREE).size_bytes == 49 * GIB
    assert _row(ledger, Bucket.UNACCOUNTED).size_bytes == 0
    assert sum(row.size_bytes for row in ledger.rows if isinstance(row.size_bytes, int)) == 80 * GIB
