"""A base in the 4 bits of bitsandbytes, as transformers' own quantizer makes it of a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from gpumem_tui.formula.precision import PrecisionRecord
from gpumem_tui.formula.recipe import BaseQuantization

FOUR_BITS: tuple[BaseQuantization, ...] = ("nf4", "nf4-dq")
_STD = 0.02


def four_bit_settings(
    transformers: Any, quantization: BaseQuantization, record: PrecisionRecord, given: object
) -> Any | None:
    """transformers' `BitsAndBytesConfig`, or None where bitsandbytes is not there, or such 4 bits are not asked for.

    Args:
        given: what the configuration says of its weights' quantization; None for nothing, then they are computed with
            as the step is.
    """
    if quantization not in FOUR_BITS:
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
            module.weight = _packed(layers.Params4bit, module.weight, dtype, device)
    quantizer.postprocess_model(model)


def _packed(kind: Any, weight: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Any:
    """As transformers makes it of a weight that it has read (integrations/bitsandbytes.py, Bnb4bitQuantize)."""
    values = torch.empty(weight.shape, dtype=dtype, device=device).normal_(std=_STD)
    return kind(values, requires_grad=False, **weight.__dict__).to(device)
