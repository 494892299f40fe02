"""The controls of adapters: what is trained, how wide they are, where they sit, and what lies under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast

from gpumem_tui.formula.adapters import linear_names
from gpumem_tui.formula.recipe import ALL_LINEAR, DEFAULT_LORA_RANK, Adapter
from gpumem_tui.plan.control import Option
from gpumem_tui.plan.draft import Draft

ADAPTER_KEYS = ("adapter", "lora_rank", "lora_targets", "adapter_dtype", "base_quantization")
_WORDS: Mapping[Adapter, str] = MappingProxyType(
    {
        "none": "every weight is trained",
        "lora": "low-rank matrices beside frozen weights",
        "dora": "those, and a magnitude for each output",
    }
)
ADAPTER_OPTIONS = tuple(Option(name, words) for name, words in _WORDS.items())
_OF_ATTENTION = frozenset(
    {"qkv", "proj", "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
)
_OF_THE_PAPER = ("q_proj", "v_proj")


def has_adapter_control(draft: Draft, key: str) -> bool:
    """Whether a draft has one of `ADAPTER_KEYS`: of a language model, and further ones where it has adapters."""
    if key not in ADAPTER_KEYS:
        return False
    return draft.recipe.has_adapters or (key == "adapter" and draft.base.record.predicts_tokens)


def put_adapter(draft: Draft, value: str) -> Draft:
    """Without adapters the others say what they say by default."""
    if value != "none":
        return replace(draft, recipe=replace(draft.recipe, adapter=cast(Adapter, value)))
    recipe = replace(
        draft.recipe,
        adapter="none",
        lora_rank=DEFAULT_LORA_RANK,
        lora_targets=ALL_LINEAR,
        adapter_dtype="base",
        base_quantization="none",
    )
    return replace(draft, recipe=recipe)


def target_options(draft: Draft) -> tuple[Option, ...]:
    """Every linear layer, attention's, those of the paper (Hu et al. 2021), the others; and what was typed before."""
    names = linear_names(draft.base)
    attention = [name for name in names if name in _OF_ATTENTION]
    sets = {
        ",".join(attention): "attention",
        ",".join(name for name in names if name not in _OF_ATTENTION): "feed-forward",
    }
    if set(_OF_THE_PAPER) <= set(names):
        sets[",".join(_OF_THE_PAPER)] = "as Hu et al. 2021"
    found = {ALL_LINEAR: "every one but the output head", **{value: note for value, note in sets.items() if value}}
    found.setdefault(draft.recipe.lora_targets, "as given")
    return tuple(Option(value, note) for value, note in found.items())
