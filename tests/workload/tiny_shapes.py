"""One network of each family, small enough to train in milliseconds on a CPU."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape

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

TINY = (GPT2, LLAMA, BERT, VIT, RESNET, MLP)
