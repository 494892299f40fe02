"""Linear layers whose frozen weights are packed: NF4 (Dettmers et al. 2023), int8 by row, fp8; unpacked for a product.

The packed bytes are those of `formula.records`; the values are made up, as all weights here are. In a model that
transformers builds, bitsandbytes' own layers replace ours where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import ceil, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.formula.recipe import BaseQuantization
from gpumem_tui.formula.records import QUANTIZATION_RECORDS, PrecisionRecord

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of 4-bit NormalFloat (Dettmers et al. 2023, appendix E)."""

_NF4_BLOCK, _SCALE_BLOCK = 64, 256
"""Weights that share a scale, and under double quantization scales that share one of their own (section 3)."""

_STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2019)."""

_SCALE = 2.0**-10
"""Times 8-bit codes, or scales of 8 bits, weights of about that size."""

_HALF_IN_FP8 = 0x30
"""0.5 in float8_e4m3fn; smaller codes are smaller, from 0 on."""

_CHUNK = 1 << 20
"""Weights that are unpacked at once, so that what that takes besides the buffer is a few MiB."""


class PackedWeight(nn.Module):
    """A packed, frozen weight [*dims] whose rows are all but the last dimension; `materialize` gives it values."""

    def __init__(self, dims: Sequence[int], quantization: BaseQuantization, device: torch.device) -> None:
        super().__init__()
        self.dims = list(dims)
        parts = _parts(quantization, prod(self.dims[:-1]), self.dims[-1])
        codes, *scales = (
            nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False) for dtype, size in parts
        )
        self.codes = codes
        self.scales = nn.ParameterList(scales)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`, in a buffer of its own."""
        first, *others = self.scales
        scales = _unpack_scales(first, *others) if others else first
        weight: Tensor = _unpack(self.codes, scales, [prod(self.dims[:-1]), self.dims[-1]], dtype)
        return weight.view(self.dims)


class QuantizedLinear(PackedWeight):
    """x Wᵀ + bias for a packed, frozen W [out_features, in_features].

    Made where `linear` is, with its bias; its weight is dropped.
    """

    def __init__(self, linear: nn.Linear, quantization: BaseQuantization) -> None:
        super().__init__((linear.out_features, linear.in_features), quantization, linear.weight.device)
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        x = x.to(_computed_in(x))
        output: Tensor = _PackedProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(x.dtype)


