"""The trained part of a model: adapters on top of frozen weights, or the layers after frozen ones.

LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) are in plain torch, over frozen weights that may be quantized (QLoRA,
Dettmers et al. 2023). The code that decides memory follows PEFT and bitsandbytes: an adapter's output is added to its
layer's; a quantized matrix is unpacked into one buffer for its product, in forward and again in backward, and only the
packed one is kept. Layers are frozen by `requires_grad_(False)` on what comes first in a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, Recipe
from gpumem_tui.formula.weights import frozen_blocks, linear_names, only_head, targets
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.models.llama import RoutedExperts
from gpumem_tui.workload.quantized import PackedWeight, QuantizedLinear

_BLOCKS = "blocks"
"""The catalog's networks' name of the list of their blocks."""


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
        """Run the module; its class names the inputs."""
        made: Tensor = self.base(x)
        return (made + self._adapted(x) * _SCALE).to(made.dtype)

    def _adapted(self, x: Tensor) -> Tensor:
        """Return B A x in the adapter's dtype."""
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
        """Run the module; its class names the inputs."""
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
"""The catalog's networks' name of a layer that the formula calls otherwise."""


def adapt_blocks(model: nn.Module, shape: ModelShape, recipe: Recipe) -> None:
    """Return the recipe's adapters and quantization in a network of the catalog."""
    at = targets(shape, recipe)
    layers = [
        (name, linear)
        for linear in linear_names(shape)
        for name, _ in model.named_modules()
        if name.startswith("blocks.") and name.endswith(f".{_ELSEWHERE.get(linear, linear)}")
    ]
    adapted = [name for name, linear in layers if linear in at]
    adapt(model, [name for name, _ in layers], adapted, recipe)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapt(
    model: nn.Module,
    quantized: Iterable[str],
    adapted: Iterable[str],
    recipe: Recipe,
) -> None:
    """Freeze all of `model`, then put adapters in, on torch's default device, in the dtype of its weights.

    Args:
        model: whose weights have the dtype that adapters are in, unless the recipe wants them in fp32.
        quantized: names of the linear layers whose weights are kept in the recipe's quantization.
        adapted: names of those that get an adapter.
        recipe: the adapters' kind, rank and format.
    """
    model.requires_grad_(False)
    dtype = torch.float32 if recipe.adapter_dtype == "fp32" else next(model.parameters()).dtype
    kind = DoraLinear if recipe.adapter == "dora" else LoraLinear
    quantization = recipe.base_quantization
    if quantization != "none":
        for name in quantized:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear), f"{name} is no linear layer"
            model.set_submodule(name, QuantizedLinear(layer, quantization))
        for layer in list(model.modules()):
            if isinstance(layer, RoutedExperts):
                layer.pack(quantization)
    for name in adapted:
        layer = model.get_submodule(name)
        outputs, inputs = layer.out_features, layer.in_features
        assert isinstance(outputs, int), f"{name} is no linear layer"
        assert isinstance(inputs, int), f"{name} is no linear layer"
        model.set_submodule(name, kind(layer, inputs, outputs, recipe.lora_rank, dtype))


# Frozen layers


def freeze_layers(model: nn.Module, shape: ModelShape, recipe: Recipe) -> None:
    """Freeze a network of the catalog as the recipe states."""
    if only_head(recipe):
        model.requires_grad_(False)
        model.get_submodule(shape.record.head).requires_grad_(True)
    elif recipe.has_frozen_layers:
        freeze_first(model, _BLOCKS, frozen_blocks(shape, recipe))


def freeze_transformers(model: Any, what: str) -> None:
    """Freeze a model that transformers built.

    Args:
        what: as `Recipe.freeze`; but the head, its `base_model`, as its guides to fine-tuning do.

    Raises:
        WorkloadError: it has no such blocks, or none in one list; or nothing is left to train.
    """
    name = type(model).__name__
    if what == ALL_BUT_HEAD:
        model.base_model.requires_grad_(False)
    else:
        lists = _lists_of_blocks(model)
        if len(lists) != 1:
            found = f"these: {', '.join(lists)}" if lists else "none"
            raise WorkloadError(f"--freeze {what}: {name} has not one list of blocks but {found}; use {ALL_BUT_HEAD}")
        (blocks, count), *_ = lists.items()
        if not 1 <= int(what) <= count:
            raise WorkloadError(f"--freeze {what}: {name} has {count} blocks, in {blocks}; freeze 1 to {count}")
        freeze_first(model, blocks, int(what))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"--freeze {what}: nothing of {name} is left to train; freeze fewer blocks")


def _lists_of_blocks(model: nn.Module) -> dict[str, int]:
    """Return the lists of modules that lie in no other one, and their lengths."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{one}.") for one in found):
            found[name] = len(module)
    return found


def freeze_first(model: nn.Module, blocks: str, count: int) -> None:
    """Freeze what a model has before its blocks, in the order of its modules, and the first of these.

    Args:
        blocks: what the list of them is called in the model. `count`: how many.
    """
    reached = False
    for name, parameter in model.named_parameters():
        if name.startswith(f"{blocks}."):
            reached = True
            parameter.requires_grad_(int(name.removeprefix(f"{blocks}.").partition(".")[0]) >= count)
        else:
            parameter.requires_grad_(reached)
