"""Ranks on another rank's GPU (pytorch/pytorch#49481): an alert for each such job, and for nothing by design."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumem_tui.memory import GIB, MIB, Unknown, Value
from gpumem_tui.monitor.alerts import Alert, AlertKind, Alerts, NewAlerts, Severity
from gpumem_tui.monitor.metrics import Machine, metrics
from gpumem_tui.monitor.ranks import other_ranks
from gpumem_tui.monitor.snapshot import DeviceState, GpuProcess, HostProcess, ProcessKind, Snapshot
from tests.monitor.snapshots import START_S, gpu, machine, process

CONTEXT = 871 * MIB
LAUNCHER = 300
REMEDY = ": torch.cuda.set_device(local_rank) before the first CUDA call"


def held(
    pid: int, sizes: Mapping[int, Value], *, kind: ProcessKind = ProcessKind.COMPUTE, **of: Any
) -> dict[int, GpuProcess]:
    """A process's shares by the GPU's index. `of`: how its `HostProcess` is another than torchrun's rank."""
    known = process(pid, 0).host
    assert isinstance(known, HostProcess)
    host = replace(known, **{"parent_pid": LAUNCHER, "command": "python -u train.py --lr 0.1", **of})
    return {index: process(pid, size, host=host, kind=kind) for index, size in sizes.items()}


def seen(*processes: Mapping[int, GpuProcess], after_s: float = 0.0) -> Snapshot:
    """A machine of four GPUs with these."""
    listed = [tuple(shares[index] for shares in processes if index in shares) for index in range(8)]
    return machine([gpu(index, processes=each) for index, each in enumerate(listed)], after_s=after_s)


def ranks(count: int = 8, **of: Any) -> list[dict[int, GpuProcess]]:
    """A job whose every rank has its context on GPU 0 too."""
    return [held(400 + rank, {0: CONTEXT, rank: 4 * GIB} if rank else {0: 4 * GIB}, **of) for rank in range(count)]


def alerts(snapshot: Snapshot) -> list[Alert]:
    return [each for each in Alerts().update(snapshot) if each.kind is AlertKind.SECOND_GPU]


def messages(*processes: Mapping[int, GpuProcess]) -> list[str]:
    return [each.message for each in alerts(seen(*processes))]


def test_every_rank_with_a_context_on_gpu_0_is_one_warning() -> None:
    (alert,) = alerts(seen(*ranks()))
    assert alert.message == f"7 other ranks hold 5.95 GiB on GPU 0{REMEDY}"
    assert (alert.severity, alert.gpu_uuid) == (Severity.WARNING, gpu(0).uuid)


def test_of_two_ranks_one_holds() -> None:
    assert messages(*ranks(2)) == [f"1 other rank holds 0.85 GiB on GPU 0{REMEDY}"]


def test_sizes_that_the_driver_does_not_say_leave_how_many_on_it() -> None:
    unknown = Unknown("not supported")
    job = [held(1, {0: unknown}), held(2, {0: unknown, 1: unknown}), held(3, {0: unknown, 2: unknown})]
    assert messages(*job) == [f"2 other ranks hold memory on GPU 0{REMEDY}"]


def test_every_rank_on_every_gpu_is_one_warning_still() -> None:
    job = [held(rank, {index: GIB * (9 if index == rank else 1) for index in range(3)}) for rank in range(3)]
    assert messages(*job) == [f"2 other ranks hold 2.00 GiB on GPU 0, as on 2 more{REMEDY}"]


