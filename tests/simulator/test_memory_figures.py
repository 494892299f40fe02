"""The simulated GPU's allocator figures, apart from PyTorch's own of CUDA."""

from __future__ import annotations

import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.step.cuda_history import HistoryNotes
from tests.cuda_standin import cuda_played
from tests.in_process import as_cuda


def test_its_figures_have_pytorchs_names_and_count_as_it_does() -> None:
    with cuda_played() as cuda:
        assert torch.cuda.memory_stats() == {}
        cuda.allocate(512)
        names = set(torch.cuda.memory_stats())
    shape = find_gpu("a100-80gb")
    with as_cuda(SimulatedGpu(shape, profile_for(torch.__version__, shape))):
        before = torch.cuda.memory_stats()
        notes = HistoryNotes(torch.device("cuda", 0))
        kept = torch.empty(100, device="cuda")
        torch.empty(100, device="cuda")
        after = torch.cuda.memory_stats()
        notes.add(bucket=Bucket.PARAMETERS)
        del kept
    assert before.keys() == after.keys()
    assert set(after) <= names
    assert not any(value for name, value in before.items() if name != "max_split_size")
    counts = {name: after[f"allocation.all.{name}"] for name in ("current", "allocated", "freed")}
    assert counts == {"current": 1, "allocated": 2, "freed": 1}
    assert [note.position for note in notes.notes] == [3]
