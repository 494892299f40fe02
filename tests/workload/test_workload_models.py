"""The networks: published parameter counts, and the arithmetic of each block against an independent one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpumem_tui.catalog.loader import models
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models import build_model
from gpumem_tui.workload.models.encoders import Bert, Gpt2, Vit
from gpumem_tui.workload.models.layers import AttentionCore, RotaryEmbedding, apply_rotary
from gpumem_tui.workload.models.llama import Llama
from tests.workload.tiny_shapes import BERT, GPT2, LLAMA, MLP, RESNET, VIT

PUBLISHED = [shape for shape in models().values() if shape.published_parameters is not None]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def parameters_of(shape: ModelShape) -> int:
    """Unique parameters, counted without memory for them."""
    with torch.device("meta"):
        model = build_model(shape, Recipe())
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_has_exactly_the_published_parameters(shape: ModelShape) -> None:
    assert parameters_of(shape) == shape.published_parameters


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        pytest.param(
            ModelShape(
                name="gpt2",
                family="gpt2",
                layers=12,
                hidden=768,
                heads=12,
                kv_heads=12,
                ffn=3072,
                vocab=50257,
                seq_len=1024,
                max_seq_len=1024,
                tied_head=True,
            ),
            124_439_808,
            id="gpt2",
        ),
        pytest.param(
            ModelShape(
                name="qwen2.5-0.5b",
                family="llama",
                layers=24,
                hidden=896,
                heads=14,
                kv_heads=2,
                ffn=4864,
                vocab=151936,
                seq_len=2048,
                max_seq_len=32768,
                tied_head=True,
                qkv_bias=True,
            ),
            494_032_768,
            id="qwen2.5-0.5b",
        ),
        pytest.param(
            ModelShape(
                name="resnet-50",
                family="resnet",
                image_size=224,
                classes=1000,
                stages=(3, 4, 6, 3),
                bottleneck=True,
            ),
            25_557_032,
            id="resnet-50",
        ),
        # 20·32 + 32 inputs to hidden, 32·32 + 32 hidden to hidden, 32·7 + 7 hidden to classes
        pytest.param(MLP, 672 + 1056 + 231, id="mlp of three linear layers"),
        pytest.param(replace(MLP, layers=1), 20 * 7 + 7, id="mlp of one"),
    ],
)
def test_counts_without_the_catalog(shape: ModelShape, parameters: int) -> None:
    assert parameters_of(shape) == parameters


@pytest.mark.parametrize("shape", [GPT2, replace(LLAMA, tied_head=True)], ids=lambda shape: shape.name)
def test_tied_head_is_the_embedding(shape: ModelShape) -> None:
    model = build_model(shape, Recipe())
    assert isinstance(model, Gpt2 | Llama)
    assert model.head.weight.data_ptr() == model.token_embedding.weight.data_ptr()


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=lambda shape: shape.name)
def test_untied_head_has_its_own_weight(shape: ModelShape) -> None:
    untied, tied = (parameters_of(replace(shape, tied_head=tied)) for tied in (False, True))
    assert untied - tied == shape.vocab * shape.hidden


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=lambda shape: shape.name)
def test_decoders_do_not_see_the_future(shape: ModelShape) -> None:
    model = build_model(shape, Recipe()).eval()
    ids = torch.randint(shape.vocab, (2, shape.seq_len))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % shape.vocab
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_bert_sees_every_token() -> None:
    model = build_model(BERT, Recipe()).eval()
    ids = torch.randint(BERT.vocab, (2, BERT.seq_len))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % BERT.vocab
    assert not torch.equal(model(ids), model(changed))


def reference_layer(block: nn.Module, qkv: list[nn.Linear], *, norm_first: bool, tanh: bool) -> nn.Module:
    """PyTorch's own encoder layer with the weights of `block`."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, nn.Module)
    assert isinstance(mlp, nn.Sequential)
    linears = [layer for layer in mlp if isinstance(layer, nn.Linear)]
    layer = nn.TransformerEncoderLayer(
        32,
        4,
        dim_feedforward=128,
        activation=partial(F.gelu, approximate="tanh" if tanh else "none"),
        batch_first=True,
        norm_first=norm_first,
    )
    weights = {
        "self_attn.in_proj_weight": torch.cat([linear.weight for linear in qkv]),
        "self_attn.in_proj_bias": torch.cat([linear.bias for linear in qkv]),
    }
    parts = {
        "self_attn.out_proj": attention.proj,
        "linear1": linears[0],
        "linear2": linears[1],
        "norm1": block.attention_norm,
        "norm2": block.mlp_norm,
    }
    for name, part in parts.items():
        assert isinstance(part, nn.Linear | nn.LayerNorm)
        weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    layer.load_state_dict(weights)
    return layer.eval()


