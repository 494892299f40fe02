"""Run a program unchanged and write what its allocator held: `python measure.py RESULT.json SCRIPT [ARGUMENTS…]`.

Needs torch alone; nvidia-ml-py for the driver's figure of this process. Next to RESULT.json, when the program has
ended, is RESULT.events.json.gz, every event of the allocator: `traces`, a list for each device, of `[action, address,
size, stream, site]`; `sites`, to whose entries `site` points, the three innermost places of the program (empty in
autograd's threads); `segments` and `settings` at the end.
"""

from __future__ import annotations

import atexit
import gzip
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

_HERE = os.path.abspath(__file__)
_MOST_EVENTS = 2_000_000
_FRAMES = 3
_KINDS = ("requested", "allocated", "reserved")


def start() -> None:
    """Create the context, then let every peak and the history begin."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python", context="alloc")


def own_bytes() -> dict[str, Any]:
    """The driver's figures of this process and of its GPU, or why they are missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        processes = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        used = {"used": memory.used, "total": memory.total, "driver": memory.reserved}
        return {**used, "own": processes.get(os.getpid()), "processes": len(processes)}
    except Exception as error:  # noqa: BLE001  the allocator's figures stand without the driver's
        return {"error": f"{type(error).__name__}: {error}"}


def finish(path: str, began_s: float) -> None:
    """Write the figures, then the history: the figures are there even if that fails."""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  after a failed kernel nothing synchronizes
        print(f"measure: {error}", file=sys.stderr)
    stats = torch.cuda.memory_stats()
    driver = own_bytes()
    found = {kind: stats.get(f"{kind}_bytes.all.peak", 0) for kind in _KINDS}
    reserved_at_end = torch.cuda.memory_reserved()
    own = driver.get("own")
    found.update(
        reserved_at_end=reserved_at_end,
        beside_allocator=own - reserved_at_end if own else 0,
        retries=stats.get("num_alloc_retries", 0),
        seconds=time.time() - began_s,
        torch=str(torch.__version__),
        gpu=torch.cuda.get_device_name(),
        driver=driver,
    )
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file)
    packed = json.dumps(history(torch.cuda.memory._snapshot()), separators=(",", ":")).encode()
    with gzip.GzipFile(f"{path.removesuffix('.json')}.events.json.gz", "wb", 6, mtime=0) as file:
        file.write(packed)


def history(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The kept parts of a snapshot: numbers, and places in the program."""
    sites: dict[str, int] = {}

    def site(event: Mapping[str, Any]) -> int:
        frames = [frame for frame in event.get("frames", ()) if _is_of_the_program(frame["filename"])]
        text = " < ".join(f"{os.path.basename(f['filename'])}:{f['line']}:{f['name']}" for f in frames[:_FRAMES])
        return sites.setdefault(text, len(sites))

    traces = [
        [[e["action"], e.get("addr", e.get("device_free")), e["size"], e["stream"], site(e)] for e in trace]
        for trace in snapshot["device_traces"]
    ]
    keys = ("device", "address", "total_size", "stream", "segment_type")
    segments = [
        {key: segment[key] for key in keys if key in segment}
        | {"blocks": [[block["size"], block.get("requested_size"), block["state"]] for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    return {
        "settings": snapshot.get("allocator_settings"),
        "sites": list(sites),
        "traces": traces,
        "segments": segments,
    }


def _is_of_the_program(filename: str) -> bool:
    return filename != _HERE and not filename.startswith("<frozen")


if __name__ == "__main__":
    _result, _script, *_arguments = sys.argv[1:]
    _began_s = time.time()
    start()
    atexit.register(finish, _result, _began_s)
    sys.argv = [_script, *_arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(_script))
    runpy.run_path(_script, run_name="__main__")
