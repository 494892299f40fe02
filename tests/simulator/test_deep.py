"""A deep network traced by shallow ones is the very run that it has itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import (
    BASE_QUANTIZATIONS,
    OPTIMIZERS,
    Adapter,
    BaseQuantization,
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    Sharding,
)
from gpumem_tui.simulator.allocator.replay import CHECKED_BATCH_SIZE, TRACED_BATCH_SIZES, AffineTrace, NotAffine
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.device.scratch import assumptions
from gpumem_tui.simulator.fast.layers import Assumed, NotRepeating, deepened, deepened_assumed, shallow_layers
from gpumem_tui.step.workload import Workload
from gpumem_tui.workload.standard import CatalogWorkload
from tests.in_process import trained
from tests.pairs import pairwise
from tests.simulator.simulated_steps import GPT2, LLAMA, simulated_gpu

VIT = find_model("vit-b-16").overridden(hidden=64, heads=4, ffn=128, image_size=64)
BERT = find_model("bert-base").overridden(hidden=64, heads=4, ffn=128, vocab=512, seq_len=64)


def few_experts(name: str) -> ModelShape:
    """A mixture of experts with eight of them, two of them active."""
    shape = find_model(name)
    assert shape.experts is not None
    narrow = shape.overridden(vocab=512, seq_len=64) if shape.latent is not None else replace(shape, head_dim=16)
    fewer = replace(narrow, experts=replace(shape.experts, count=8, active=2), hidden=64, ffn=32)
    return fewer if shape.latent is not None else fewer.overridden(heads=4, kv_heads=2, vocab=512, seq_len=64)


class Deep:
    """A network traced by shallow ones, one layer more than the deepest of them; and what it is when it is run itself.

    Args:
        of: gives the workload of so many layers.
        shallow: layers of the shallowest.
    """

    def __init__(self, of: Callable[[int], Workload], recipe: Recipe, shallow: int) -> None:
        self._of, self._recipe, self._shallow = of, recipe, shallow

    def at(self, layers: int, batch_size: int) -> tuple[Timeline, Assumed]:
        """Run a network of so many layers, and say what was assumed of it."""
        gpu = simulated_gpu(unlimited=True)
        with trained(self._of(layers), batch_size, 2, gpu, self._recipe):
            return gpu.finish(), assumptions(gpu.mode.assumed, gpu.gpu)

    def itself(self, batch_size: int) -> tuple[Timeline, Assumed]:
        """Run the network itself."""
        return self.at(self._shallow + 3, batch_size)

    def by_shallow(self, size: int) -> tuple[Timeline, Assumed]:
        """Work out a run of the network from those of shallow ones.

        Raises:
            NotRepeating, NotAffine: layers are not all alike.
        """
        (first, before), (second, _) = (self.at(self._shallow, one) for one in TRACED_BATCH_SIZES)
        deeper, after = self.at(self._shallow + 1, TRACED_BATCH_SIZES[0])
        deepest, _ = self.at(self._shallow + 2, CHECKED_BATCH_SIZE)
        trace = AffineTrace.fit(*zip(TRACED_BATCH_SIZES, (first, second), strict=True))
        found = deepened(trace, (first, deeper, deepest), CHECKED_BATCH_SIZE, 3)
        return found.at(size), deepened_assumed(before, after, 3)


def deep(shape: ModelShape, recipe: Recipe) -> Deep:
    shallow = shallow_layers(replace(shape, layers=100), recipe) or 3
    return Deep(lambda layers: CatalogWorkload(replace(shape, layers=layers), recipe), recipe, shallow)


def same(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether shallow networks gave the trace, which must then be the network's own, event for event."""
    traced = deep(shape, recipe)
    try:
        found = traced.by_shallow(4)
    except (NotRepeating, NotAffine):
        return False
    assert found == traced.itself(4)
    return True


def test_a_deep_networks_trace_is_its_own() -> None:
    assert same(GPT2, Recipe("bf16", recompute="full"))


class InTurns:
    """Every other layer is wider."""

    name = "layers in turns"

    def __init__(self, layers: int) -> None:
        self._widths = [64 + 64 * (layer % 2) for layer in range(layers)]

    def build(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        blocks = (
            nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32)).to(device) for width in self._widths
        )
        model = nn.Sequential(*blocks)
        return model, torch.optim.AdamW(model.parameters())

    def make_batch(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.randn(batch_size, 32, device=device)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: object) -> None:
        assert optimizer is not None
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_layers_that_are_not_alike_are_refused() -> None:
    with pytest.raises(NotRepeating):
        Deep(InTurns, Recipe(), 3).by_shallow(4)


def test_only_deep_networks_of_equal_blocks_are_traced_by_shallow_ones() -> None:
    assert shallow_layers(find_model("resnet-152"), Recipe()) == 0
    assert shallow_layers(replace(LLAMA, layers=8), Recipe()) == 0
    assert shallow_layers(find_model("llama-3-70b"), Recipe()) == 3
    assert shallow_layers(find_model("llama-3-70b"), Recipe(freeze="8")) == 3 + 8
    assert shallow_layers(find_model("llama-3-70b"), Recipe(freeze="70")) == 0
    deepseek = find_model("deepseek-v3")
    assert shallow_layers(deepseek, Recipe()) == 3 + deepseek.dense_layers > 3


SHAPES = [GPT2, BERT, VIT, LLAMA, *map(few_experts, ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"))]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def optimizer_of(shape: ModelShape, recompute: Recompute) -> Optimizer:
    """The optimizer whose turn it is."""
    turn = SHAPES.index(shape) * len(RECOMPUTES) + RECOMPUTES.index(recompute)
    return OPTIMIZERS[turn % len(OPTIMIZERS)]


def test_every_optimizer_has_its_turn() -> None:
    assert {optimizer_of(shape, recompute) for shape in SHAPES for recompute in RECOMPUTES} == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("shape", "recompute", "precision"), pairwise(SHAPES, RECOMPUTES, ("amp-fp16", "bf16"), pytest.mark.slow)
)
def test_every_family_of_blocks_with_an_optimizer(
    shape: ModelShape, recompute: Recompute, precision: Precision
) -> None:
    assert same(shape, Recipe(precision, optimizer_of(shape, recompute), recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp2"])
def test_weights_that_are_gathered_ahead(sharding: Sharding, recompute: Recompute) -> None:
    assert same(LLAMA, Recipe("amp-bf16", sharding=sharding, gpus=8, recompute=recompute))


@pytest.mark.parametrize(
    ("quantization", "adapter", "shape"),
    pairwise(BASE_QUANTIZATIONS, ("lora", "dora"), (GPT2, few_experts("qwen3-30b-a3b")), pytest.mark.slow),
)
def test_adapters(quantization: BaseQuantization, adapter: Adapter, shape: ModelShape) -> None:
    recompute: Recompute = "none" if shape is GPT2 else "full"
    assert same(shape, Recipe("bf16", adapter=adapter, base_quantization=quantization, recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("freeze", ["1", "2", "all-but-head"])
def test_frozen_layers(freeze: str, recompute: Recompute) -> None:
    shape = GPT2 if freeze != "all-but-head" else VIT
    assert same(shape, Recipe("bf16", freeze=freeze, recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1"])
def test_what_is_shared_out_by_size_is_traced_itself(sharding: Sharding) -> None:
    """`DistributedDataParallel` and `ZeroRedundancyOptimizer` go by the sizes of all parameters together."""
    assert not same(LLAMA, Recipe(sharding=sharding, gpus=8))
