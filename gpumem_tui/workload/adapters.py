"""LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) in plain torch, over frozen weights that may be quantized (QLoRA,
Dettmers et al. 2023).

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
from gpumem_tui.workload.quantized import PackedWeight, QuantizedLinear


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
        made: Tensor = self.base(x)
        return (made + self._adapted(x) * _SCALE).to(made.dtype)

    def _adapted(self, x: Tensor) -> Tensor:
        """B A x in the adapter's dtype."""
        adapted: Tensor = self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype)))
        return adapted


class DoraLinear(LoraLinear):
    """m (W x + (alpha / rank) B A x) / ‖W + (alpha / rank) B A‖ by row (Liu et al. 2024), in the order that PEFT does.

    The norm is made anew in every forward pass and has no gradient.
    """

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__(base, inputs, outputs, rank, dtype)
        self.magnitude = nn.Parameter(torch.ones(outputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x)
        scale = self.magnitude / self._norm()
        adapted = self._adapted(x)
        bias = self.base.bias
        unbiased = made - bias if isinstance(bias, Tensor) else made
        scaled = (scale - 1) * unbiased + scale * adapted * _SCALE
        return (made + scaled).to(made.dtype)

    def _norm(self) -> Tensor:
        dtype = self.lora_a.weight.dtype
        identity = torch.eye(self.lora_a.in_features, dtype=dtype, device=self.magnitude.device)
        low_rank = self.lora_b(self.lora_a(identity)).T
        weight = self._weight(dtype)
        norm: Tensor = torch.linalg.norm(weight + _SCALE * low_rank.detach(), dim=1).to(dtype)
        return norm.detach()

    def _weight(self, dtype: torch.dtype) -> Tensor:
        if isinstance(self.base, PackedWeight):
            return self.base.unpacked(dtype)
        weight: Tensor = self.base.get_parameter("weight").to(dtype)
        return weight


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
    adapt(
        model,
        [name for name, _ in layers],
        adapted,
        recipe.lora_rank,
        recipe.base_quantization,
        magnitudes=recipe.adapter == "dora",
        in_fp32=recipe.adapter_dtype == "fp32",
    )


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapt(
    model: nn.Module,
    quantized: Iterable[str],
    adapted: Iterable[str],
    rank: int,
    quantization: BaseQuantization,
    *,
    magnitudes: bool = False,
    in_fp32: bool = False,
) -> None:
    """Freeze all of `model`, then put adapters in, on torch's default device, in the dtype of its weights.

    Args:
        quantized: names of the linear layers whose weights are kept in `quantization`.
        adapted: names of those that get an adapter.
        magnitudes: DoRA's instead of LoRA's.
        in_fp32: adapters are in fp32 whatever the weights are.
    """
    model.requires_grad_(False)
    dtype = torch.float32 if in_fp32 else next(model.parameters()).dtype
    kind = DoraLinear if magnitudes else LoraLinear
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
        model.set_submodule(name, kind(layer, inputs, outputs, rank, dtype))


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), f"{name} is no linear layer"
    return layer
