"""KV caches by formula against the sizes that logs of vLLM and llama.cpp state, with their sources in a table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpumem_tui.catalog.kv_layers import KvLayers, kv_layers_of_config
from gpumem_tui.formula.kv_cache import cached_bytes, paged, token_bytes
from gpumem_tui.memory import GIB, MIB

_FILE = Path(__file__).with_name("kv_caches.csv")
ROWS = list(csv.DictReader(_FILE.read_text().splitlines()))
POOLS = [row for row in ROWS if row["pool_gib"]]
SIZES = [row for row in ROWS if row["kv_mib"]]
_KEYS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
_LINEAR = (
    "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def layers_of(row: dict[str, str]) -> KvLayers:
    """The layers of a row's model, by the keys that its config.json has."""
    told = dict(pair.split("=") for pair in row["config"].split())
    config: dict[str, object] = {"model_type": row["model_type"], "max_position_embeddings": 1 << 20}
    config |= {key: int(told[name]) for name, key in _KEYS.items() if name in told}
    if "latent" in told:
        rank, rope = map(int, told["latent"].split("+"))
        config |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
    else:
        config |= {"head_dim": int(told["head_dim"]), "hidden_size": 1}
    if "window" in told:
        config["sliding_window"] = int(told["window"])
    if "linear" in told:
        config |= dict(zip(_LINEAR, map(int, told["linear"].split("/")), strict=True))
    found = kv_layers_of_config(config)
    assert isinstance(found, KvLayers), found
    return found


def test_there_are_fifteen_published_figures_with_their_source() -> None:
    assert len(ROWS) >= 15
    assert all(row["source"].startswith("https://github.com/") for row in ROWS)
    assert {row["model_type"] for row in ROWS} >= {"llama", "deepseek_v3", "gemma3_text", "qwen3_5_moe_text"}


def _name(row: dict[str, str]) -> str:
    return f"{row['engine']}-{row['model_type']}-{row['tokens']}-{row['kv_mib'] or row['pool_tokens']}"


@pytest.mark.parametrize("row", SIZES, ids=_name)
def test_a_cache_has_the_bytes_that_the_log_states(row: dict[str, str]) -> None:
    layers, tokens = layers_of(row), int(row["tokens"])
    size = token_bytes(layers, row["kv_type"]) * tokens
    if "52 layers" in row["source"]:
        size = sum(one.count * cached_bytes(one, row["kv_type"]) * tokens for one in layers.cached if one.window)
    assert f"{size / MIB:.2f}" == f"{float(row['kv_mib']):.2f}"


@pytest.mark.parametrize("row", POOLS, ids=_name)
def test_a_pool_holds_the_tokens_that_the_log_states(row: dict[str, str]) -> None:
    """The log rounds the pool to 0.01 GiB; the tokens are those of a pool within that."""
    tokens, parallel, pool = int(row["tokens"]), int(row["tensor_parallel"]), float(row["pool_gib"])
    pages = paged(layers_of(row), row["kv_type"], tokens, parallel)
    least, most = (int((pool + off) * GIB) for off in (-0.005, 0.005))
    assert pages.pool_tokens(least) <= int(row["pool_tokens"]) <= pages.pool_tokens(most)
    if row["concurrency"]:
        assert pages.concurrency(least) - 0.006 <= float(row["concurrency"]) <= pages.concurrency(most) + 0.006
