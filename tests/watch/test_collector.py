"""Publications, put where they belong; and the thread that reads them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.probes import ProbeFigures, with_unlisted
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.watch.collector import Collector
from gpumem_tui.watch.expected import Expected
from gpumem_tui.watch.live import LiveProbes
from gpumem_tui.watch.published import NOT_DERIVED_YET
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.report import probe_report
from tests.monitor.snapshots import gpu, machine
from tests.waiting import wait_until
from tests.watch.rings import GONE_PID, ON_CPU, RECORD, RingFile, gone, out_of_memory, this_process
from tests.watch.test_postmortem import model_document

GPU = gpu(uuid=RECORD.device_uuid)
GPT2 = {"parameters_bytes": 497_759_232, "gradients_bytes": 497_759_232, "optimizer_bytes": 995_518_464}


def test_a_process_on_its_gpu(tmp_path: Path) -> None:
    RingFile(tmp_path / "probes", this_process()).sample(ON_CPU, RECORD)
    published = Collector(Watcher([tmp_path / "probes"])).collect([GPU])
    [watched] = published.processes
    assert published.by_place[RECORD.device_uuid, os.getpid()][0] is watched
    assert [placed.sample.device for placed in watched.placed] == ["cpu", "cuda:0"]
    assert [placed.sample.device for placed in watched.own] == ["cuda:0"], "an optimizer's scalars in host memory"
    assert isinstance(watched.host, HostProcess)
    assert watched.host.pid == os.getpid()
    figures = ProbeFigures(17 * GIB, 40 * GIB, 0, 0)
    assert published.figures == {(RECORD.device_uuid, os.getpid()): figures}


def test_training_in_host_memory_is_there_too(tmp_path: Path) -> None:
    RingFile(tmp_path / "probes", this_process()).sample(ON_CPU)
    published = Collector(Watcher([tmp_path / "probes"])).collect([])
    [watched] = published.processes
    assert [placed.gpu_uuid for placed in watched.own] == [Unknown("host memory")]
    report = probe_report(published)
    assert [(place, body["pid"]) for place, body in report.said.items()] == [(("cpu", os.getpid()), os.getpid())]
    [unlisted] = with_unlisted(machine(), report).unlisted
    assert (unlisted.pid, unlisted.device, unlisted.gpu_uuid) == (os.getpid(), "cpu", "")
    assert unlisted.host == watched.host
    assert unlisted.process.used_bytes == Unknown("it trains on the CPU")


def test_history_only_of_the_one_that_is_followed(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", this_process())
    for step in (1, 2, 3):
        ring.sample(replace(RECORD, step=step))
    collector = Collector(Watcher([tmp_path / "probes"]))
    [watched] = collector.collect([GPU]).processes
    assert watched.history == ()
    [watched] = collector.collect([GPU], watched.process.key).processes
    assert [sample.record.step for sample in watched.history] == [1, 2, 3]


def test_what_is_expected_follows_the_document(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", this_process())
    ring.sample(replace(RECORD, **GPT2))  # type: ignore[arg-type]
    collector = Collector(Watcher([tmp_path / "probes"]))
    [watched] = collector.collect([GPU]).processes
    assert watched.expected == Unknown("the probe has not listed the parameters yet")
    ring.document(ring.files.model, model_document())
    [watched] = collector.collect([GPU]).processes
    assert isinstance(watched.expected, Expected)
    assert (watched.expected.shape.name, watched.expected.recipe.optimizer) == ("gpt2", "adamw")
    again = collector.collect([GPU]).processes[0].expected
    assert again is watched.expected, "derived once"
    printed = Collector(Watcher([tmp_path / "probes"]), derives=False).collect([GPU]).processes[0]
    assert (printed.own, printed.expected) == (watched.own, NOT_DERIVED_YET)
    teacher = {"name": "my.Teacher", "bytes": GIB}
    untrained = [{**teacher, "device": 0}, {**teacher, "device": -1}]  # the one in host memory is of no GPU's ledger
    ring.document(ring.files.model, {**model_document(), "untrained": untrained})
    expected = collector.collect([GPU]).processes[0].expected
    assert isinstance(expected, Expected)
    assert expected.untrained_bytes == GIB
    assert not any("a look finds the others" in phrase for phrase in expected.assumed)
    ring.document(ring.files.model, {**model_document(), "complete": False})
    os.utime(ring.files.model, ns=(2, 2))
    late = collector.collect([GPU]).processes[0].expected
    assert isinstance(late, Expected)
    assert any("a look finds the others" in phrase for phrase in late.assumed)
    ring.document(ring.files.model, model_document(optimizer="torch.optim.sgd.SGD"))
    os.utime(ring.files.model, ns=(1, 1))
    [watched] = collector.collect([GPU]).processes
    assert isinstance(watched.expected, Expected)
    assert watched.expected.recipe.optimizer == "sgd"


def test_a_damaged_document_is_a_reason_and_no_end(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", this_process())
    ring.sample(RECORD)
    ring.document(ring.files.model, {"models": 3})
    [watched] = Collector(Watcher([tmp_path / "probes"])).collect([GPU]).processes
    assert isinstance(watched.expected, Unknown)
    assert "is damaged" in watched.expected.reason


def test_one_that_memory_ran_out_under(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", gone())
    ring.sample(replace(RECORD, wall_ns=time.time_ns()))
    ring.document(ring.files.oom, out_of_memory())
    published = Collector(Watcher([tmp_path / "probes"])).collect([GPU])
    [watched] = published.processes
    assert watched.case is not None
    assert not watched.is_running
    assert published.by_place == {}
    [ended] = published.out_of_memory
    assert ended.gpu_uuid == RECORD.device_uuid
    assert ended.message == f"PID {GONE_PID} ran out of memory asking for 4.00 GiB at train.py:34 (python train.py)"


def test_what_ended_long_ago_is_forgotten_at_the_first_look(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", gone())
    ring.sample(RECORD)
    collector = Collector(Watcher([tmp_path / "probes"]))
    collector.collect([GPU])
    assert collector.collect([GPU]).processes == ()
    assert not ring.path.exists()


def test_the_thread_reads_when_it_is_asked_and_then_rests(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", this_process())
    ring.sample(RECORD)
    probes = LiveProbes([tmp_path / "probes"])
    probes.start()
    try:
        assert probes.latest().processes == ()
        assert not probes.is_reading
        probes.ask([GPU], None)
        wait_until(lambda: not probes.is_reading)
        first = probes.latest()
        assert [watched.pid for watched in first.processes] == [os.getpid()]
        ring.sample(replace(RECORD, step=2))
        assert probes.latest() is first, "nobody asked"
        probes.ask([GPU], first.processes[0].process.key)
        wait_until(lambda: not probes.is_reading)
        [watched] = probes.latest().processes
        assert (watched.process.step, len(watched.history)) == (2, 2)
    finally:
        probes.stop()


def test_nothing_new_is_the_same_object(tmp_path: Path) -> None:
    probes = LiveProbes([tmp_path / "nothing"])
    read = threading.Event()
    probes.subscribe(read.set)
    probes.start()
    try:
        before = probes.latest()
        probes.ask([], None)
        assert read.wait(10), "whoever waits for it hears of it anyway"
        assert not probes.is_reading
        assert probes.latest() is before
    finally:
        probes.stop()
