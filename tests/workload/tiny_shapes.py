"""One network of each family, small enough to train in milliseconds on a CPU."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import Experts, LatentAttention, ModelShape

GPT2 = ModelShape(
    name="tiny-gpt2",
    family="gpt2",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=128,
    vocab=61,
    seq_len=12,
    max_seq_len=16,
    tied_head=True,
    dropout=0.1,
)
LLAMA = ModelShape(
    name="tiny-llama",
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=61,
    seq_len=12,
    max_seq_len=16,
    qkv_bias=True,
)
QWEN_MOE = ModelShape(
    name="tiny-qwen-moe",
    family="moe",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=16,
    vocab=61,
    seq_len=12,
    max_seq_len=16,
    qk_norm=True,
    experts=Experts(count=8, active=2),
)
DEEPSEEK = ModelShape(
    name="tiny-deepseek",
    family="moe",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    head_dim=24,
    ffn=16,
    vocab=61,
    seq_len=12,
    max_seq_len=16,
    experts=Experts(16, 4, "sigmoid", shared=1, dense_layers=1, dense_ffn=64, weighs_in_fp32=True),
    latent=LatentAttention(q_rank=24, kv_rank=16, rope_width=8, value_width=16),
)
GPT_OSS = ModelShape(
    name="tiny-gpt-oss",
    family="moe",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=32,
    vocab=61,
    seq_len=12,
    max_seq_len=16,
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    experts=Experts(8, 2, "softmax-of-active", has_bias=True),
)
BERT = ModelShape(
    name="tiny-bert",
    family="bert",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=128,
    vocab=61,
    seq_len=12,
    max_seq_len=16,
    classes=3,
    dropout=0.1,
)
VIT = ModelShape(
    name="tiny-vit",
    family="vit",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=128,
    image_size=16,
    patch_size=4,
    classes=7,
)
RESNET = ModelShape(name="tiny-resnet", family="resnet", image_size=32, classes=7, stages=(1, 2), bottleneck=True)
MLP = ModelShape(name="tiny-mlp", family="mlp", layers=3, hidden=32, inputs=20, classes=7)

TINY = (GPT2, LLAMA, QWEN_MOE, DEEPSEEK, GPT_OSS, BERT, VIT, RESNET, MLP)
