"""Steps of unusual kinds, held to a count of the same step's storages on the CPU, which knows nothing of a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpumem_tui.importing import Uncollected
from gpumem_tui.simulator.allocator.timeline import rounded
from tests.in_process import as_cuda
from tests.simulator.simulated_steps import CUBLAS_WORKSPACE_BYTES, simulated_gpu

WIDTH, ROWS = 512, 256


class Count(TorchDispatchMode):
    """Adds up the storages that operators have made and that are still there, rounded as an allocator does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes, self.peak_bytes = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._take(tensor.untyped_storage())
        return made

    def _take(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, rounded(storage.nbytes())
        self._known.add(key)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key, size_bytes)

    def _release(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size_bytes


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: complex weights on the lower half of the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 4, WIDTH // 4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(x)
        made: torch.Tensor = torch.fft.irfft(found[:, : WIDTH // 4] @ self.weight, n=WIDTH)
        return made


class Block(nn.Module):
    """Takes a number and a mask by name, as blocks that are checkpointed do."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float, mask: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = self.narrow(torch.tanh(self.wide(x))) * scale
        return made if mask is None else made * mask


def complex_step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def checkpointed_step(model: nn.Module, x: torch.Tensor) -> None:
    mask = torch.ones(ROWS, 1, device=x.device)
    for block in model.children():
        x = checkpoint(block, x, scale=0.5, mask=mask, use_reentrant=False, preserve_rng_state=False)
    x.sum().backward()


def per_sample_step(model: nn.Module, x: torch.Tensor) -> None:
    """As differentially private training: the gradient of each sample, clipped, and their mean."""
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(model, weights, (row[None],))
        return made.square().sum()

    of_each = vmap(grad(loss), in_dims=(None, 0))(weights, x[:16])
    for name, one in model.named_parameters():
        one.grad = of_each[name].mean(0)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], None], torch.dtype]] = {
    "complex": (lambda: nn.Sequential(Spectral(), nn.Tanh(), Spectral()), complex_step, torch.float32),
    "float64": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double(),
        complex_step,
        torch.float64,
    ),
    "checkpoint with keywords": (lambda: nn.Sequential(Block(), Block(), Block()), checkpointed_step, torch.float32),
    "vmap of grad": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), per_sample_step, torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_what_its_storages_are(kind: str) -> None:
    make, step, dtype = KINDS[kind]

    def trained(place: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make().to(place)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(2):
            step(model, torch.randn(ROWS, WIDTH, dtype=dtype, device=place))
            optimizer.step()
        return model, optimizer

    gc.collect()
    with Uncollected(), Count() as count:  # what is in cycles stays in both
        kept = trained("cpu")
        counted = count.live_bytes, count.peak_bytes
    gpu = simulated_gpu()
    gc.collect()
    with Uncollected(), as_cuda(gpu):
        kept = trained("cuda")
        stats = gpu.allocator.stats
        found = stats.allocated_bytes, stats.peak_allocated_bytes
    on_the_host = sum(rounded(state["step"].nbytes) for state in kept[1].state.values())
    workspaces = 2 * CUBLAS_WORKSPACE_BYTES  # of forward and of backward
    assert found == tuple(counted_bytes - on_the_host + workspaces for counted_bytes in counted)
