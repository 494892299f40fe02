"""LoRA (Hu et al. 2021) in plain torch, over frozen weights that may be quantized (QLoRA, Dettmers et al. 2023).

What decides memory follows PEFT and bitsandbytes: an adapter's output is added to its layer's; a quantized matrix is
unpacked into one buffer for its product, in forward and again in backward, and only the packed one is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.adapters import linear_names, targets
from gpumem_tui.formula.recipe import BaseQuantization, Recipe
from gpumem_tui.workload.models.experts import RoutedExperts
from gpumem_tui.workload.quantized import QuantizedLinear


class LoraLinear(nn.Module):
    """W x + (alpha / rank) B A x over a frozen layer W, with alpha twice the rank.

    Args:
        base: [..., inputs] to [..., outputs]; its weights are left alone.
        inputs, outputs: its widths.
        dtype: of the adapter.
    """

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.lora_b(self.lora_a(x)) * _SCALE
        return output


_SCALE = 2.0
"""alpha / rank. It changes no tensor's size."""


_ELSEWHERE: Mapping[str, str] = MappingProxyType({"o_proj": "out_proj", "fc1": "mlp.0", "fc2": "mlp.2"})
"""What the catalog's networks call a layer that the formula calls otherwise."""


def adapt_blocks(model: nn.Module, shape: ModelShape, recipe: Recipe) -> None:
    """The recipe's adapters and quantization in a network of the catalog."""
    at = targets(shape, recipe)
    layers = [
        (name, linear)
        for linear in linear_names(shape)
        for name, _ in model.named_modules()
        if name.startswith("blocks.") and name.endswith(f".{_ELSEWHERE.get(linear, linear)}")
    ]
    adapted = [name for name, linear in layers if linear in at]
    adapt(model, [name for name, _ in layers], adapted, recipe.lora_rank, recipe.base_quantization)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapt(
    model: nn.Module, quantized: Iterable[str], adapted: Iterable[str], rank: int, quantization: BaseQuantization
) -> None:
    """Freeze all of `model`, then put adapters in, on torch's default device, in the dtype of its weights.

    Args:
        quantized: names of the linear layers whose weights are kept in `quantization`.
        adapted: names of those that get an adapter.
    """
    model.requires_grad_(False)
    dtype = next(model.parameters()).dtype
    if quantization != "none":
        for name in quantized:
            model.set_submodule(name, QuantizedLinear(_linear(model, name), quantization))
        for layer in list(model.modules()):
            if isinstance(layer, RoutedExperts):
                layer.pack(quantization)
    for name in adapted:
        layer = model.get_submodule(name)
        outputs, inputs = layer.out_features, layer.in_features
        assert isinstance(outputs, int), f"{name} is no linear layer"
        assert isinstance(inputs, int), f"{name} is no linear layer"
        model.set_submodule(name, LoraLinear(layer, inputs, outputs, rank, dtype))


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), f"{name} is no linear layer"
    return layer
