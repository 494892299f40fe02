"""Layers and losses that others measured, written anew from what their benchmarks do.

Each program takes its sizes and returns a step to repeat; what it makes before is on the device and stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], None]

_TOKENS = 8 * 2048


def _backward(run: Callable[[], torch.Tensor], gradient: torch.Tensor | None = None) -> Step:
    """Forward and backward with the graph kept, as Liger's benchmarks run them, so that gradients accumulate."""

    def step() -> None:
        y = run()
        y.backward(gradient, retain_graph=True)

    return step


def cross_entropy(vocabulary: int) -> Step:
    """fp32 logits of 16,384 tokens."""
    logits = torch.randn(_TOKENS, vocabulary, requires_grad=True)
    labels = torch.randint(vocabulary, (_TOKENS, 1)).squeeze(1)
    return _backward(lambda: F.cross_entropy(logits, labels))


def kl_div(vocabulary: int) -> Step:
    """The size of a log-softmax made once."""
    scores = torch.randn(_TOKENS, vocabulary, requires_grad=True).log_softmax(dim=-1)
    target = torch.randn(_TOKENS, vocabulary).softmax(dim=-1)
    return _backward(lambda: F.kl_div(scores, target, reduction="batchmean"))


def total_variation(vocabulary: int) -> Step:
    """Half the distance of two softmaxes made once."""
    scores = torch.randn(_TOKENS, vocabulary, requires_grad=True).softmax(dim=-1)
    target = torch.randn(_TOKENS, vocabulary).softmax(dim=-1)

    def distance() -> torch.Tensor:
        apart = torch.abs(scores - target) / 2.0
        return torch.sum(apart) / scores.size(0)

    return _backward(distance)


def language_head(tokens: int) -> Step:
    """bf16 projection to 128,256 words and cross-entropy; Liger's own layer of the same size is next to it."""
    layers = [nn.Linear(4096, 128_256, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(tokens, 4096, requires_grad=True, dtype=torch.bfloat16)
    labels = torch.randint(128_256, (tokens, 1)).squeeze(1)

    def loss() -> torch.Tensor:
        logits = layers[0](x)
        return F.cross_entropy(logits, labels)

    def step() -> None:
        loss().backward()

    return step


class _GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4096, 11008, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4096, 11008, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(11008, 4096, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))
        return result


def geglu(tokens: int) -> Step:
    """Llama's feed-forward network of 7B size on 8 sequences, in bf16."""
    layer = _GatedMlp()
    x = torch.randn(8, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
    return _backward(lambda: layer(x), torch.randn_like(x))


def _beside_another(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """The benchmark holds its own kernel's layer next to PyTorch's."""
    other, layer = make(), make()
    x = torch.randn(shape, dtype=dtype)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def run() -> torch.Tensor:
        assert other is not layer
        y: torch.Tensor = layer(x)
        return y

    return _backward(run, gradient)


def layer_norm(width: int) -> Step:
    """4,096 rows in fp32."""
    return _beside_another(partial(nn.LayerNorm, width), (4096, width), torch.float32)


class _RmsNorm(nn.Module):
    """Llama's, as transformers writes it: in fp32, back to the input's type, times fp32 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


def rms_norm(width: int) -> Step:
    """2,048 rows in bf16."""
    return _beside_another(partial(_RmsNorm, width), (2048, width), torch.bfloat16)


def group_norm(channels: int) -> Step:
    """128 samples of 512 positions in fp32, 4 channels a group."""
    return _beside_another(partial(nn.GroupNorm, channels // 4, channels), (128, channels, 512), torch.float32)


def attention(width: int, tokens: int) -> Step:
    """8 sequences of one head with a causal mask, softmax and products written out; gradients dropped after a step."""
    query, key, value = (torch.randn(8, tokens, width, requires_grad=True) for _ in range(3))
    positions = torch.arange(tokens)
    mask = positions.unsqueeze(0) >= positions.unsqueeze(1)
    held: list[torch.Tensor] = []

    def step() -> None:
        mixed = attend(query, key, value, mask)
        loss = mixed.sum()
        held[:] = [positions, mixed, loss]  # until the next step's take their place, as their loop's names do
        loss.backward()
        query.grad = key.grad = value.grad = None

    return step


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax attention as the course's code has it."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, the highest value taken off first."""
    rescaled = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(rescaled)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)
