"""Bytes that layers keep of tokens, by kind, and the blocks of a sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.kv_layers import (
    _DEFAULTS,
    _LATENT,
    _PLAIN,
    CachedLayers,
    KvLayers,
    kv_layers_of_config,
    kv_layers_of_shape,
)
from gpumem_tui.catalog.loader import find_model, models
from gpumem_tui.formula.kv_cache import KV_BITS, cached_bytes, paged, sequence_range, token_bytes
from gpumem_tui.memory import Unknown


def config(model_type: str, **keys: Any) -> dict[str, object]:
    return {
        "model_type": model_type, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_size": 512, "head_dim": 64, **keys,
    }  # fmt: skip


def layers(model_type: str, **keys: Any) -> KvLayers:
    found = kv_layers_of_config(config(model_type, **keys))
    assert isinstance(found, KvLayers), found
    return found


@pytest.mark.parametrize(
    ("model_type", "keys", "kept"),
    [
        ("llama", {}, [(12, 8, 128, 0)]),
        ("llama", {"num_key_value_heads": 2, "head_dim": 96}, [(12, 2, 192, 0)]),
        ("gpt_bigcode", {}, [(12, 1, 128, 0)]),
        ("falcon", {"multi_query": True}, [(12, 1, 128, 0)]),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}, [(12, 4, 128, 0)]),
        ("mistral", {"sliding_window": 4096}, [(12, 8, 128, 4096)]),
        ("mistral", {"sliding_window": None}, [(12, 8, 128, 0)]),
        ("gemma2", {"sliding_window": 4096}, [(6, 8, 128, 0), (6, 8, 128, 4096)]),
        ("gemma3_text", {"sliding_window": 1024}, [(2, 8, 128, 0), (10, 8, 128, 1024)]),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, [(12, 8, 128, 0)]),
        (
            "qwen2",
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 9},
            [(9, 8, 128, 0), (3, 8, 128, 4096)],
        ),
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [(12, 1, 576, 0)]),
        ("hunyuan_v1_dense", {"use_cla": True, "cla_share_factor": 2}, [(6, 8, 128, 0)]),
        (
            "gemma3n_text",
            {
                "sliding_window": 512, "num_kv_shared_layers": 4,
                "layer_types": [*(3 * ["sliding_attention"]), "full_attention"] * 3,
            },
            [(2, 8, 128, 0), (6, 8, 128, 512)],
        ),
        (
            "llama4_text",
            {"attention_chunk_size": 8192, "layer_types": [*(3 * ["chunked_attention"]), "full_attention"] * 3},
            [(3, 8, 128, 0), (9, 8, 128, 8192)],
        ),
    ],
)  # fmt: skip
def test_each_kind_of_attention_keeps_what_its_configuration_says(
    model_type: str, keys: dict[str, object], kept: list[tuple[int, int, int, int]]
) -> None:
    found = layers(model_type, **keys).cached
    assert [(one.count, one.heads, one.width, one.window) for one in found] == kept


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model_type": "bert"}, "bert is an encoder"),
        ({"model_type": "mamba2"}, "without attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "cross-attention"),
        ({"model_type": "newest"}, "no rule for the KV cache of newest models"),
        ({}, "a model without a model_type"),
        ({"model_type": "llama"}, "has no 'num_hidden_layers'"),
        (config("olmo3"), "has no 'layer_types'"),
        (config("granite", layer_types=12 * ["mamba"]), "layers of the kind 'mamba', which have no rule"),
        (config("llama", layer_types=3 * ["full_attention"]), "names 3 'layer_types' for 12 layers"),
        (config("llama", layer_types=12 * ["linear_attention"]), "linear-attention layers of a kind that has no rule"),
    ],
)
def test_a_model_without_a_rule_is_unknown(values: dict[str, object], why: str) -> None:
    found = kv_layers_of_config(values)
    assert isinstance(found, Unknown)
    assert why in found.reason


def test_a_model_for_images_too_is_read_by_its_text() -> None:
    text = config("gemma3_text", sliding_window=1024)
    assert kv_layers_of_config({"model_type": "gemma3", "text_config": text}) == layers(
        "gemma3_text", sliding_window=1024
    )
    del text["model_type"]
    assert isinstance(kv_layers_of_config({"model_type": "gemma3", "text_config": text}), KvLayers)


def test_every_model_of_the_catalog_that_generates_has_a_cache() -> None:
    for shape in models().values():
        assert isinstance(kv_layers_of_shape(shape), KvLayers) is shape.record.predicts_tokens
    found = kv_layers_of_shape(find_model("deepseek-v3"))
    assert isinstance(found, KvLayers)
    assert token_bytes(found, "bf16") == 61 * 576 * 2


def test_keys_that_a_file_lacks_are_those_of_transformers() -> None:
    """As of google/gemma-3-4b-it, whose text_config has five keys; a null width is hidden / heads."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    found = kv_layers_of_config({"model_type": "gemma3", "text_config": text})
    assert isinstance(found, KvLayers)
    assert found.cached == (CachedLayers(5, 4, 512), CachedLayers(29, 4, 512, 1024))
    qwen3 = {"model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
    lacking = kv_layers_of_config(qwen3)
    assert isinstance(lacking, KvLayers)
    assert lacking.cached == (CachedLayers(12, 32, 256),)
    assert layers("qwen3", head_dim=None, num_key_value_heads=None).cached == (CachedLayers(12, 8, 128),)


@pytest.mark.slow
def test_the_keys_that_are_taken_are_the_defaults_of_transformers() -> None:
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    for key, usual in _DEFAULTS.items():
        for model_type, value in usual.items():
            assert getattr(mapping[model_type], key) == value, (model_type, key)
    for model_type in sorted((_PLAIN | _LATENT) & {*mapping}):
        made = mapping[model_type]()
        found = kv_layers_of_config({**made.to_dict(), "model_type": model_type})
        if isinstance(found, Unknown):
            assert model_type in ("gemma3n_text", "minimax"), found.reason
            continue
        states = 0 if found.states is None else found.states.count
        shared = getattr(made, "num_kv_shared_layers", 0)
        assert sum(one.count for one in found.cached) + states + shared == made.num_hidden_layers, model_type
        width = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
        assert all(one.is_latent or one.width == 2 * width for one in found.cached), model_type


def test_heads_are_cut_over_gpus_and_copied_where_there_are_fewer() -> None:
    plain, latent = layers("llama", num_key_value_heads=4), layers("deepseek_v2", kv_lora_rank=512, qk_rope_head_dim=64)
    whole = token_bytes(plain, "fp8")
    assert [whole // token_bytes(plain, "fp8", gpus) for gpus in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert {token_bytes(latent, "bf16", gpus) for gpus in (1, 8)} == {12 * 576 * 2}


@given(st.integers(1, 1 << 18), st.sampled_from(sorted(KV_BITS)), st.sampled_from([0, 512, 4096]))
def test_a_sequence_takes_whole_blocks_and_more_tokens_no_less(tokens: int, kv_type: str, window: int) -> None:
    one = CachedLayers(10, 8, 256, window)
    for kept in (KvLayers((one,)), KvLayers((replace(one, window=0, count=2), replace(one, window=512)))):
        found, longer = (sequence_range(kept, kv_type, length) for length in (tokens, tokens + 16))
        assert found.low_bytes <= longer.low_bytes
        assert found.high_bytes <= longer.high_bytes
        pages = paged(kept, kv_type, tokens)
        assert pages.sequence_bytes % pages.block_bytes == 0
        assert pages.blocks(pages.sequence_bytes) == pages.sequence_blocks
        assert pages.concurrency(pages.sequence_bytes) == 1
        if not window:
            least = tokens * kept.cached[0].count * cached_bytes(kept.cached[0], kv_type)
            assert found.high_bytes >= least