def scrambled(model: nn.Module) -> nn.Module:
    """Every parameter random, biases and norms included, so that a bias in the wrong place shows."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_gpt2_block_is_a_causal_prenorm_transformer() -> None:
    model = scrambled(build_model(GPT2, Recipe()))
    assert isinstance(model, Gpt2)
    block, x = model.blocks[0], torch.randn(2, 12, 32)
    reference = reference_layer(block, [block.attention.qkv], norm_first=True, tanh=True)  # type: ignore[union-attr,list-item]
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    torch.testing.assert_close(block(x), reference(x, src_mask=mask, is_causal=True), atol=1e-5, rtol=1e-4)


def test_vit_block_is_a_prenorm_transformer() -> None:
    model = scrambled(build_model(VIT, Recipe()))
    assert isinstance(model, Vit)
    block, x = model.blocks[0], torch.randn(2, 17, 32)
    reference = reference_layer(block, [block.attention.qkv], norm_first=True, tanh=False)  # type: ignore[union-attr,list-item]
    torch.testing.assert_close(block(x), reference(x), atol=1e-5, rtol=1e-4)


def test_bert_block_is_a_postnorm_transformer() -> None:
    model = scrambled(build_model(BERT, Recipe()))
    assert isinstance(model, Bert)
    block, x = model.blocks[0], torch.randn(2, 12, 32)
    attention = block.attention
    qkv = [attention.query, attention.key, attention.value]  # type: ignore[union-attr]
    reference = reference_layer(block, qkv, norm_first=False, tanh=False)  # type: ignore[arg-type]
    torch.testing.assert_close(block(x), reference(x), atol=1e-5, rtol=1e-4)


def reference_llama_block(weights: dict[str, Tensor], x: Tensor, shape: ModelShape) -> Tensor:
    """The block written out with complex rotations, one query head after the other."""
    width, tokens = shape.attention_width, x.size(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def head(x: Tensor, name: str, index: int) -> Tensor:
        rows = slice(index * width, (index + 1) * width)
        weight = weights[f"attention.{name}_proj.weight"][rows]
        return x @ weight.T + weights[f"attention.{name}_proj.bias"][rows]

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
        frequencies = 10_000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
        angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    normed = norm(x, "attention_norm")
    heads = []
    for index in range(shape.heads):
        shared = index * shape.kv_heads // shape.heads
        q, k = rotate(head(normed, "q", index)), rotate(head(normed, "k", shared))
        scores = q @ k.transpose(1, 2) / width**0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ head(normed, "v", shared))
    x = x + torch.cat(heads, dim=-1) @ weights["attention.out_proj.weight"].T
    normed = norm(x, "mlp_norm")
    gate = normed @ weights["mlp.gate_proj.weight"].T
    inner = gate * gate.sigmoid() * (normed @ weights["mlp.up_proj.weight"].T)
    return x + inner @ weights["mlp.down_proj.weight"].T


def test_llama_block_against_a_plain_reference() -> None:
    model = scrambled(build_model(LLAMA, Recipe()))
    assert isinstance(model, Llama)
    x = torch.randn(2, 12, 32)
    ours = model.blocks[1](x, *model.rotary(x))
    weights = {name: tensor.double() for name, tensor in model.blocks[1].state_dict().items()}
    reference = reference_llama_block(weights, x.double(), LLAMA)
    torch.testing.assert_close(ours.double(), reference, atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(first=st.integers(0, 40), second=st.integers(0, 40), shift=st.integers(0, 40))
def test_rotary_scores_depend_on_distance_only(first: int, second: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(first * 41 + second)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator).expand(-1, -1, -1, 81, -1)
    cos, sin = RotaryEmbedding(16)(torch.empty(1, 81, 16))
    q, k = apply_rotary(q, cos, sin)[0, 0], apply_rotary(k, cos, sin)[0, 0]
    torch.testing.assert_close(q[first] @ k[second], q[first + shift] @ k[second + shift], atol=1e-4, rtol=1e-4)


def test_rotary_angles_stay_exact_in_bfloat16() -> None:
    rotary = RotaryEmbedding(16)
    exact, _ = rotary(torch.empty(1, 2048, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = rotary(torch.empty(1, 2048, 16, dtype=torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=2**-8, rtol=0)


def test_resnet_bottlenecks_stride_in_their_3x3() -> None:
    model = build_model(replace(RESNET, stages=(2, 2, 2, 2)), Recipe())
    strided = [
        (name, layer.kernel_size)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2) and "blocks" in name
    ]
    assert [size for name, size in strided if "branch" in name] == [(3, 3)] * 3
    assert [size for name, size in strided if "shortcut" in name] == [(1, 1)] * 3


def test_attention_kernels_agree() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    outputs = [
        AttentionCore(Recipe(attention=attention), causal=True, dropout=0.0)(q, k, v)
        for attention in ("auto", "flash", "math")
    ]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])
