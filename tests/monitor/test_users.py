"""Who holds how much, on one machine and on several, on the CPU too."""

from __future__ import annotations

import os
import pwd
from typing import Any

import pytest
from msgspec.structs import replace

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.monitor.processes import HostProcesses
from gpumem_tui.monitor.report import snapshot_json, table
from gpumem_tui.monitor.snapshot import GpuProcess, HostProcess, Instance, UnlistedProcess
from gpumem_tui.monitor.users import is_of, only_of, user_totals, users_lines, viewer
from tests.monitor.snapshots import gpu, machine, memory, printed, process


def _host(pid: int, user: str, **changes: Any) -> HostProcess:
    known = process(pid, 0).host
    assert isinstance(known, HostProcess)
    return replace(known, user=user, **changes)


def _of(user: str, pid: int, used_bytes: int | Unknown, **changes: Any) -> GpuProcess:
    return process(pid, used_bytes, host=_host(pid, user), **changes)


BOTH = machine(
    [
        gpu(0, processes=(_of("ada", 1, 9 * GIB), _of("bob", 2, 3 * GIB))),
        gpu(1, processes=(_of("ada", 1, 8 * GIB), _of("ada", 3, Unknown("not available")))),
        gpu(2, processes=Unknown("no permission")),
        gpu(3, processes=(process(9, GIB, host=Unknown("pid 9 is hidden from this user")),)),
    ],
    unlisted=(UnlistedProcess(5, "cpu", _host(5, "bob")),),
)


def test_each_user_has_what_his_processes_hold_and_who_holds_most_is_first() -> None:
    ada, bob, hidden = user_totals({"box": BOTH})
    assert (ada.user, ada.used_bytes, ada.unread, ada.gpus) == ("ada", 17 * GIB, 1, (("box", 0), ("box", 1)))
    assert (ada.processes, ada.cpu_percent, ada.resident_bytes) == (2, 200.0, 8 * GIB), "one on two GPUs is one"
    assert (bob.user, bob.used_bytes, bob.unread, bob.gpus) == ("bob", 3 * GIB, 0, (("box", 0),))
    assert (bob.processes, bob.resident_bytes) == (2, 8 * GIB), "that on the CPU is one of them"
    assert (hidden.user, hidden.used_bytes, hidden.processes) == (None, GIB, 1)


def test_one_users_processes_alone_and_what_their_probes_say() -> None:
    probes = ProbeReport(said={("cpu", 5): {"device": "cpu"}, ("cpu", 6): {"device": "cpu"}, (gpu(0).uuid, 1): {}})
    snapshot, said = only_of("bob", BOTH, probes)
    listed = [[each.pid for each in one.processes] for one in snapshot.gpus if isinstance(one.processes, tuple)]
    assert listed == [[2], [], []]
    assert [each.pid for each in snapshot.unlisted] == [5]
    assert list(said.said) == [("cpu", 5)]
    assert snapshot.gpus[0].ledger == BOTH.gpus[0].ledger, "the device's memory stays whole"
    body = printed(snapshot_json(snapshot, (), said))
    assert [each["user"] for each in body["users"]] == ["bob"]
    assert [each["pid"] for each in body["unlisted_probes"]] == [5]


def test_who_watches_is_who_called_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert viewer() == "root"
    monkeypatch.setenv("SUDO_UID", str(pwd.getpwnam("nobody").pw_uid))
    assert viewer() == "nobody"
    monkeypatch.setenv("SUDO_UID", "4000000")
    assert viewer() == "4000000"


def test_who_has_no_name_on_this_machine_owns_what_he_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unnamed)
    assert is_of(viewer(), HostProcesses(known_here=True).look([os.getpid()])[os.getpid()])


def test_what_a_first_look_cannot_tell_is_not_known_rather_than_nothing() -> None:
    first = _host(1, "ada", cpu_percent=Unknown("needs a second look"))
    snapshot = machine([gpu(0, processes=(replace(process(1, GIB), host=first),))])
    [ada] = user_totals({"box": snapshot})
    assert ada.cpu_percent is None
    assert list(users_lines([ada], several=False))[1].split()[5] == "–"
    assert printed(snapshot_json(snapshot))["users"][0]["cpu_percent"] is None


def test_the_table_of_one_reading_has_what_trains_on_the_cpu_and_on_a_gpu_that_does_not_list_it() -> None:
    snapshot = replace(BOTH, unlisted=(*BOTH.unlisted, UnlistedProcess(6, "cuda:0", _host(6, "eve"), gpu(1).uuid)))
    rows = [line.split() for line in table(snapshot, ())]
    assert [row[:3] for row in rows if row[1:2] in (["5"], ["6"])] == [["cpu", "5", "bob"], ["1", "6", "eve"]]


def test_over_several_hosts_a_pid_is_another_process_on_each() -> None:
    ada, bob, _ = user_totals({"a": BOTH, "b": BOTH})
    assert (ada.used_bytes, ada.processes, len(ada.gpus)) == (34 * GIB, 4, 4)
    heading, first, *_ = users_lines([ada, bob], several=True)
    assert heading.split() == ["USER", "GPU", "MEM", "GPUS", "PROCESSES", "CPU%", "HOST", "MEM", "ON"]
    assert "≥ 34.00 GiB" in first, "of one process it is not known"
    assert first.endswith("a 0–1 · b 0–1")


def test_processes_of_instances_count_once() -> None:
    inside = _of("ada", 1, GIB, instance="MIG-1")
    part = Instance(0, "MIG-1", "1g.10gb", memory(GIB, 10 * GIB), (inside,), Unknown("not of interest"))
    [ada] = user_totals({"box": machine([gpu(0, mig=True, processes=(inside,), instances=(part,))])})
    assert (ada.used_bytes, ada.processes) == (GIB, 1)


def test_the_table_of_one_reading_ends_with_users_where_there_are_several() -> None:
    lines = list(table(BOTH, ()))
    assert [line.split()[0] for line in lines[-4:]] == ["USER", "ada", "bob", "not"]
    alone = machine([gpu(0, processes=(_of("ada", 1, GIB),))])
    assert not any(line.startswith("USER") for line in table(alone, ()))