_SPAWNED = "python -c … spawn_main(tracker_fd=5, pipe_handle=%d) --multiprocessing-fork"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({}, {}, id="torchrun"),
        pytest.param({"command": "python t.py --local_rank=0"}, {"command": "python t.py --local_rank=1"}, id="launch"),
        pytest.param({"command": _SPAWNED % 7}, {"command": _SPAWNED % 9}, id="spawn"),
        pytest.param({"command": "VLLM::Worker_TP0"}, {"command": "VLLM::Worker_TP1"}, id="titles"),
        pytest.param(
            {"parent_pid": 9, "command": "python3 t.py --lr 1"},
            {"parent_pid": 1, "command": "/env/bin/python3.11 /home/ada/t.py --lr 1 hydra.job.name=ddp_1"},
            id="Lightning's rank 0 is the parent",
        ),
        pytest.param({"parent_pid": 20}, {"parent_pid": 21, "start_time_s": START_S - 590}, id="a shell for each rank"),
        pytest.param({"parent_pid": 1}, {"parent_pid": 1}, id="the launcher is gone"),
    ],
)
def test_launchers(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert len(messages(held(1, {0: 4 * GIB}, **first), held(2, {0: CONTEXT, 1: 4 * GIB}, **second))) == 1


_TWO = {0: 9 * GIB, 1: 8 * GIB}
_AUTO: dict[str, Any] = {"parent_pid": 20, "command": "python generate.py"}


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param([held(400 + rank, {rank: 4 * GIB}) for rank in range(8)], id="the fault is mended"),
        pytest.param(
            [held(job + rank, {rank: 4 * GIB}, parent_pid=job) for job in (10, 20) for rank in range(4)],
            id="two jobs share GPUs",
        ),
        pytest.param([held(1, _TWO, **_AUTO)], id="one process on two GPUs"),
        pytest.param([held(1, _TWO, **_AUTO), held(2, _TWO, **_AUTO)], id="two that are spread alike"),
        pytest.param([held(1, _TWO, **_AUTO), *(held(9 + rank, {rank: GIB}) for rank in range(2))], id="next to a job"),
        pytest.param([held(1, _TWO), held(2, {1: GIB}, user="bob")], id="another user's"),
        pytest.param([held(1, _TWO, container_id="a"), held(2, {1: GIB}, container_id="b")], id="another container's"),
        pytest.param([held(1, _TWO, slurm_job="1"), held(2, {1: GIB}, slurm_job="2")], id="another Slurm job's"),
        pytest.param(
            [
                held(pid, sizes, command=f"python -m ipykernel_launcher -f kernel-{pid}.json")
                for pid, sizes in ((1, _TWO), (2, {1: GIB}))
            ],
            id="notebooks of one server",
        ),
        pytest.param(
            [held(1, _TWO, command="python serve.py --port 1"), held(2, {1: GIB}, command="python serve.py --port 2")],
            id="servers of one shell",
        ),
        pytest.param(
            [
                held(1, _TWO, command="python t.py --lora_rank 8"),
                held(2, {1: GIB}, command="python t.py --lora_rank 4"),
            ],
            id="another setting",
        ),
        pytest.param(
            [held(1, _TWO, **_AUTO), held(2, {1: GIB}, **{**_AUTO, "parent_pid": 21, "start_time_s": START_S})],
            id="the same later, of another shell",
        ),
        pytest.param(
            [held(pid, sizes, command="python", parent_pid=pid + 50) for pid, sizes in ((1, _TWO), (2, {1: GIB}))],
            id="two interpreters",
        ),
        pytest.param(
            [held(pid, sizes, command=_SPAWNED % 7, parent_pid=pid + 50) for pid, sizes in ((1, _TWO), (2, {1: GIB}))],
            id="children of two programs",
        ),
        pytest.param([held(1, _TWO, command="python"), held(2, {1: GIB}, parent_pid=1)], id="started by a session"),
        pytest.param(
            [held(rank, {2 * rank: 4 * GIB, 2 * rank + 1: 3 * GIB}) for rank in range(4)], id="two GPUs a rank"
        ),
        pytest.param([held(1, {0: GIB}), held(2, {1: GIB, 5: 2 * MIB})], id="a GPU of no rank"),
        pytest.param([held(1, {0: GIB}), held(2, {1: GIB, 0: 0})], id="nothing held"),
        pytest.param(
            [held(pid, {0: MIB * pid, 1: MIB * (9 - pid)}, kind=ProcessKind.GRAPHICS) for pid in (1, 8)], id="drawing"
        ),
    ],
)
def test_nothing_by_design_is_an_alert(processes: list[dict[int, GpuProcess]]) -> None:
    assert messages(*processes) == []


def test_who_is_not_known_is_of_no_job() -> None:
    unknown = Unknown("pid 2 is of another namespace")
    listed = [(process(1, GIB, host=unknown), process(2, GIB, host=unknown)), (process(2, 9 * GIB, host=unknown),)]
    assert alerts(machine([gpu(index, processes=each) for index, each in enumerate(listed)])) == []


def test_it_begins_once_stays_where_it_began_and_ends_with_its_job() -> None:
    judge, new, begun = Alerts(), NewAlerts(), []
    ring = [held(1, {0: 9 * GIB}), held(2, {1: 9 * GIB}), held(3, {1: GIB, 2: 9 * GIB}), held(4, {2: GIB, 3: 9 * GIB})]
    more = [held(1, {0: 9 * GIB, 3: GIB}), held(2, {0: GIB, 1: 9 * GIB}), *ring[2:]]
    for second, processes in enumerate([ring[:2], ring, ring, more, ring[:2]]):
        found = judge.update(seen(*processes, after_s=second))
        begun += [(second, each.message) for each in new.begun(START_S + second, found, {})]
    assert begun == [(1, f"1 other rank holds 1.00 GiB on GPU 1, as on 1 more{REMEDY}")]
    assert found == ()


def test_a_main_gpu_that_cannot_be_read_for_a_while_does_not_end_it() -> None:
    judge, snapshot = Alerts(), seen(*ranks(2))
    assert judge.update(snapshot)
    for changes in ({"processes": Unknown("timed out")}, {"state": DeviceState.STALE, "state_reason": "it hangs"}):
        silent = (snapshot.gpus[0], replace(snapshot.gpus[1], **changes), *snapshot.gpus[2:])
        later = judge.update(replace(snapshot, gpus=silent, time_s=START_S + 20))
        assert AlertKind.SECOND_GPU in [each.kind for each in later]


def test_of_two_jobs_on_a_gpu_the_worse_is_told() -> None:
    other = [held(900 + rank, {0: CONTEXT, rank: 4 * GIB} if rank else {0: GIB}, parent_pid=8) for rank in range(3)]
    assert [len(job[0].processes) for job in other_ranks(seen(*ranks(), *other).gpus)] == [7, 2]
    assert messages(*ranks(), *other) == [f"7 other ranks hold 5.95 GiB on GPU 0{REMEDY}"]


def test_prometheus_has_how_many_are_on_each_gpu() -> None:
    found = {
        sample.labels["gpu"]: sample.value
        for family in metrics([Machine("a", seen(*ranks()))])
        for sample in family.samples
        if sample.name == "gpumem_gpu_other_ranks"
    }
    assert found == {"0": 7, **{str(index): 0 for index in range(1, 8)}}
