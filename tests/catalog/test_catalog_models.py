"""The models of the catalog, held against parameter counts written out here from the architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from gpumem_tui.catalog.loader import find_model, models
from gpumem_tui.catalog.shapes import Family, ModelShape
from gpumem_tui.formula.parameters import active_parameters

PUBLISHED = [
    # Model cards and reference implementations, typed in apart from the catalog.
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    ("llama-2-7b", 6_738_415_616),
    ("llama-2-13b", 13_015_864_320),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3.2-1b", 1_235_814_400),
    ("llama-3.2-3b", 3_212_749_824),
    ("mistral-7b", 7_241_732_096),
    ("tinyllama-1.1b", 1_100_048_384),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-8b", 8_190_735_360),
    ("mixtral-8x7b", 46_702_792_704),  # 46.7 B (Jiang et al. 2024)
    ("qwen3-30b-a3b", 30_532_122_624),  # 30.5 B (model card)
    ("deepseek-v3", 671_026_404_352),  # 671 B (DeepSeek-AI 2024)
    ("gpt-oss-20b", 20_914_757_184),  # 20.91 B (Agarwal et al. 2025, table 1)
    ("gpt-oss-120b", 116_829_156_672),  # 116.83 B (there)
    ("bert-base", 109_483_778),
    ("bert-large", 335_143_938),
    ("vit-b-16", 86_567_656),
    ("vit-l-16", 304_326_632),
    ("vit-h-14", 632_045_800),
    ("resnet-18", 11_689_512),
    ("resnet-50", 25_557_032),
    ("resnet-152", 60_192_808),
]


def linear(inputs: int, outputs: int) -> int:
    """A weight and a bias."""
    return inputs * outputs + outputs


def encoder_block(shape: ModelShape) -> int:
    """A block of GPT-2, BERT or ViT: four attention projections, two linear layers, two LayerNorms."""
    h, f = shape.hidden, shape.ffn
    return 4 * linear(h, h) + linear(h, f) + linear(f, h) + 2 * 2 * h


def count_gpt2(shape: ModelShape) -> int:
    h = shape.hidden
    head = 0 if shape.tied_head else shape.vocab * h
    return (shape.vocab + shape.max_seq_len) * h + shape.layers * encoder_block(shape) + 2 * h + head


def count_llama(shape: ModelShape) -> int:
    h = shape.hidden
    width = shape.head_dim or h // shape.heads
    queries, keys = shape.heads * width, shape.kv_heads * width
    attention = h * queries + 2 * h * keys + queries * h
    biases = queries + 2 * keys if shape.qkv_bias else 0
    norms = 2 * h + (2 * width if shape.qk_norm else 0)
    block = attention + biases + 3 * h * shape.ffn + norms
    embeddings = shape.vocab * h * (1 if shape.tied_head else 2)
    return embeddings + shape.layers * block + h


def count_moe(shape: ModelShape) -> int:
    h, experts = shape.hidden, shape.experts
    assert experts is not None
    one = 3 * h * shape.ffn + (2 * shape.ffn + h if experts.has_bias else 0)
    routed = experts.count * (one + h + experts.has_bias) + experts.shared * 3 * h * shape.ffn
    blocks = shape.layers - experts.dense_layers
    return (
        2 * shape.vocab * h
        + shape.layers * (count_attention(shape) + 2 * h)
        + blocks * routed
        + experts.dense_layers * 3 * h * experts.dense_ffn
        + h
    )


def count_attention(shape: ModelShape) -> int:
    """Attention's parameters: DeepSeek's by narrow projections, else Llama's, with Qwen3's and gpt-oss's extras."""
    h, heads, width = shape.hidden, shape.heads, shape.attention_width
    if shape.latent is not None:
        q, kv, rope, value = (
            shape.latent.q_rank,
            shape.latent.kv_rank,
            shape.latent.rope_width,
            shape.latent.value_width,
        )
        queries = h * q + q + q * heads * width
        keys = h * (kv + rope) + kv + kv * heads * (width - rope + value)
        return queries + keys + heads * value * h
    projections = 2 * h * heads * width + 2 * h * shape.kv_heads * width
    biases = (heads + 2 * shape.kv_heads) * width + h if shape.qkv_bias else 0
    return projections + biases + (2 * width if shape.qk_norm else 0) + (heads if shape.sinks else 0)


