"""KV cache by formula: bytes of a token, of a sequence, and how many sequences a pool of memory holds.

A token takes 2 · layers · key/value heads · head width · bytes (Kwon et al. 2023, PagedAttention, section 3); a latent
one kv_lora_rank + rope width (DeepSeek-V2, section 2.1). Blocks and groups of layers are those of vLLM 0.11 to 0.24
(`vllm/v1/core/kv_cache_utils.py`: `get_kv_cache_groups`, `get_max_concurrency_for_kv_cache_config`;
`vllm/v1/kv_cache_interface.py`: `max_memory_usage_bytes` of each kind of layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from gpumem_tui.catalog.kv_layers import CachedLayers, KvLayers, StateLayers
from gpumem_tui.memory import Range

BLOCK_TOKENS = 16
"""vLLM's `block_size` on CUDA."""
BATCHED_TOKENS = 8192
"""`max_num_batched_tokens` of vLLM's server on GPUs of 70 GiB and more; 2,048 on smaller ones. A window's layers keep
the tokens of one batch more."""
KV_BITS: Mapping[str, float] = MappingProxyType(
    {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}
)
"""Bits of a value by type; llama.cpp's blocks of 32 values have a scale of 16 bits, those of _1 a minimum too
(`ggml-common.h`)."""
_CONV_BYTES, _STATE_BYTES = 2, 4
"""A Gated DeltaNet's inputs in the model's 16 bits, its state in fp32 (`mamba_ssm_cache_dtype` of Qwen3-Next)."""
_STATES_KEPT = 2
"""States of a sequence where prefix caching is on, vLLM's default: the current one and that of the last block."""
_ALMOST_ALIKE = 1.25
"""vLLM pads the smaller kind of layers where the larger has no more than so many times as many."""


def cached_bytes(layer: CachedLayers, kv_type: str, tensor_parallel: int = 1) -> int:
    """Return the bytes that one such layer keeps of a token on one GPU; heads are copied where there are fewer."""
    heads = layer.heads if layer.is_latent else max(1, ceil(layer.heads / tensor_parallel))
    return ceil(heads * layer.width * KV_BITS[kv_type] / 8)


def token_bytes(layers: KvLayers, kv_type: str, tensor_parallel: int = 1) -> int:
    """Return the bytes that all layers keep of a token, within every window."""
    return sum(one.count * cached_bytes(one, kv_type, tensor_parallel) for one in layers.cached)


def state_bytes(states: StateLayers, tensor_parallel: int = 1) -> int:
    """Return the bytes of one linear-attention layer's state of a sequence."""
    values = _CONV_BYTES * states.conv_values + _STATE_BYTES * states.state_values
    return ceil(values / tensor_parallel)


@dataclass(frozen=True, slots=True)
class Paged:
    """A KV cache as vLLM divides it.

    Attributes:
        block_bytes: of a block: so many tokens of a group of layers, or a state of each.
        sequence_blocks: that a sequence of the given length takes at most.
        tokens: the length of that sequence.
        is_uniform: all layers are alike, so the pool holds whole blocks of tokens, of any sequences.
    """

    block_bytes: int
    sequence_blocks: int
    tokens: int
    is_uniform: bool

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence of this length at most."""
        return self.block_bytes * self.sequence_blocks

    def blocks(self, pool_bytes: int) -> int:
        """Return the blocks that a pool holds."""
        return max(0, pool_bytes) // self.block_bytes

    def concurrency(self, pool_bytes: int) -> float:
        """Return the sequences of this length that a pool holds, as vLLM's log states them."""
        return self.blocks(pool_bytes) / self.sequence_blocks

    def pool_tokens(self, pool_bytes: int) -> int:
        """Return the tokens that a pool holds, as vLLM's log states them."""
        if self.is_uniform:
            return self.blocks(pool_bytes) * BLOCK_TOKENS
        return int(self.concurrency(pool_bytes) * self.tokens)


def paged(layers: KvLayers, kv_type: str, tokens: int, tensor_parallel: int = 1) -> Paged:
    """Return the cache of sequences of so many tokens in blocks and groups of layers, as vLLM allocates it."""
    sizes = {one: cached_bytes(one, kv_type, tensor_parallel) for one in layers.cached}
    states = layers.states
    if len(sizes) == 1 and states is None:
        (layer, size), *_ = sizes.items()
        blocks = _blocks(layer, tokens, BLOCK_TOKENS)
        return Paged(layer.count * size * BLOCK_TOKENS, blocks, tokens, is_uniform=not layer.window)
    page = BLOCK_TOKENS * max(sizes.values())
    if states is not None:  # a block has so many tokens that it holds a state
        least = min(sizes.values())
        page = least * BLOCK_TOKENS * ceil(state_bytes(states, tensor_parallel) / least / BLOCK_TOKENS)
    counts = [one.count for one in sizes] + ([] if states is None else [states.count])
    group = max(counts) if max(counts) < _ALMOST_ALIKE * min(counts) else min(counts)
    found = sum(ceil(one.count / group) * _blocks(one, tokens, page // size) for one, size in sizes.items())
    if states is not None:
        found += ceil(states.count / group) * _STATES_KEPT
    return Paged(page * group, found, tokens, is_uniform=False)


def _blocks(layer: CachedLayers, tokens: int, block_tokens: int) -> int:
    """Return the blocks that a layer keeps of a sequence: all, or a window, a batch and one for where it begins."""
    if not layer.window:
        return ceil(tokens / block_tokens)
    return ceil(min(layer.window - 1 + BATCHED_TOKENS, tokens) / block_tokens) + 1


def sequence_range(layers: KvLayers, kv_type: str, tokens: int, tensor_parallel: int = 1) -> Range:
    """Return what a sequence of so many tokens takes: in an engine that keeps windows and states alone, and in vLLM."""
    least = sum(
        one.count * cached_bytes(one, kv_type, tensor_parallel) * _rounded(min(tokens, one.window or tokens))
        for one in layers.cached
    )
    if layers.states is not None:
        least += layers.states.count * state_bytes(layers.states, tensor_parallel)
    return Range.of((least, paged(layers, kv_type, tokens, tensor_parallel).sequence_bytes))


def _rounded(tokens: int) -> int:
    return BLOCK_TOKENS * ceil(tokens / BLOCK_TOKENS)
