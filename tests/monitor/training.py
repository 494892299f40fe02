"""A machine on which ranks of a job train, as the metrics see it."""

from __future__ import annotations

from typing import Any

from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB
from gpumem_tui.monitor.metrics import Machine
from gpumem_tui.monitor.probes import ProbeReport
from tests.monitor.snapshots import gpu, machine


def sample(pid: int = 4000, rank: int | None = 0, **changes: Any) -> dict[str, Any]:
    """The lines of `watch.report` on a rank."""
    return {
        "pid": pid,
        "rank": rank,
        "world_size": 2,
        "job": "slurm 4711",
        "step": 100,
        "device": "cuda:0",
        "buckets": {bucket.value: GIB for bucket in ALLOCATED_BUCKETS},
        "peak_buckets": {bucket.value: 2 * GIB for bucket in ALLOCATED_BUCKETS},
        "allocated_bytes": 4 * GIB,
        "reserved_bytes": 5 * GIB,
        "peak_allocated_bytes": 8 * GIB,
        "peak_reserved_bytes": 9 * GIB,
        "inactive_split_bytes": GIB,
        "retries": 1,
        "ooms": 0,
        "step_s": 0.25,
        "age_s": 0.1,
        "newest_step": changes.get("step", 100),
        "newest_step_age_s": 0.05,
        **changes,
    }


def machine_that_trains(host: str = "node-1", *samples: dict[str, Any]) -> Machine:
    """Two GPUs, two ranks; or other samples, all on the first GPU."""
    first, second = gpu(0, throttle=("hot",)), gpu(1)
    listed = (
        {(first.uuid, each["pid"]): each for each in samples}
        if samples
        else {(first.uuid, 4000): sample(), (second.uuid, 4001): sample(4001, 1, step=98)}
    )
    return Machine(host, machine([first, second], calls={"nvmlInit": 1}), ProbeReport(said=listed))
