"""The ranks of a job: which belong together, how far they differ, and which is the worst."""

from __future__ import annotations

from msgspec.structs import replace

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.probe.wire import Record
from gpumem_tui.watch.published import Published, WatchedProcess, job_of, total_bytes
from gpumem_tui.watch.records import ProbeSample, ProcessState
from tests.scenes import monitor as monitor_scene
from tests.scenes.watch import on_cpu, out_of_memory, ranks, record, watched


def rank(number: int, launcher: int, held: Record | None = None, world_size: int = 2) -> WatchedProcess:
    host = monitor_scene.host_process(4100 + number, parent_pid=launcher)
    return watched(4100 + number, (held or record(), ""), rank=number, world_size=world_size, host=host)


def test_those_of_one_launcher_belong_together() -> None:
    mine, other = rank(0, 10), rank(1, 10)
    strangers = [rank(2, 11), rank(3, 10, world_size=4), watched(4120, (record(), ""))]
    job = job_of(Published((other, *strangers, mine)), mine)
    assert job is not None
    assert [one.watched for one in job.ranks] == [mine, other]
    assert job.absent == 0


def test_without_a_launcher_that_can_be_seen_the_command_tells() -> None:
    hidden = Unknown("hidden")
    mine, other = replace(rank(0, 10), host=hidden), replace(rank(4, 10), host=hidden)
    job = job_of(Published((mine, other)), mine)
    assert job is not None
    assert len(job.ranks) == 2, "4100 and 4104 have one command line"


def test_a_process_that_is_no_rank_has_no_job() -> None:
    alone = watched(4100, (record(), ""))
    assert job_of(Published((alone,)), alone) is None


def test_the_one_that_ended_is_left_out() -> None:
    mine = rank(0, 10)
    ended = out_of_memory()
    assert ended.process.state is ProcessState.OUT_OF_MEMORY
    job = job_of(Published((mine, ended)), mine)
    assert job is not None
    assert [one.watched for one in job.ranks] == [mine]
    assert job.absent == 1


def test_the_worst_is_the_one_with_the_highest_peak() -> None:
    _, published = ranks(8)
    job = job_of(published, published.processes[0])
    assert job is not None
    assert job.worst is not None
    assert job.worst.number == 5
    assert job.absent == 8
    sizes = [size_bytes for size_bytes, _ in job.sizes(lambda sample: sample.peak_allocated_bytes)]
    assert max(sizes) - min(sizes) == 15 * GIB - 5 * 8 * 2**20 - (14 * GIB - 7 * 8 * 2**20)


def test_without_an_allocator_it_is_the_one_with_the_most_bytes() -> None:
    less, more = rank(0, 10, on_cpu()), rank(1, 10, on_cpu(optimizer_bytes=7 * 2**20))
    job = job_of(Published((less, more)), less)
    assert job is not None
    assert job.worst is not None
    assert job.worst.number == 1
    assert job.sizes(lambda sample: sample.reserved_bytes) == []


def test_a_rank_before_its_first_step() -> None:
    early = watched(4100, rank=0, world_size=2)
    job = job_of(Published((early,)), early)
    assert job is not None
    assert job.ranks[0].placed is None
    assert job.worst is None


def test_all_that_was_found() -> None:
    assert total_bytes(ProbeSample(on_cpu())) == 12 * 2**20
    assert total_bytes(ProbeSample(record())) == record().allocated_bytes
