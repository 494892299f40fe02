"""The keys of a Hugging Face config.json that decide a network's shape, with transformers' own defaults.

A Literal is where transformers allows more kinds of network than a `ModelShape` can describe: any other
value is refused rather than taken for another network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gpumem_tui.catalog.shapes import FAMILIES, Experts, Family, LatentAttention, ModelShape

Size = Annotated[int, Meta(ge=1)]
Layers = Annotated[int, Meta(ge=1, le=10_000)]
"""As many as `--layers` takes: they are gone through one by one."""
Dropout = Annotated[float, Meta(ge=0, lt=1)]
Gelu = Literal["gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"]


class Gpt2Config(Struct, kw_only=True):
    """A configuration of GPT-2."""

    n_layer: Layers
    n_embd: Size
    n_head: Size
    n_positions: Size
    vocab_size: Size
    n_inner: Size | None = None
    activation_function: Gelu = "gelu_new"
    attn_pdrop: Dropout = 0.1
    embd_pdrop: Dropout = 0.1
    resid_pdrop: Dropout = 0.1
    tie_word_embeddings: bool = True

    def shape(self, name: str) -> ModelShape:
        """Return the shape under the given name, not yet checked, as that of every configuration does.

        Raises (as all do):
            ValueError: a kind of network that a `ModelShape` cannot describe; the message names the key.
        """
        return ModelShape(
            name=name,
            family="gpt2",
            layers=self.n_layer,
            hidden=self.n_embd,
            heads=self.n_head,
            kv_heads=self.n_head,
            ffn=self.n_inner or 4 * self.n_embd,
            vocab=self.vocab_size,
            seq_len=min(FAMILIES["gpt2"].training_seq_len, self.n_positions),
            max_seq_len=self.n_positions,
            tied_head=self.tie_word_embeddings,
            dropout=_one_dropout(attn_pdrop=self.attn_pdrop, embd_pdrop=self.embd_pdrop, resid_pdrop=self.resid_pdrop),
        )


class TransformerConfig(Struct, kw_only=True):
    """The fields that the newer configurations have in common."""

    num_hidden_layers: Layers
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size

    def _shape_of(self, name: str, family: Family) -> ModelShape:
        """Return the shape under the given name with the common fields."""
        return ModelShape(
            name=name,
            family=family,
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            ffn=self.intermediate_size,
        )


class LlamaLikeConfig(TransformerConfig, kw_only=True):
    """The fields that Llama and networks like it have in common."""

    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None
    head_dim: Size | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: Dropout = 0.0
    tie_word_embeddings: bool = False

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        _require(self.attention_dropout == 0, "attention_dropout must be 0: the Llama family has no dropout")
        head_dim = self.head_dim or 0
        if head_dim * self.num_attention_heads == self.hidden_size:
            head_dim = 0  # spelled out, but no more than hidden / heads
        return replace(
            self._shape_of(name, "llama"),
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=head_dim,
            vocab=self.vocab_size,
            seq_len=min(FAMILIES["llama"].training_seq_len, self.max_position_embeddings),
            max_seq_len=self.max_position_embeddings,
            tied_head=self.tie_word_embeddings,
        )


class LlamaConfig(LlamaLikeConfig, kw_only=True):
    """A configuration of Llama."""

    num_key_value_heads: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        _require(not self.mlp_bias, "mlp_bias must be false: a feed-forward network with biases is not supported")
        return replace(super().shape(name), qkv_bias=self.attention_bias, out_bias=self.attention_bias)


class MistralConfig(LlamaLikeConfig, kw_only=True):
    """A configuration of Mistral, read as Llama's: its sliding window changes no tensor that is kept for backward."""


class Qwen2Config(LlamaLikeConfig, kw_only=True):
    """A configuration of Qwen2, whose query, key and value projections have biases."""

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        return replace(super().shape(name), qkv_bias=True)


class Qwen3Config(LlamaLikeConfig, kw_only=True):
    """Unlike Qwen2 it has a key for the heads' width; transformers takes 128 where it is missing."""

    head_dim: Size | None = 128
    attention_bias: Literal[False] = False

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        return replace(super().shape(name), qk_norm=True)


class ExpertsConfig(LlamaLikeConfig, kw_only=True):
    """A network whose blocks have experts."""

    num_experts_per_tok: Size

    def _shape_with(self, name: str, experts: Experts) -> ModelShape:
        """Return the shape with the experts of one block."""
        _require(
            experts.dense_layers < self.num_hidden_layers,
            "all blocks have one feed-forward network, and none has experts",
        )
        return replace(super().shape(name), family="moe", experts=experts)


class MixtralConfig(ExpertsConfig, kw_only=True):
    """A configuration of Mixtral."""

    num_local_experts: Size
    router_jitter_noise: float = 0.0

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        _require(self.router_jitter_noise == 0, "router_jitter_noise must be 0: the formula has no such noise")
        return self._shape_with(name, Experts(self.num_local_experts, self.num_experts_per_tok, weighs_in_fp32=True))


