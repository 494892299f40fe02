"""The schema of `monitor --json`, as readers of it may rely on it."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_COUNT = {"type": ["integer", "null"], "minimum": 0}
_NUMBER = {"type": ["number", "null"]}
_MAYBE_TEXT = {"type": ["string", "null"]}
_REASONS = {"type": "object", "additionalProperties": _TEXT}


def _object(optional: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    """All of these, perhaps the optional ones, and nothing else."""
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
        "additionalProperties": False,
    }


_BUCKETS = {"type": "object", "additionalProperties": _COUNT}
_HOST_PROCESS: dict[str, Any] = {
    "parent_pid": _COUNT,
    "user": _MAYBE_TEXT,
    "name": _MAYBE_TEXT,
    "command": _MAYBE_TEXT,
    "start_time_s": _NUMBER,
    "cpu_percent": _NUMBER,
    "resident_bytes": _COUNT,
    "container": _MAYBE_TEXT,
    "container_id": _MAYBE_TEXT,
    "pod_uid": _MAYBE_TEXT,
    "slurm_job": _MAYBE_TEXT,
    "unavailable": _REASONS,
}
_SAID: dict[str, Any] = {
    "pid": {"type": "integer"},
    "rank": _COUNT,
    "world_size": _COUNT,
    "job": _MAYBE_TEXT,
    "step": _COUNT,
    "phase": _TEXT,
    "time_s": {"type": "number"},
    "device": _TEXT,
    "device_uuid": _MAYBE_TEXT,
    "buckets": _BUCKETS,
    "peak_buckets": _BUCKETS,
    "allocated_bytes": _COUNT,
    "reserved_bytes": _COUNT,
    "peak_allocated_bytes": _COUNT,
    "peak_reserved_bytes": _COUNT,
    "inactive_split_bytes": _COUNT,
    "limit_left_bytes": _COUNT,
    "retries": _COUNT,
    "ooms": _COUNT,
    "step_s": _NUMBER,
    "age_s": _NUMBER,
    "newest_step": _COUNT,
    "newest_step_age_s": _NUMBER,
    "entry": _TEXT,
    "state": _TEXT,
    "problem": _MAYBE_TEXT,
    "unavailable": _REASONS,
}
_STOPPED = {
    "stopped_at": _object(
        phase=_MAYBE_TEXT,
        collective=_MAYBE_TEXT,
        source=_MAYBE_TEXT,
        function=_MAYBE_TEXT,
        busy={"type": "boolean"},
        waits={"type": "boolean"},
        stack={"type": "array", "items": _TEXT},
    )
}
_UNLISTED = _object(
    {**{name: kind for name, kind in _SAID.items() if name not in ("pid", "device")}, **_STOPPED},
    pid={"type": "integer"},
    device=_TEXT,
    gpu_uuid=_MAYBE_TEXT,
    process=_object(**_HOST_PROCESS),
)
_USER = _object(
    user=_MAYBE_TEXT,
    used_bytes=_COUNT,
    unread=_COUNT,
    gpus={"type": "array", "items": {"type": "integer"}},
    processes=_COUNT,
    cpu_percent=_NUMBER,
    resident_bytes=_COUNT,
)
_PROCESS = _object(
    {"probe": _object(_STOPPED, **_SAID)},
    pid={"type": "integer"},
    kind={"enum": ["C", "G", "C+G"]},
    instance=_TEXT,
    used_bytes=_COUNT,
    sm_percent=_COUNT,
    **_HOST_PROCESS,
)
_LEDGER = _object(driver_reserved=_COUNT, process=_COUNT, unaccounted=_COUNT, free=_COUNT)
_MEMORY: dict[str, Any] = {
    "total_bytes": _COUNT,
    "reserved_bytes": _COUNT,
    "used_bytes": _COUNT,
    "free_bytes": _COUNT,
    "ledger": {"anyOf": [_LEDGER, {"type": "null"}]},
    "ledger_notes": _REASONS,
    "processes": {"type": ["array", "null"], "items": _PROCESS},
    "unavailable": _REASONS,
}
_INSTANCE = _object(index={"type": "integer"}, uuid=_TEXT, name=_TEXT, **_MEMORY)
_GPU = _object(
    {
        "vendor": _TEXT,
        "vendor_index": {"type": "integer"},
        "runtime_index": {"type": "integer"},
        "partition": _TEXT,
    },
    index={"type": "integer"},
    uuid=_TEXT,
    name=_TEXT,
    bus_id=_TEXT,
    state={"enum": ["ok", "stale", "lost"]},
    state_reason=_TEXT,
    age_s={"type": "number"},
    unified={"type": "boolean"},
    mig={"type": "boolean"},
    **_MEMORY,
    utilization_percent=_COUNT,
    memory_utilization_percent=_COUNT,
    temperature_c=_COUNT,
    temperature_limit_c=_COUNT,
    power_w=_NUMBER,
    power_limit_w=_NUMBER,
    fan_percent=_COUNT,
    sm_clock_mhz=_COUNT,
    memory_clock_mhz=_COUNT,
    pcie_generation=_COUNT,
    pcie_width=_COUNT,
    pcie_rx_bytes_per_s=_COUNT,
    pcie_tx_bytes_per_s=_COUNT,
    nvlink_rx_bytes=_COUNT,
    nvlink_tx_bytes=_COUNT,
    nvlink_rx_bytes_per_s=_COUNT,
    nvlink_tx_bytes_per_s=_COUNT,
    energy_j=_NUMBER,
    ecc_corrected=_COUNT,
    ecc_uncorrected=_COUNT,
    performance_state=_COUNT,
    throttle={"type": ["array", "null"], "items": _TEXT},
    compute_capability={"type": ["array", "null"], "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    instances={"type": "array", "items": _INSTANCE},
)
_ALERT = _object(
    severity={"enum": ["note", "warning", "critical"]},
    kind={
        "enum": [
            *("no_driver", "oom", "lost", "ecc", "stale", "near_full"),
            *("growth", "stopped", "second_gpu", "hot", "throttled"),
        ]
    },
    gpu_uuid=_TEXT,
    instance=_TEXT,
    message=_TEXT,
    since_s={"type": "number"},
)
_DRIVER = _object(
    vendor=_TEXT,
    driver_version=_MAYBE_TEXT,
    runtime=_TEXT,
    runtime_version=_MAYBE_TEXT,
    problem=_TEXT,
    unavailable=_REASONS,
)
MONITOR = _object(
    {"runtime": _TEXT, "drivers": {"type": "array", "items": _DRIVER}},
    schema={"const": 1},
    time_s={"type": "number"},
    problem=_TEXT,
    driver_version=_MAYBE_TEXT,
    cuda_version=_MAYBE_TEXT,
    unavailable=_REASONS,
    host=_object(
        name=_TEXT, cpu_percent=_NUMBER, memory_used_bytes=_COUNT, memory_total_bytes=_COUNT, unavailable=_REASONS
    ),
    gpus={"type": "array", "items": _GPU},
    unlisted_probes={"type": "array", "items": _UNLISTED},
    users={"type": "array", "items": _USER},
    alerts={"type": "array", "items": _ALERT},
)
