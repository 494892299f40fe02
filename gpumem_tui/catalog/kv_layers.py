"""The layers of a language model as its KV cache sees them, read from a `config.json` or a shape of the catalog.

The rules are those of each architecture's `modeling_*.py` in transformers 5 (`layer_types`, `sliding_window`,
`num_kv_shared_layers`, …) and of vLLM's `kv_cache_interface.py`. A kind of model without a rule is unknown, never
guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.memory import Unknown
from gpumem_tui.text import printable


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """Layers that keep the keys and values of tokens, all alike.

    Attributes:
        heads: key/value heads. `width`: values that one of them keeps of a token, of key and value together.
        window: tokens that a later one attends to; 0 for every token.
        is_latent: one vector for all heads (DeepSeek-V2's latent and rope part), which every GPU has whole.
    """

    count: int
    heads: int
    width: int
    window: int = 0
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Linear-attention layers (Gated DeltaNet), which keep one state a sequence, however long that is.

    Attributes:
        conv_values: of the last inputs of its convolution. `state_values`: of the recurrent state.
    """

    count: int
    conv_values: int
    state_values: int


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Every layer that keeps something between tokens.

    Attributes:
        most_tokens: the longest sequence the model was trained for; 0 if unknown.
        heads: of queries, which tensor parallel divides; 0 if unknown.
    """

    cached: tuple[CachedLayers, ...]
    states: StateLayers | None = None
    most_tokens: int = 0
    heads: int = 0


# A shape of the catalog

_SINKS_WINDOW = 128
"""`sliding_window` of gpt-oss, in every other layer (openai/gpt-oss-20b and -120b, config.json)."""


def kv_layers_of_shape(shape: ModelShape) -> KvLayers | Unknown:
    """Return what a network of the catalog keeps of tokens, or why it keeps nothing."""
    if not shape.record.predicts_tokens:
        return Unknown(f"{shape.name} generates no tokens, so it keeps no KV cache")
    if shape.latent is not None:
        latent = CachedLayers(shape.layers, 1, shape.latent.kv_rank + shape.latent.rope_width, is_latent=True)
        return KvLayers((latent,), most_tokens=shape.max_seq_len, heads=shape.heads)
    width = 2 * shape.attention_width
    windows = [_SINKS_WINDOW * (index % 2 == 0) if shape.sinks else 0 for index in range(shape.layers)]
    return KvLayers(_alike(windows, shape.kv_heads, width), most_tokens=shape.max_seq_len, heads=shape.heads)


def _alike(windows: Sequence[int], heads: int, width: int) -> tuple[CachedLayers, ...]:
    """Return layers by window, those that keep every token first."""
    return tuple(CachedLayers(windows.count(window), heads, width, window) for window in sorted(set(windows)))


# A config.json

_PLAIN = frozenset(
    (
        "llama", "mistral", "mixtral", "ministral", "ministral3", "qwen2", "qwen2_moe", "qwen2_vl_text",
        "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "gpt_oss", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt", "bloom",
        "falcon", "gpt_bigcode", "starcoder2", "stablelm", "olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2",
        "granite", "granitemoe", "glm", "glm4", "glm4_moe", "smollm3", "exaone4", "llama4_text", "minimax_m2",
        "seed_oss", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "internlm2", "internlm3", "nemotron", "helium",
        "arcee", "apertus", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    )
)  # fmt: skip
_LATENT = frozenset(["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"])
_TEXT_OF = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "llama4": "llama4_text"}
"""The model_type of a `text_config` that names none."""
_WITHOUT = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "modernbert", "xlm-roberta", "electra", "vit"), "is an encoder"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "keeps states of layers without attention, no tokens"),
    "deepseek_v32": "keeps an indexer's keys too, whose format differs by engine",
    "deepseek_v4": "keeps compressed tokens, whose format differs by engine",
}
_PATTERNS = {"gemma3_text": 6, "cohere2": 4, "gemma2": 2, "gpt_oss": 2}
"""Every so many-th layer attends to all tokens and the others to a window, where `layer_types` is missing."""
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "head_dim": {
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text"), 256),
        **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 256),
        **dict.fromkeys(("qwen3", "qwen3_vl_text", "ernie4_5", "glm", "glm4", "helium", "internlm3"), 128),
        **dict.fromkeys(("llama4_text", "minimax_m2", "ministral3", "seed_oss"), 128),
        "gpt_oss": 64,
    },
    "num_attention_heads": {"gemma3_text": 8},
    "num_key_value_heads": {
        "ernie4_5": 2, "ernie4_5_moe": 4, "gemma": 16, "gemma2": 4, "gemma3_text": 4, "gemma3n_text": 2, "glm": 2,
        "glm4": 2, "glm4_moe": 8, "gpt_oss": 8, "internlm3": 2, "llama4_text": 8, "minimax_m2": 8, "ministral": 8,
        "ministral3": 8, "mistral": 8, "mixtral": 8, "qwen2": 32, "qwen2_5_vl_text": 8, "qwen2_moe": 16,
        "qwen2_vl_text": 8, "qwen3": 32, "qwen3_5_moe_text": 2, "qwen3_5_text": 4, "qwen3_moe": 4, "qwen3_next": 2,
        "qwen3_vl_moe_text": 16, "qwen3_vl_text": 32, "seed_oss": 8, "smollm3": 4, "stablelm": 32, "starcoder2": 2,
    },
    "sliding_window": {"gemma2": 4096, "gemma3_text": 4096, "gemma3n_text": 512, "gpt_oss": 128, "cohere2": 4096},
}  # fmt: skip
"""By key, the value that transformers 5 takes where a configuration lacks it, by model_type: Gemma 3's files state
neither heads nor widths. A key that is null is no such."""
_ALL_WINDOWED = frozenset(("mistral", "mixtral", "ministral", "phi3", "starcoder2"))
"""Every layer attends to `sliding_window` tokens, where that is a number."""


@dataclass(frozen=True)
class _Keys:
    """A configuration's keys. A number that is missing raises a ValueError that names it."""

    values: Mapping[str, object]
    model_type: str

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first that is there."""
        for name in names:
            found = self.values.get(name)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
        usual = None if names[0] in self.values else _DEFAULTS.get(names[0], {}).get(self.model_type)
        if usual is not None:
            return usual
        if default is None:
            raise ValueError(f"has no {names[0]!r}")
        return default

    def is_set(self, name: str) -> bool:
        """Return whether a flag is true."""
        return self.values.get(name) is True


def kv_layers_of_config(config: Mapping[str, object]) -> KvLayers | Unknown:
    """Return what a `config.json`'s network keeps of tokens, or why that is not known."""
    model_type, text = str(config.get("model_type", "")), config.get("text_config")
    if isinstance(text, Mapping):
        model_type, config = str(text.get("model_type") or _TEXT_OF.get(model_type, model_type)), text
    name = printable(model_type) or "a model without a model_type"
    if model_type in _WITHOUT:
        return Unknown(f"{name} {_WITHOUT[model_type]}")
    if config.get("is_encoder_decoder") is True:
        return Unknown(f"{name} has cross-attention, which keeps the encoder's tokens too")
    if model_type not in _PLAIN | _LATENT:
        return Unknown(f"no rule for the KV cache of {name} models")
    keys = _Keys(config, model_type)
    try:
        most_tokens = keys.number("max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=0)
        layers = keys.number("num_hidden_layers", "n_layer", "num_layers")
        if model_type in _LATENT:
            width = keys.number("kv_lora_rank") + keys.number("qk_rope_head_dim")
            heads = keys.number("num_attention_heads", default=0)
            return KvLayers((CachedLayers(layers, 1, width, is_latent=True),), most_tokens=most_tokens, heads=heads)
        return _plain(keys, layers, most_tokens)
    except ValueError as error:
        return Unknown(f"the configuration of {name} {error}")


def _plain(keys: _Keys, layers: int, most_tokens: int) -> KvLayers:
    """Return layers of grouped heads, each with or without a window, some of them with states instead.

    Raises:
        ValueError: a key is missing, or a kind of layer has no rule.
    """
    heads = keys.number("num_attention_heads", "n_head", "n_heads")
    width = 2 * keys.number("head_dim", default=keys.number("hidden_size", "n_embd", "d_model") // heads)
    kinds = _kinds(keys, layers)
    states = None
    if count := kinds.count("linear_attention"):
        states = _states(keys, count)
    kept = layers - keys.number("num_kv_shared_layers", default=0)
    windows = [_window(keys, kind) for kind in kinds[:kept] if kind != "linear_attention"]
    share = keys.number("cla_share_factor", default=1) if keys.is_set("use_cla") else 1
    windows = windows[::share]
    return KvLayers(_alike(windows, _kv_heads(keys, heads), width), states, most_tokens, heads)


def _kv_heads(keys: _Keys, heads: int) -> int:
    if keys.model_type == "falcon":
        grouped = keys.is_set("new_decoder_architecture")
        return keys.number("num_kv_heads", default=heads) if grouped else 1 if keys.is_set("multi_query") else heads
    if keys.model_type == "gpt_bigcode":
        return 1 if keys.values.get("multi_query", True) is True else heads
    return keys.number("num_key_value_heads", default=heads)


def _kinds(keys: _Keys, layers: int) -> list[str]:
    """Return each layer's kind, as `layer_types` has it or as transformers makes it where that is missing."""
    listed = keys.values.get("layer_types")
    if isinstance(listed, list) and listed:
        if len(listed) != layers:
            raise ValueError(f"names {len(listed)} 'layer_types' for {layers} layers")
        return [str(kind) for kind in listed]
    full, windowed = "full_attention", "sliding_attention"
    if keys.model_type in _PATTERNS:
        every = keys.number("sliding_window_pattern", "_sliding_window_pattern", default=_PATTERNS[keys.model_type])
        return [windowed if (index + 1) % every else full for index in range(layers)]
    if keys.model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        every = keys.number("full_attention_interval", default=4)
        return ["linear_attention" if (index + 1) % every else full for index in range(layers)]
    if keys.model_type in ("gemma3n_text", "llama4_text", "olmo3", "exaone4"):
        raise ValueError("has no 'layer_types'")
    if keys.model_type in _ALL_WINDOWED and keys.number("sliding_window", default=0):
        return layers * [windowed]
    if keys.is_set("use_sliding_window"):
        first = keys.number("max_window_layers", default=0)
        return [full if index < first else windowed for index in range(layers)]
    return layers * [full]


def _window(keys: _Keys, kind: str) -> int:
    if kind == "full_attention":
        return 0
    if kind == "sliding_attention":
        return keys.number("sliding_window")
    if kind == "chunked_attention":
        return keys.number("attention_chunk_size")
    raise ValueError(f"has layers of the kind {printable(kind)!r}, which have no rule")


def _states(keys: _Keys, count: int) -> StateLayers:
    """Return Gated DeltaNet's layers: the last inputs of the convolution, and a matrix for each value head."""
    if not keys.model_type.startswith(("qwen3_next", "qwen3_5")):
        raise ValueError("has linear-attention layers of a kind that has no rule")
    key_heads, value_heads = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    key_dim, value_dim = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateLayers(count, channels * (keys.number("linear_conv_kernel_dim") - 1), value_heads * key_dim * value_dim)
