"""Measures, stage by stage in a child process, what CUDA takes of a GPU outside PyTorch's allocator."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date

import msgspec

from gpumem_tui.catalog.calibration import Calibration
from gpumem_tui.decoding import decodable
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import RealGpu, list_gpus

_CHILD = r"""
import json, sys, tempfile

def reached(stage, error=""):
    import torch
    if not error:
        torch.cuda.synchronize()
    facts = {"stage": stage, "reserved": torch.cuda.memory_reserved(), "torch": torch.__version__, "error": error}
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()

def context():
    torch.zeros(1, device="cuda")

def blas():
    weights = torch.ones(256, 256, device="cuda", requires_grad=True)
    torch.nn.functional.softmax(weights @ weights, -1).sum().backward()
    half = torch.ones(256, 256, device="cuda", dtype=torch.float16)
    torch.nn.functional.linear(half, half, half[0])

def dnn():
    layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    layer(torch.ones(2, 64, 32, 32, device="cuda")).sum().backward()

def nccl():
    import torch.distributed as dist
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        reached("NCCL")
        dist.destroy_process_group()

import torch
for stage, run in (("context", context), ("cuBLAS", blas), ("cuDNN", dnn)):
    run()
    reached(stage)
if sys.argv[1] == "all":
    try:
        nccl()
    except Exception as error:
        reached("NCCL", f"{type(error).__name__}: {error}")
"""


class _Reached(msgspec.Struct):
    """A stage of the child, as it prints it; `reserved`: what its allocator holds then."""

    stage: str
    reserved: int
    torch: str
    error: str = ""


_PATIENCE_S = 120.0
"""A child that gives nothing for so long is ended: CUDA's first call takes seconds, and with all kernels some more."""


class NotCalibrated(Exception):
    """A GPU that cannot be measured now: one line that gives the reason and what to do."""


def calibrate(gpu: RealGpu, driver: str, python: str, say: Callable[[str], None]) -> Calibration:
    """Measure a GPU that nobody uses: once with kernels loaded as they are needed, once with all of them.

    Args:
        gpu: as it was before: what it used then is not counted.
        driver: its version.
        python: the interpreter that has torch.
        say: called with a line for each stage.

    Raises:
        NotCalibrated: others use the GPU, or the child fails.
    """
    if not gpu.is_free:
        raise NotCalibrated(
            f"GPU {gpu.index} is in use: what a new process takes cannot be told from the others; try when it is free"
        )
    stages: dict[str, int] = {}
    torch_version = ""
    for reached, beside_bytes in _stages(gpu, python, "all", {}):
        torch_version = reached.torch
        if reached.error:
            say(f"{reached.stage} not measured: {reached.error.splitlines()[0]}")
            continue
        stages[reached.stage] = beside_bytes
        say(f"{reached.stage}: {beside_bytes / (1 << 20):,.0f} MiB outside the allocator")
    eager = [beside_bytes for _, beside_bytes in _stages(gpu, python, "some", {"CUDA_MODULE_LOADING": "EAGER"})]
    if eager:
        say(f"all kernels loaded at the start: {max(eager) / (1 << 20):,.0f} MiB")
    if not stages or min(stages.values()) <= 0:
        raise NotCalibrated(
            "the driver does not report used memory here; give the figure by hand: `--context-bytes 500MiB`"
        )
    return Calibration(
        gpu=gpu.name,
        total_bytes=gpu.total_bytes,
        driver=driver,
        torch=torch_version,
        measured=date.today().isoformat(),
        stages=stages,
        eager_bytes=max(eager, default=None),
    )


def _stages(gpu: RealGpu, python: str, which: str, environment: dict[str, str]) -> Iterator[tuple[_Reached, int]]:
    """Yield what the child reports at each stage, with the bytes that are used outside its allocator then.

    Raises:
        NotCalibrated: it fails before the first stage ends, or gives nothing for long.
    """
    seen = {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_MODULE_LOADING": "LAZY"}
    try:
        child = subprocess.Popen(
            [python, "-c", _CHILD, which],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **seen, **environment},
        )  # fmt: skip
    except OSError as error:
        raise NotCalibrated(f"{python} cannot be run: {error.strerror}") from error
    with _ended(child):
        assert child.stdin is not None
        assert child.stdout is not None
        reached = 0
        for line in child.stdout:
            with suppress(msgspec.DecodeError):
                stage = msgspec.json.decode(line, type=decodable(_Reached))
                reached += 1
                yield stage, _used_bytes(gpu) - gpu.used_bytes - stage.reserved
            with suppress(OSError):
                child.stdin.write("\n")
                child.stdin.flush()
        if not reached:
            said = child.stderr.read().strip().splitlines() if child.stderr is not None else []
            why = said[-1] if said else "it printed nothing"
            raise NotCalibrated(f"{python} did not reach CUDA: {why}; see `gpumem-tui doctor --python {python}`")


@contextmanager
def _ended(child: subprocess.Popen[str]) -> Iterator[None]:
    """End a child that is silent for long, and at the end of the block in any case."""
    from threading import Timer

    timer = Timer(_PATIENCE_S, child.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        child.kill()
        child.communicate()


def _used_bytes(gpu: RealGpu) -> int:
    found = list_gpus()
    if isinstance(found, Unknown):
        raise NotCalibrated(found.reason)
    now = next((one for one in found if one.uuid == gpu.uuid), None)
    if now is None:
        raise NotCalibrated(f"GPU {gpu.index} no longer answers; see `gpumem-tui doctor`")
    if len(now.pids) > 1:
        raise NotCalibrated(f"GPU {gpu.index} is in use by another process since; try when it is free")
    return now.used_bytes
