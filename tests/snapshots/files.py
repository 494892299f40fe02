"""Snapshots as versions of PyTorch write them, made by hand; recordings of real ones are in another test."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

from gpumem_tui.memory import GIB, MIB

BASE = 0x7F0000000000
SECOND = BASE + 64 * GIB
MODEL = [
    {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", "line": 1343, "name": "convert"},
    {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", "line": 928, "name": "_apply"},
    {"filename": "/home/ada/train.py", "line": 4, "name": "<module>"},
]
FORWARD = [
    {"filename": "/build/aten/src/ATen/native/Linear.cpp", "line": 0, "name": "at::native::linear"},
    {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
    {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", "line": 1762, "name": "_call_impl"},
    {"filename": "/home/ada/model.py", "line": 12, "name": "forward"},
    {"filename": "/home/ada/train.py", "line": 9, "name": "<module>"},
]
BACKWARD = [{"filename": "/build/torch/csrc/autograd/engine.cpp", "line": 0, "name": "torch::autograd::Engine::run"}]
OPTIMIZER = [
    {"filename": "/venv/lib/python3.11/site-packages/torch/optim/adamw.py", "line": 1, "name": "_init_group"},
    {"filename": "/home/ada/train.py", "line": 11, "name": "<module>"},
]


Frames = list[dict[str, Any]]


def event(action: str, address: int, size: int, frames: Frames | None = None, **more: Any) -> dict[str, Any]:
    """An entry of a trace of torch 2.13."""
    entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0, "compile_context": "N/A"}
    entry.update({"user_metadata": "", "frames": list(frames or []), **more})
    return entry


def block(address: int, size: int, state: str, frames: Frames | None = None) -> dict[str, Any]:
    """A block of a segment."""
    requested = 0 if state == "inactive" else size
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": list(frames or [])}


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0, **more: Any) -> dict[str, Any]:
    """A segment that its blocks fill; PyTorch makes the id of its pool anew for each."""
    size, pool = sum(one["size"] for one in blocks), [0, 0]
    found = {"device": device, "address": address, "total_size": size, "allocated_size": 0, "active_size": 0}
    found |= {"requested_size": 0, "stream": 0, "segment_type": "large", "segment_pool_id": tuple(pool)}
    return {**found, "is_expandable": False, "frames": [], "blocks": blocks, **more}


def body(events: list[dict[str, Any]], segments: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """A snapshot of one device."""
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False, **settings}
    return {
        "segments": segments,
        "device_traces": [events],
        "allocator_settings": allocator,
        "external_annotations": [],
    }


def training() -> dict[str, Any]:
    """40 MiB of parameters from before the recording, activations that come and go, state that stays: peak 100 MiB."""
    activation, gradient, state = BASE + 40 * MIB, BASE + 70 * MIB, SECOND
    events = [
        event("alloc", activation, 30 * MIB, FORWARD, time_us=1_000_000),
        event("alloc", gradient, 30 * MIB, BACKWARD, time_us=1_100_000),
        event("free_requested", activation, 30 * MIB, time_us=1_200_000),
        event("free_completed", activation, 30 * MIB, time_us=1_200_000),
        event("segment_alloc", SECOND, 20 * MIB, OPTIMIZER, time_us=1_300_000),
        event("alloc", state, 8 * MIB, OPTIMIZER, time_us=1_400_000),
        event("free_requested", gradient, 30 * MIB, time_us=1_500_000),
        event("free_completed", gradient, 30 * MIB, time_us=1_500_000),
    ]
    first = [block(BASE, 40 * MIB, "active_allocated", MODEL), block(BASE + 40 * MIB, 60 * MIB, "inactive")]
    second = [block(state, 8 * MIB, "active_allocated", OPTIMIZER), block(state + 8 * MIB, 12 * MIB, "inactive")]
    return body(events, [segment(BASE, first), segment(SECOND, second)])


def fragmented() -> dict[str, Any]:
    """Four segments of 100 MiB, each with 10 MiB in use in its middle; 150 MiB wanted, and the driver has 50 left."""
    segments, events = [], []
    for number in range(4):
        start = BASE + number * GIB
        segments.append(
            segment(
                start,
                [
                    block(start, 45 * MIB, "inactive"),
                    block(start + 45 * MIB, 10 * MIB, "active_allocated", FORWARD),
                    block(start + 55 * MIB, 45 * MIB, "inactive"),
                ],
            )
        )
        events.append(event("alloc", start + 45 * MIB, 10 * MIB, FORWARD))
    oom = event("oom", 0, 150 * MIB, FORWARD, device_free=50 * MIB)
    del oom["addr"]
    return body([*events, oom], segments)


def written(folder: Path, snapshot: Any, name: str = "snapshot.pickle", protocol: int = 4) -> Path:
    """A file of it: a pickle, or JSON by its name, gzipped by its name."""
    data = json.dumps(snapshot).encode() if ".json" in name else pickle.dumps(snapshot, protocol=protocol)
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path
