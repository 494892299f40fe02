"""The families of networks that have a closed form and a network of ours: what they differ in, a record each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Family = Literal["gpt2", "llama", "moe", "bert", "vit", "resnet", "mlp"]


@dataclass(frozen=True, slots=True)
class FamilyRecord:
    """One family.

    Attributes:
        inputs: what a sample is.
        fields: of a shape, those that a user may set.
        predicts_tokens: has a head over the vocabulary, and predicts every next token; else it is a classifier.
        has_attention: is made of transformer blocks.
        positions: how blocks know the order of tokens: from a table that ends, by rotation, or not at all.
        is_gated: feed-forward networks are SwiGLU, three matrices instead of two.
        projects_apart: queries, keys and values come from a projection each, instead of one for all three.
        has_batch_norm: is made of convolutions that are normalized over the batch.
        training_seq_len: tokens per sample that it is trained at unless told otherwise, or as many as it takes at most;
            0 for none.
        remark: what the closed form takes for granted of its blocks; empty where they are those of its source.
    """

    inputs: Literal["tokens", "images", "features"]
    fields: frozenset[str]
    predicts_tokens: bool = False
    has_attention: bool = False
    positions: Literal["learned", "rotary", "none"] = "none"
    is_gated: bool = False
    projects_apart: bool = False
    has_batch_norm: bool = False
    training_seq_len: int = 0
    remark: str = ""


_TRANSFORMER = frozenset({"layers", "hidden", "heads", "ffn"})
_ENCODER = "The encoder's blocks are counted like the paper's GPT blocks: an adaptation."

FAMILIES: Mapping[Family, FamilyRecord] = MappingProxyType(
    {
        "gpt2": FamilyRecord(
            inputs="tokens",
            fields=_TRANSFORMER | {"vocab", "seq_len"},
            predicts_tokens=True,
            has_attention=True,
            positions="learned",
            training_seq_len=1024,
        ),
        "llama": FamilyRecord(
            inputs="tokens",
            fields=_TRANSFORMER | {"kv_heads", "vocab", "seq_len"},
            predicts_tokens=True,
            has_attention=True,
            positions="rotary",
            is_gated=True,
            projects_apart=True,
            training_seq_len=2048,
            remark="SwiGLU and grouped keys are counted like the paper's GPT blocks: an adaptation.",
        ),
        "moe": FamilyRecord(
            inputs="tokens",
            fields=_TRANSFORMER | {"kv_heads", "vocab", "seq_len"},
            predicts_tokens=True,
            has_attention=True,
            positions="rotary",
            is_gated=True,
            projects_apart=True,
            training_seq_len=2048,
            remark="Every expert gets as many tokens as the others; without experts' own loss, which balances them.",
        ),
        "bert": FamilyRecord(
            inputs="tokens",
            fields=_TRANSFORMER | {"vocab", "seq_len"},
            has_attention=True,
            positions="learned",
            projects_apart=True,
            training_seq_len=512,
            remark=_ENCODER,
        ),
        "vit": FamilyRecord(
            inputs="images",
            fields=_TRANSFORMER | {"image_size"},
            has_attention=True,
            remark=_ENCODER,
        ),
        "resnet": FamilyRecord(inputs="images", fields=frozenset({"image_size"}), has_batch_norm=True),
        "mlp": FamilyRecord(inputs="features", fields=frozenset({"layers", "hidden"})),
    }
)