class QuantizedExperts(PackedWeight):
    """Grouped products with packed, frozen weights [experts, outputs, inputs]."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply x [rows, inputs], sorted by expert; `ends` [experts] is the number of rows up to each one's last."""
        output: Tensor = _PackedGroups.apply(x.to(_computed_in(x)), ends, self)  # type: ignore[no-untyped-call]
        return output


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _PackedProduct(torch.autograd.Function):
    """Keeps nothing but the layer: its packed weight is unpacked again in backward (bitsandbytes, MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.unpacked(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.unpacked(ctx.dtype), None


class _PackedGroups(torch.autograd.Function):
    """The product of a block's experts, whose matrices are all unpacked at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, experts: QuantizedExperts) -> Tensor:
        ctx.experts, ctx.dtype = experts, x.dtype
        ctx.save_for_backward(ends)
        return F.grouped_mm(x, experts.unpacked(x.dtype).transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        return F.grouped_mm(gradient, ctx.experts.unpacked(ctx.dtype), offs=ends), None, None


def _parts(quantization: BaseQuantization, rows: int, columns: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of the packed weights and of their scales, as `formula.records` counts them."""
    count = rows * columns
    if quantization == "int8":
        return [(torch.int8, (rows, columns)), (torch.float32, (rows,))]
    if quantization == "fp8":
        return [(torch.float8_e4m3fn, (rows, columns)), (torch.float32, (1,))]
    packed, blocks = (torch.uint8, (ceil(count / 2),)), ceil(count / _NF4_BLOCK)
    if quantization == "nf4":
        return [packed, (torch.float32, (blocks,))]
    return [packed, (torch.uint8, (blocks,)), (torch.float32, (ceil(blocks / _SCALE_BLOCK),)), (torch.float32, (1,))]


_OPERATORS = "gpumem_tui"
"""Namespace of the two operators below, whose kernels write their result and take nothing else."""


@torch.library.custom_op(
    f"{_OPERATORS}::unpack_scales", mutates_args=(), schema="(Tensor small, Tensor shared, Tensor mean) -> Tensor"
)
def _unpack_scales(small: Tensor, shared: Tensor, mean: Tensor) -> Tensor:
    """Make the scales of each block in fp32, of those in 8 bits, as bitsandbytes' `dequantize_4bit` does first."""
    scales = small.float()
    whole = len(scales) // _SCALE_BLOCK
    scales[: whole * _SCALE_BLOCK].view(whole, _SCALE_BLOCK).mul_(shared[:whole, None])
    scales[whole * _SCALE_BLOCK :].mul_(shared[-1])
    return scales.add_(mean)


@_unpack_scales.register_fake
def _scales_shape(small: Tensor, shared: Tensor, mean: Tensor) -> Tensor:  # noqa: ARG001 - the operator's own
    return torch.empty_like(small, dtype=torch.float32)


@torch.library.custom_op(
    f"{_OPERATORS}::unpack",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, int[] shape, ScalarType dtype) -> Tensor",
)
def _unpack(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the matrix of `shape` in `dtype`.

    One operator, as bitsandbytes' kernel is, so a trace sees its result only.
    """
    if codes.dtype != torch.uint8:
        return codes.to(dtype).mul_(scales.to(dtype).view(-1, 1))
    weights = torch.empty(list(shape), dtype=dtype, device=codes.device)
    flat, table = weights.view(-1), torch.tensor(_NF4, device=codes.device)
    for start in range(0, flat.numel(), _CHUNK):
        end = min(start + _CHUNK, flat.numel())
        bits = codes[start // 2 : ceil(end / 2)]
        values = table[torch.stack((bits >> 4, bits & 15), dim=-1).view(-1)[: end - start].int()]
        of_blocks = scales[start // _NF4_BLOCK : ceil(end / _NF4_BLOCK)]
        flat[start:end] = values * of_blocks.repeat_interleave(_NF4_BLOCK)[: end - start]
    return weights


@_unpack.register_fake
def _unpacked_shape(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG001 - the operator's own
    return codes.new_empty(list(shape), dtype=dtype)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model what of it was made on ``meta`` memory and values; parameters that are shared stay so.

    Small weights, normalizations that do nothing, any packed weights, zeros in buffers.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))
    _fill(model)


def _fill(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.view(torch.uint8).random_(0, _HALF_IN_FP8)
            elif not parameter.is_floating_point():
                parameter.random_(0, 1 << 7)
            elif parameter.dim() > 1:
                parameter.normal_(std=_STD)
            else:
                parameter.fill_(0.0 if name == "bias" else 1.0)
    for module in model.modules():
        if isinstance(module, PackedWeight):
            for scales in module.scales:
                if scales.is_floating_point():
                    scales.fill_(_SCALE)


# By bitsandbytes, where it is there


def four_bit_settings(
    transformers: Any, quantization: BaseQuantization, record: PrecisionRecord, given: object
) -> Any | None:
    """Return transformers' `BitsAndBytesConfig`; None without bitsandbytes, or where such 4 bits are not asked for.

    Args:
        given: what the configuration states of its weights' quantization; None for nothing, then they are computed with
            as the step is.
    """
    if quantization == "none" or not QUANTIZATION_RECORDS[quantization].by_bitsandbytes:
        return None
    try:
        import_module("bitsandbytes")
    except ImportError:
        return None
    if isinstance(given, Mapping):
        return transformers.BitsAndBytesConfig.from_dict(dict(given))
    if given is not None:
        return given
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization == "nf4-dq",
        bnb_4bit_compute_dtype=getattr(torch, record.computes_in),
    )


def pack_base(model: Any, settings: Any, device: torch.device) -> None:
    """Replace the linear layers that the quantizer would by bitsandbytes' own, packed on the device one by one.

    Args:
        model: of transformers, on ``meta``; what is not packed stays there.
    """
    quantizer = import_module("transformers.quantizers.auto").AutoHfQuantizer.from_config(settings, pre_quantized=False)
    dtype = model.dtype
    quantizer.preprocess_model(model=model, device_map={"": 0})
    layers = import_module("bitsandbytes").nn
    for module in model.modules():
        if isinstance(module, layers.Linear4bit):
            # As transformers packs one that it has read (integrations/bitsandbytes.py, Bnb4bitQuantize).
            values = torch.empty(module.weight.shape, dtype=dtype, device=device).normal_(std=_STD)
            packed = layers.Params4bit(values, requires_grad=False, **module.weight.__dict__)
            module.weight = packed.to(device)
    quantizer.postprocess_model(model)
