"""Training over several GPUs with FSDP2 that others measured: torchtitan's Llama 3.1 8B, as it was in December 2024.

`python -m tests.published.sharded` prints what each row reserves, with FSDP2's streams and as if there were one stream
only. torchtitan's run_train.sh sets expandable segments, by which torchao's developers ran their rows; its launcher for
several hosts (multinode_trainer.slurm) does not, and the figures of torchtitan's own page are met without.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from tests.in_process import as_cuda, world

_WIDTH, _HIDDEN, _HEADS, _GROUPS, _LAYERS, _WORDS = 4096, 14336, 32, 8, 32, 128_256
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings.parse("expandable_segments:True")}
_STEPS = 2
"""From the second on gradients and optimizer states are there."""


WHY = "the page states neither its commit nor how the allocator was set"


@dataclass(frozen=True)
class Row:
    """A published figure: GiB reserved at the peak, to so many decimals.

    Attributes:
        recompute: "op": selected operators in each layer are kept; otherwise every how many layers one is recomputed
            as a whole, 0 for none.
        settings: of the allocator.
        tolerance_percent: how far what is reserved may be off.
    """

    id: str
    source: str
    gpus: int
    batch_size: int
    sequence: int
    recompute: str
    reserved_gib: float
    settings: str
    tolerance_percent: float


_TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md@31a17bfd"
_NOCOMPILE = "pytorch/ao torchao/prototype/float8nocompile/README.md@105f1ad7"
_TORCH = "2.6.0"
"""The torch of that time, so that attention takes the kernel that came first."""
ROWS = (
    Row("titan-1", _TITAN, 8, 2, 8192, "op", 82.4, "default", 0.2),
    Row("titan-4", _TITAN, 128, 2, 8192, "op", 67.0, "default", 0.8),
    Row("ao-nocompile-1", _NOCOMPILE, 8, 1, 4096, "0", 53.12, "expandable", 0.1),
    Row("ao-nocompile-2", _NOCOMPILE, 8, 1, 4096, "2", 40.6, "expandable", 0.1),
    Row("ao-nocompile-3", _NOCOMPILE, 8, 1, 4096, "1", 28.07, "expandable", 0.1),
)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one = _WIDTH // _HEADS
        self.query, self.output = nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key, self.value = (nn.Linear(_WIDTH, _GROUPS * one, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        query, key, value = (layer(x) for layer in (self.query, self.key, self.value))
        query, key, value = (part.unflatten(-1, (-1, _WIDTH // _HEADS)) for part in (query, key, value))
        query, key = _turned(query, key, turns)
        key, value = (_repeated(part) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().flatten(2))  # type: ignore[no-any-return]


def _turned(query: torch.Tensor, key: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide_query = torch.view_as_complex(query.float().unflatten(-1, (-1, 2)))
    wide_key = torch.view_as_complex(key.float().unflatten(-1, (-1, 2)))
    turned_query = torch.view_as_real(wide_query * turns).flatten(3)
    turned_key = torch.view_as_real(wide_key * turns).flatten(3)
    return turned_query.type_as(query), turned_key.type_as(key)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    times = _HEADS // _GROUPS
    return x[:, :, :, None].expand(-1, -1, -1, times, -1).reshape(*x.shape[:2], _HEADS, -1)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.before_attention, self.before_feeding = _Attention(), _Norm(), _Norm()
        self.gate, self.up = (nn.Linear(_WIDTH, _HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(_HIDDEN, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), turns)
        return x + self._feed(self.before_feeding(x))

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class _Recomputed(nn.Module):
    """A layer of which backward repeats all, or all but selected operators."""

    def __init__(self, layer: nn.Module, *, selects: bool) -> None:
        super().__init__()
        self.layer = layer
        self._run: Callable[..., Any] = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
        if selects:
            self._run = partial(self._run, context_fn=_selected)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        return self._run(x, turns)  # type: ignore[no-any-return]


_aten: Any = torch.ops.aten
_KEPT = frozenset(
    {
        _aten.mm.default, _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
    }
)  # fmt: skip


def _selected() -> Any:
    """The results of attention and of every second matrix product are kept."""
    products: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is _aten.mm.default:
            products[context.is_recompute] += 1
        kept = operator in _KEPT and not (operator is _aten.mm.default and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Model(nn.Module):
    def __init__(self, sequence: int, recompute: str) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(_WORDS, _WIDTH), _Norm()
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        turns = torch.zeros(sequence, _WIDTH // _HEADS // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns)
        every = 1 if recompute == "op" else int(recompute)
        self.layers = nn.ModuleList(
            _Recomputed(_Layer(), selects=recompute == "op") if every and number % every == 0 else _Layer()
            for number in range(1, _LAYERS + 1)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, self.turns[None, :, None])  # type: ignore[index]
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def sharded(row: Row, device: torch.device, *, compiled: bool = False, float8: bool = False) -> nn.Module:
    """Build the network, each layer of it compiled or not, and shard it.

    Args:
        float8: its products are torchao's in 8 bits, sharded in 8 bits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=init_device_mesh(device.type, (row.gpus,)), mp_policy=precision)
    with torch.device("meta"):
        model: Any = _Model(row.sequence, row.recompute)
    if float8:
        library: Any = import_module("torchao.float8")
        config = library.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        library.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "head" not in name)
    for layer in model.layers if compiled else ():
        layer.compile()
    for number, layer in enumerate(model.layers, 1):
        shard(layer, reshard_after_forward=number < _LAYERS)
    shard(model, reshard_after_forward=False)  # for any request, until pytorch/pytorch#154704 of June 2025
    whole: nn.Module = model.to_empty(device=device)
    return whole


def traced(row: Row) -> Timeline:
    """Two training steps of one rank."""
    gpu = find_gpu("h100-80gb")
    simulated = SimulatedGpu(gpu, profile_for(_TORCH, gpu), unlimited=True)
    device = torch.device("cuda")
    with as_cuda(simulated), world(row.gpus):
        train(sharded(row, device), row, device)
        return simulated.finish()


def train(model: nn.Module, row: Row, device: torch.device) -> None:
    """Make steps as torchtitan does."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(_STEPS):
        words, labels = torch.zeros(2, row.batch_size, row.sequence, dtype=torch.int64).to(device)
        optimizer.zero_grad()
        guess = model(words)
        loss = F.cross_entropy(guess.flatten(0, 1).float(), labels.flatten(0, 1))
        del guess
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


def errors_percent(row: Row, timeline: Timeline) -> dict[str, float]:
    """Reserved against published by the allocator's settings; below zero the prediction is too low."""
    return {
        name: 100 * (replay(timeline, settings=settings).peak_reserved_bytes / GIB / row.reserved_gib - 1)
        for name, settings in SETTINGS.items()
    }


def on_one_stream(timeline: Timeline) -> Timeline:
    """The run as if there were no other streams."""
    return replace(timeline, streams=(), completions=())


def main(ids: Sequence[str]) -> int:
    """Print the rows with these ids; all without any."""
    for row in ROWS:
        if ids and row.id not in ids:
            continue
        timeline = traced(row)
        print(f"{row.id:17} {row.reserved_gib:6.2f} GiB", end="")
        for title, run in (("one stream", on_one_stream(timeline)), ("its streams", timeline)):
            errors = (f"{name} {error:+.1f} %" for name, error in errors_percent(row, run).items())
            print(f"; {title}: {', '.join(errors)}", end="")
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
