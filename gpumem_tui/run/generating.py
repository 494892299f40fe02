"""Texts that transformers' models generate: up to their limit, as no token is known to end one.

A program that trains on what it has generated trains on that length, so that none may be left out. Each token takes the
simulated GPU about 10 ms a layer, though: where many are asked for, the prompt is lengthened by all but the last ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from gpumem_tui.importing import after_import

if TYPE_CHECKING:
    from gpumem_tui.run.program import Program

_MOST_LAYERS_RUN = 256 * 24
"""Layers that all texts of a run go through token by token."""

_LAST = 2
"""Tokens that a longer text is generated for."""

_OF_EVERY_TOKEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_LIMITS = ("max_length", "min_length", "max_new_tokens", "min_new_tokens")
_OF_PROMPT = ("input_ids", "attention_mask")


def generate_in_full(program: Program) -> None:
    """Follow what transformers generates once it is imported."""
    after_import("transformers.generation.utils", lambda module: _follow(program, module.GenerationMixin))


def _follow(program: Program, mixin: Any) -> None:
    generates = mixin.generate
    layers_run = 0

    @functools.wraps(generates)
    def generate(self: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal layers_run
        program.note("texts are generated up to their limit, as no token is known to end one")
        named = kwargs if inputs is None else {"input_ids": inputs, **kwargs}
        new, layers = _new_tokens(generation_config or self.generation_config, named), _layers(self.config)
        if (
            new > _LAST
            and not args
            and layers_run + new * layers > _MOST_LAYERS_RUN
            and not self.config.is_encoder_decoder
        ):
            program.note(
                f"of texts of {new:,} tokens the last {_LAST} are generated after a prompt as long as the rest"
            )
            inputs, kwargs, new = None, _with_longer_prompt(named, new - _LAST), _LAST
        layers_run += new * layers
        return generates(self, inputs, generation_config, *args, **kwargs)

    mixin.generate = generate


def _new_tokens(config: Any, named: Mapping[str, Any]) -> int:
    """Return how many tokens a call generates; 0 where its prompt is more than ids, or each leaves something."""
    ids = named.get("input_ids")
    if not isinstance(ids, torch.Tensor) or not ids.is_cuda or ids.dim() != 2:
        return 0
    if any(named.get(name, getattr(config, name, False)) for name in _OF_EVERY_TOKEN):
        return 0
    if any(isinstance(value, torch.Tensor) for name, value in named.items() if name not in _OF_PROMPT):
        return 0
    new = named.get("max_new_tokens", config.max_new_tokens)
    length = named.get("max_length", config.max_length)
    return int(new) if new is not None else int(length) - ids.shape[1] if length is not None else 0


def _layers(config: Any) -> int:
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config  # older transformers have none
    return int(getattr(of_text, "num_hidden_layers", 1))


def _with_longer_prompt(named: Mapping[str, Any], more: int) -> dict[str, Any]:
    """Return the arguments of a call that generates `_LAST` tokens after a prompt of so many more."""
    longer = {name: F.pad(value, (0, more), value=1) for name, value in named.items() if name in _OF_PROMPT}
    others = {name: value for name, value in named.items() if name not in (*_LIMITS, *_OF_PROMPT)}
    return {**others, **longer, "max_new_tokens": _LAST, "min_new_tokens": _LAST}
