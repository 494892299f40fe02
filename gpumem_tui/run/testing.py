"""A fixture for pytest: a step inside of a test on a simulated GPU, to assert on the memory it takes.

Loaded by pytest as it starts: it imports nothing of torch until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

_SIMULATED = "sim:"
_ENDLESS = 1 << 62


@dataclass
class StepMemory:
    """The memory that a step took on the simulated GPU; the figures are there once its `with` block has ended.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes: as `torch.cuda` counts them.
        device_used_bytes: the peak of the whole device, as expected: what is reserved, and the CUDA context.
        buckets: bytes at the peak of the allocated memory, by key, as in `predict --json`.
    """

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    device_used_bytes: int = 0
    buckets: dict[str, int] = field(default_factory=dict)


GpuMemory = Callable[[str], AbstractContextManager[StepMemory]]


@pytest.fixture
def gpu_memory() -> GpuMemory:
    """Return what runs the code of a `with` block on a simulated GPU, which that code finds as CUDA's.

    `with gpu_memory("sim:a100-40gb") as memory: step()`, then `assert memory.device_used_bytes < 22 * 2**30`. The model
    is made inside of the block. Tensors on the device have shapes and no values. A step that does not fit
    raises `torch.OutOfMemoryError` there.
    """
    return _simulated


@contextmanager
def _simulated(gpu: str) -> Iterator[StepMemory]:
    """Run a block on a simulated GPU.

    Raises:
        pytest.UsageError: there is no such GPU, this torch cannot simulate one, or the process uses a real one.
    """
    import torch

    from gpumem_tui.catalog.loader import find_gpu
    from gpumem_tui.catalog.shapes import CatalogError
    from gpumem_tui.run.program import Program
    from gpumem_tui.simulator.allocator.profile import profile_for, too_old
    from gpumem_tui.simulator.allocator.replay import replay
    from gpumem_tui.simulator.allocator.settings import AllocatorSettings
    from gpumem_tui.simulator.cuda.presented import presented_as_cuda
    from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate

    try:
        found = find_gpu(gpu.removeprefix(_SIMULATED))
    except CatalogError as error:
        raise pytest.UsageError(f"gpu_memory: {error}") from error
    if reason := too_old(torch.__version__):
        raise pytest.UsageError(f"gpu_memory: torch {torch.__version__} {reason}; upgrade it")
    if torch.cuda.is_initialized():
        raise pytest.UsageError("gpu_memory: this process uses a real GPU already: run such tests in another one")
    profile, settings, memory = (
        profile_for(torch.__version__, found),
        AllocatorSettings.from_environment(),
        StepMemory(),
    )
    simulated = SimulatedGpu(found, profile)
    with ExitStack() as stack:
        stack.enter_context(simulate(simulated))
        stack.enter_context(presented_as_cuda(simulated))
        program = Program(simulated, torch.cuda, _ENDLESS, lambda _: None, lambda: None, lambda: None)
        program.start()
        stack.callback(program.stop)
        yield memory
        program.name_what_lives()
        run = replay(simulated.finish(), found.cuda_total_bytes - profile.context_bytes, settings)
    memory.peak_allocated_bytes, memory.peak_reserved_bytes = run.peak_allocated_bytes, run.peak_reserved_bytes
    memory.device_used_bytes = run.peak_reserved_bytes + profile.context_bytes
    memory.buckets = run.breakdown.as_json()