class Qwen3MoeConfig(ExpertsConfig, kw_only=True):
    """A configuration of Qwen3 with experts."""

    num_experts: Size
    moe_intermediate_size: Size
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: tuple[int, ...] | None = None
    attention_bias: Literal[False] = False

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        dense = sorted(self.mlp_only_layers or ())
        _require(dense == list(range(len(dense))), "mlp_only_layers must be the first blocks")
        dense_ffn = self.intermediate_size if dense else 0
        experts = Experts(self.num_experts, self.num_experts_per_tok, dense_layers=len(dense), dense_ffn=dense_ffn)
        return replace(self._shape_with(name, experts), ffn=self.moe_intermediate_size, qk_norm=True)


class DeepseekV3Config(ExpertsConfig, kw_only=True):
    """Without its prediction of a second token (num_nextn_predict_layers), which transformers leaves out as well."""

    n_routed_experts: Size
    n_shared_experts: Size = 1
    moe_intermediate_size: Size
    first_k_dense_replace: Annotated[int, Meta(ge=0)]
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_rope_head_dim: Size
    qk_nope_head_dim: Size
    v_head_dim: Size
    attention_bias: Literal[False] = False

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        experts = Experts(
            self.n_routed_experts,
            self.num_experts_per_tok,
            "sigmoid",
            shared=self.n_shared_experts,
            dense_layers=self.first_k_dense_replace,
            dense_ffn=self.intermediate_size,
            weighs_in_fp32=True,
        )
        latent = LatentAttention(self.q_lora_rank or 0, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim)
        return replace(
            self._shape_with(name, experts),
            ffn=self.moe_intermediate_size,
            kv_heads=self.num_attention_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            latent=latent,
        )


class GptOssConfig(ExpertsConfig, kw_only=True):
    """Sliding windows change no tensor that is kept: transformers writes all scores."""

    num_local_experts: Size
    head_dim: Size | None = 64
    attention_bias: Literal[True] = True

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        experts = Experts(self.num_local_experts, self.num_experts_per_tok, "softmax-of-active", has_bias=True)
        return replace(self._shape_with(name, experts), qkv_bias=True, out_bias=True, sinks=True)


class ClassifierConfig(TransformerConfig, kw_only=True):
    """An encoder under a classification head, with one output per label: 2 unless the configuration sets it."""

    hidden_act: Gelu = "gelu"
    num_labels: Size | None = None
    id2label: dict[str | int, str] | None = None
    attention_probs_dropout_prob: Dropout
    hidden_dropout_prob: Dropout

    def _shape_of(self, name: str, family: Family) -> ModelShape:
        return replace(
            super()._shape_of(name, family),
            classes=self.num_labels or len(self.id2label or ()) or 2,
            dropout=_one_dropout(
                attention_probs_dropout_prob=self.attention_probs_dropout_prob,
                hidden_dropout_prob=self.hidden_dropout_prob,
            ),
        )


class BertConfig(ClassifierConfig, kw_only=True):
    """A configuration of BERT."""

    vocab_size: Size
    max_position_embeddings: Size
    type_vocab_size: Literal[2] = 2
    position_embedding_type: Literal["absolute"] = "absolute"
    attention_probs_dropout_prob: Dropout = 0.1
    hidden_dropout_prob: Dropout = 0.1

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        return replace(
            self._shape_of(name, "bert"),
            vocab=self.vocab_size,
            seq_len=min(FAMILIES["bert"].training_seq_len, self.max_position_embeddings),
            max_seq_len=self.max_position_embeddings,
        )


class VitConfig(ClassifierConfig, kw_only=True):
    """A configuration of ViT."""

    image_size: Size
    patch_size: Size
    num_channels: Literal[3] = 3
    qkv_bias: bool = True
    attention_probs_dropout_prob: Dropout = 0.0
    hidden_dropout_prob: Dropout = 0.0

    def shape(self, name: str) -> ModelShape:
        """Return the shape, as `Gpt2Config.shape` does."""
        _require(self.qkv_bias, "qkv_bias must be true: a ViT without these biases is not supported")
        return replace(self._shape_of(name, "vit"), image_size=self.image_size, patch_size=self.patch_size)


HfConfig = Gpt2Config | LlamaLikeConfig | BertConfig | VitConfig
"""One model_type's keys."""

CONFIGS: Mapping[str, type[HfConfig]] = MappingProxyType(
    {
        "bert": BertConfig,
        "deepseek_v3": DeepseekV3Config,
        "gpt2": Gpt2Config,
        "gpt_oss": GptOssConfig,
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "mixtral": MixtralConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "qwen3_moe": Qwen3MoeConfig,
        "vit": VitConfig,
    }
)
"""The configurations that can be read, by model_type."""


NEWER_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType({"qwen3_moe": {"num_local_experts": "num_experts"}})
"""By model_type, keys that transformers 5 writes, and those of older files (`attribute_map` of its configurations)."""

HEADS: Mapping[str, str] = MappingProxyType(
    {
        "bert": "BertForSequenceClassification",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "gpt_oss": "GptOssForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "vit": "ViTForImageClassification",
    }
)
"""The one class of each model_type that the shape is of: others have another head, and so other weights and losses."""


def _one_dropout(**rates: float) -> float:
    """Return the one probability of a `ModelShape`. Its value costs no memory, but a mask does."""
    _require(
        len({rate > 0 for rate in rates.values()}) == 1,
        f"{' and '.join(rates)} must be all 0 or all above 0",
    )
    return max(rates.values())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
