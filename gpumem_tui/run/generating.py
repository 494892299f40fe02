"""Texts that transformers' models generate: up to their limit, as no token surely ends one.

At the other end of what is traced they have one token; `--assume-rows` gives another number. A program that trains on
what it has generated trains on that length, so that none may be left out. Once a model's calls have grown evenly
(`simulator.fast.growing`), those of all further tokens are made at once.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from gpumem_tui.importing import after_import
from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.device.shapes import part_of
from gpumem_tui.step.sites import callers
from gpumem_tui.workload.errors import is_users

if TYPE_CHECKING:
    from gpumem_tui.run.program import Program

_OF_EVERY_TOKEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate_in_full(program: Program) -> None:
    """Follow what transformers generates once it is imported."""
    after_import("transformers.generation.utils", lambda module: _Generation(program, module.GenerationMixin).follow())


@dataclass
class _Text:
    """Texts that are being generated.

    Attributes:
        model: what generates them. `new`: how many tokens they get, 0 where that is not known.
        most: tokens after which they end, under any limit of the program.
        begun: tokens that were begun. `skipped`: those that were made at once; more than 0 ends the loop.
    """

    model: Any
    new: int
    most: int
    begun: int = 0
    skipped: int = 0


class _Generation:
    """The calls of `generate`; one text at a time."""

    def __init__(self, program: Program, mixin: Any) -> None:
        self._program = program
        self._mixin = mixin
        self._text: _Text | None = None

    def follow(self) -> None:
        """Follow all calls from now on."""
        generates, is_unfinished = self._mixin.generate, getattr(self._mixin, "_has_unfinished_sequences", None)

        @functools.wraps(generates)
        def generate(model: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
            named = kwargs if inputs is None else {"input_ids": inputs, **kwargs}
            new = _new_tokens(model, generation_config or model.generation_config, named)
            most = self._most(new)
            skips = is_unfinished is not None and not args and _may_be_skipped(generation_config, model, named)
            text = self._text = _Text(model, min(new, most) if skips else 0, most)
            try:
                found = generates(model, inputs, generation_config, *args, **kwargs)
            finally:
                self._text = None
            return F.pad(found, (0, text.skipped)) if text.skipped else found

        def goes_on(model: Any, *args: Any, **kwargs: Any) -> Any:
            text = self._text
            if text is not None and text.model is model:
                if text.skipped or text.begun >= text.most:
                    return False
                text.begun += 1
            return is_unfinished(model, *args, **kwargs)  # type: ignore[misc]  # it is there if this is called

        self._mixin.generate = generate
        if is_unfinished is not None:
            self._mixin._has_unfinished_sequences = functools.wraps(is_unfinished)(goes_on)
        self._program.ahead = self._ahead

    def _ahead(self, module: torch.nn.Module) -> int:
        """Return how many tokens are left as the call for one is answered from memory."""
        text = self._text
        if text is None or text.model is not module or not text.new:
            return 0
        text.skipped = max(0, text.new - text.begun)
        return text.skipped

    def _most(self, new: int) -> int:
        """Return after how many tokens a text ends, and note that."""
        results, place = backend._gpu.mode.results, _place()
        told = results.number("new tokens a text", place) if place else None
        if told is not None:
            return part_of(told, new or sys.maxsize, 1) if told <= 1 else round(told)
        if not new:
            self._program.note(
                f"assumes as many new tokens as there may be a text at {place}: no token surely ends one"
            )
        results.assume("tokens", 1, new or sys.maxsize, new, place)
        return 1 if backend._gpu.mode.values.end == "fewest" else new or sys.maxsize


def _new_tokens(model: Any, config: Any, named: dict[str, Any]) -> int:
    """Return how many tokens a call generates at most; 0 where that is not known."""
    new = named.get("max_new_tokens", config.max_new_tokens)
    if new is not None:
        return int(new)
    length, ids = named.get("max_length", config.max_length), named.get("input_ids")
    before = 1 if model.config.is_encoder_decoder else ids.shape[1] if isinstance(ids, torch.Tensor) else 0
    return max(0, int(length or 20) - before) if before else 0


def _may_be_skipped(config: Any, model: Any, named: dict[str, Any]) -> bool:
    """Return whether nothing but the cache grows from token to token, and that by each of them."""
    configs = [one for one in (config, model.generation_config) if one is not None]

    def asked(name: str) -> Any:
        return named.get(name) or any(getattr(one, name, None) for one in configs)

    beams = max(named.get("num_beams") or 1, *(getattr(one, "num_beams", 1) or 1 for one in configs))
    of_text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    slides = getattr(of_text, "sliding_window", None) or getattr(of_text, "layer_types", None)
    has_more = any(map(asked, (*_OF_EVERY_TOKEN, "return_dict_in_generate", "assistant_model", "streamer")))
    return beams == 1 and not has_more and not slides


def _place() -> str:
    for frame in callers(sys._getframe(2)):
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""