def count_bert(shape: ModelShape) -> int:
    h = shape.hidden
    embeddings = (shape.vocab + shape.max_seq_len + 2) * h + 2 * h
    return embeddings + shape.layers * encoder_block(shape) + linear(h, h) + linear(h, shape.classes)


def count_vit(shape: ModelShape) -> int:
    h = shape.hidden
    patches = (shape.image_size // shape.patch_size) ** 2
    stem = linear(3 * shape.patch_size**2, h) + h + (patches + 1) * h
    return stem + shape.layers * encoder_block(shape) + 2 * h + linear(h, shape.classes)


def count_resnet(shape: ModelShape) -> int:
    def convolution(inputs: int, outputs: int, size: int) -> int:
        return inputs * outputs * size**2 + 2 * outputs  # no bias, then a batch norm's weight and bias

    total = convolution(3, 64, 7)
    channels = 64
    for stage, blocks in enumerate(shape.stages):
        width = 64 * 2**stage
        outputs = 4 * width if shape.bottleneck else width
        for _ in range(blocks):
            if shape.bottleneck:
                total += convolution(channels, width, 1) + convolution(width, width, 3)
                total += convolution(width, outputs, 1)
            else:
                total += convolution(channels, width, 3) + convolution(width, outputs, 3)
            if channels != outputs:
                total += convolution(channels, outputs, 1)
            channels = outputs
    return total + linear(channels, shape.classes)


COUNTS: dict[Family, Callable[[ModelShape], int]] = {
    "gpt2": count_gpt2,
    "llama": count_llama,
    "moe": count_moe,
    "bert": count_bert,
    "vit": count_vit,
    "resnet": count_resnet,
}
ALL_MODELS = [pytest.param(shape, id=name) for name, shape in models().items()]
COUNTED = [pytest.param(shape, id=name) for name, shape in models().items() if shape.published_parameters is not None]


@pytest.mark.parametrize("shape", COUNTED)
def test_architecture_has_the_published_parameters(shape: ModelShape) -> None:
    assert shape.family in COUNTS, f"the family {shape.family} has no count of its own among COUNTS"
    assert COUNTS[shape.family](shape) == shape.published_parameters


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED)
def test_published_parameters(name: str, parameters: int) -> None:
    assert find_model(name).published_parameters == parameters


def test_only_what_nobody_published_is_uncounted() -> None:
    uncounted = {name for name, shape in models().items() if shape.published_parameters is None}
    assert uncounted == {"megatron-22b", "megatron-175b", "mlp"}


@pytest.mark.parametrize(
    ("name", "billions"),
    # Model cards: 12.9 B of Mixtral, 3.3 B of Qwen3-30B-A3B, 22 B of Qwen3-235B-A22B, 37 B of DeepSeek-V3
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert active_parameters(find_model(name)) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("megatron-22b", 22), ("megatron-175b", 175)])
def test_megatron_shapes_are_as_large_as_their_names(name: str, billions: int) -> None:
    assert count_gpt2(find_model(name)) == pytest.approx(billions * 10**9, rel=0.02)


@pytest.mark.parametrize("shape", ALL_MODELS)
def test_shape_can_exist_and_says_where_it_comes_from(shape: ModelShape) -> None:
    shape.check()
    assert shape.source
    assert models()[shape.name] is shape


@pytest.mark.parametrize("shape", ALL_MODELS)
def test_trains_within_the_positions_it_has(shape: ModelShape) -> None:
    if shape.record.inputs == "tokens":
        assert 0 < shape.seq_len <= shape.max_seq_len
    else:
        assert shape.seq_len == shape.max_seq_len == 0


@pytest.mark.parametrize("shape", ALL_MODELS)
def test_only_llama_and_its_like_group_queries(shape: ModelShape) -> None:
    if shape.family not in ("llama", "moe"):
        assert shape.kv_heads == shape.heads


def test_covers_every_family() -> None:
    assert len(models()) >= 30
    assert {shape.family for shape in models().values()} == set(get_args(Family))


def test_mlp() -> None:
    mlp = find_model("mlp")
    assert (mlp.inputs, mlp.hidden, mlp.layers, mlp.classes) == (784, 4096, 8, 10)


def test_an_override_keeps_the_rest_of_a_catalog_model() -> None:
    shorter = find_model("gpt2").overridden(seq_len=256)
    assert (shorter.seq_len, shorter.hidden, shorter.published_parameters) == (256, 768, 124_439_808)
