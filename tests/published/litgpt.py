"""Networks tuned on Alpaca by lit-gpt's finetune/lora.py, adapter.py and adapter_v2.py, written anew without its files.

Lightning-AI/litgpt's tutorials/resource-tables.md has what each run said (`max_memory_allocated`, in GB of 1e9 with two
decimals) on A100s of 40 GB with torch 2.1.0 and bitsandbytes 0.41.1, and the length of each tokenizer's longest sample.
The first batch has that sample, the others are shorter: taken to have a third. Rows evaluated before are
not known either: without any a batch of four takes 0.15 % more. The network is that of 6178c7c, whose RMSNorm is of 32
bits: by 8641822, which the table names, Llama 2 takes 0.69 GB less than measured.

`gpumem-tui predict --gpu sim:a100-40gb --torch-version 2.1 -- python tests/published/litgpt.py phi-1.5 lora none 4`
predicts a row, `python -m tests.published litgpt` all of them. Not among the rows: two GPUs and more.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.memory import GIB
from tests.published.compiled import Row

_SOURCE = "Lightning-AI/litgpt tutorials/resource-tables.md at 0f021f3, A100-SXM4-40GB"
ROUNDING_BYTES = 5_000_000


@dataclass(frozen=True)
class _Shape:
    """A network of lit_gpt/config.py, and the tokens of Alpaca's longest sample, as the tables say them."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    inner: int
    longest: int
    rotated: int
    is_llama: bool = False
    one_norm: bool = False
    """Attention and MLP of a block share it, and the head has a bias: Phi."""


_SHAPES = {
    "phi-1.5": _Shape(24, 2048, 32, 51200, 8192, 1044, 32, one_norm=True),
    "stablelm-3b": _Shape(16, 4096, 32, 50688, 16384, 1034, 32),
    "llama-2-7b": _Shape(32, 4096, 32, 32000, 11008, 1304, 128, is_llama=True),
    "llama-2-13b": _Shape(40, 5120, 40, 32000, 13824, 1304, 128, is_llama=True),
}
_MEASURED = (
    ("phi-1.5 lora none 1", 4.82), ("phi-1.5 lora nf4 1", 3.78), ("phi-1.5 lora nf4-dq 1", 3.72),
    ("phi-1.5 lora none 2", 6.76), ("phi-1.5 lora none 4", 10.68),
    ("stablelm-3b lora none 1", 9.69), ("stablelm-3b lora nf4 1", 6.35), ("stablelm-3b lora nf4-dq 1", 6.19),
    ("stablelm-3b lora none 2", 12.10), ("stablelm-3b lora none 4", 16.92),
    ("llama-2-7b lora none 1", 21.30), ("llama-2-7b lora nf4 1", 14.14), ("llama-2-7b lora nf4-dq 1", 13.84),
    ("llama-2-7b lora none 2", 29.07),
    ("llama-2-13b lora none 1", 38.12), ("llama-2-13b lora nf4 1", 23.14), ("llama-2-13b lora nf4-dq 1", 22.55),
    ("stablelm-3b adapter none 1", 9.10), ("stablelm-3b adapter nf4 1", 5.65), ("stablelm-3b adapter nf4-dq 1", 5.48),
    ("llama-2-7b adapter none 1", 19.98), ("llama-2-7b adapter nf4 1", 12.68), ("llama-2-7b adapter nf4-dq 1", 12.38),
    ("stablelm-3b adapter-v2 none 1", 10.71), ("stablelm-3b adapter-v2 nf4 1", 7.41),
    ("stablelm-3b adapter-v2 nf4-dq 1", 7.25),
    ("llama-2-7b adapter-v2 none 1", 25.51), ("llama-2-7b adapter-v2 nf4 1", 18.30),
    ("llama-2-7b adapter-v2 nf4-dq 1", 17.98),
)  # fmt: skip
"""Network, method, format of the frozen weights and batch size; GB."""

_WHY = "what evaluations before left in the cache decides how much of a block is unused; which lengths is not said"


def _row(arguments: str, gigabytes: float) -> Row:
    return Row(
        "lit-" + arguments.replace(" ", "-"), _SOURCE, "a100-40gb", ("litgpt.py", *arguments.split()),
        "peak_allocated_bytes", gigabytes * 1e9 / GIB, 0.3, _WHY, torch="2.1",
    )  # fmt: skip


ROWS = tuple(_row(*measured) for measured in _MEASURED)
_RANK, _PROMPT, _FIRST_ADAPTED = 8, 10, 2
_CHUNK = 128
"""Tokens whose logits are made at once."""
_EVALUATED = (250, 90, 400)


class _Norm(nn.Module):
    """RMSNorm in 32 bits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Any:
        wide = x.float()
        scaled = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * scaled).to(x.dtype)


class _Scaled(nn.Module):
    """A linear layer with a bias and a scale to train: AdapterV2Linear."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.adapter_bias = nn.Parameter(torch.zeros(outputs))
        self.adapter_scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Any:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


class _Adapted(nn.Module):
    """The projection to queries, keys and values, with low ranks next to the first and the last: LoRAQKVLinear."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.dropout = nn.Dropout(0.05)
        self.lora_A = nn.Parameter(torch.zeros(2 * _RANK, width))
        self.lora_B = nn.Parameter(torch.zeros(2 * width, _RANK))
        self.places = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: Tensor) -> Any:
        made = self.linear(x)
        small = F.linear(self.dropout(x), self.lora_A).transpose(-2, -1)
        large = F.conv1d(small, self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        return made + self._padded(large) * 2.0

    def _padded(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        whole = x.new_zeros((*x.shape[:-1], self.linear.out_features)).view(-1, self.linear.out_features)
        places = torch.tensor(self.places, device=whole.device)
        whole = whole.index_copy(1, places, x.reshape(-1, len(self.places)))
        return whole.view((*x.shape[:-1], self.linear.out_features)).transpose(0, 1)


def _linear(method: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
    return (_Scaled if method == "adapter-v2" else nn.Linear)(inputs, outputs, bias=bias)


class _Attention(nn.Module):
    def __init__(self, shape: _Shape, method: str, layer: int) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        bias = not shape.is_llama
        self.attn = _Adapted(width, bias) if method == "lora" else _linear(method, width, 3 * width, bias)
        self.proj = _linear(method, width, width, bias)
        self.adapter_wte = None
        if method != "lora" and layer >= _FIRST_ADAPTED:
            self.adapter_wte = nn.Embedding(_PROMPT, width)
            self.gating_factor = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))
            self.prompt: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self._split(self.attn(x))
        rotated = self.shape.rotated
        query, key = (
            torch.cat((_rotated(part[..., :rotated], cos, sin), part[..., rotated:]), dim=-1) for part in (query, key)
        )
        mixed = self._mixed(query, key, value)
        if self.adapter_wte is not None:
            if self.prompt is None:  # as there: what the first evaluation made of it stays, and it is never trained
                self.prompt = self._split(self.attn(self.adapter_wte.weight.unsqueeze(0)))[1:]
            key, value = self.prompt
            mask = torch.ones(x.size(1), _PROMPT, dtype=torch.bool, device=x.device)
            mixed = mixed + self.gating_factor * self._mixed(query, key, value, mask)
        made: Tensor = self.proj(mixed.reshape(x.shape))
        return made

    def _split(self, x: Tensor) -> Any:
        parts = x.view(*x.shape[:2], self.shape.heads, 3, -1).permute(0, 2, 3, 1, 4).split((1, 1, 1), dim=2)
        return tuple(part.reshape(x.size(0), self.shape.heads, x.size(1), -1) for part in parts)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        scale = 1 / math.sqrt(query.size(-1))
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale)
        return mixed.transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class _MLP(nn.Module):
    def __init__(self, shape: _Shape, method: str) -> None:
        super().__init__()
        bias = not shape.is_llama
        self.fc = _linear(method, shape.width, shape.inner, bias)
        self.fc_2 = _linear(method, shape.width, shape.inner, bias) if shape.is_llama else None
        self.proj = _linear(method, shape.inner, shape.width, bias)

    def forward(self, x: Tensor) -> Any:
        if self.fc_2 is None:
            return self.proj(F.gelu(self.fc(x)))
        gate, inner = self.fc(x), self.fc_2(x)
        return self.proj(F.silu(gate) * inner)


class _Block(nn.Module):
    def __init__(self, shape: _Shape, method: str, layer: int) -> None:
        super().__init__()
        self.is_llama = shape.is_llama
        norm: Any = _Norm if shape.is_llama else nn.LayerNorm
        self.norm_1 = norm(shape.width)
        self.attn = _Attention(shape, method, layer)
        self.norm_2: Any = None if shape.one_norm else norm(shape.width)
        self.mlp = _MLP(shape, method)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        first = self.norm_1(x)
        h = self.attn(first, cos, sin)
        if self.is_llama:
            x = h + x
            return self.mlp(self.norm_2(x)) + x
        second = first if self.norm_2 is None else self.norm_2(x)
        return self.mlp(second) + h + x


class _Network(nn.Module):
    def __init__(self, shape: _Shape, method: str) -> None:
        super().__init__()
        self.lm_head = _linear(method, shape.width, shape.vocabulary, shape.one_norm)
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(_Block(shape, method, layer) for layer in range(shape.layers))
        self.ln_f = (_Norm if shape.is_llama else nn.LayerNorm)(shape.width)
        angles = torch.outer(torch.arange(shape.longest), torch.arange(shape.rotated // 2).float()).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, words: Tensor, chunk: int = 0) -> Any:
        cos, sin = (self.get_buffer(name)[: words.size(1)] for name in ("cos", "sin"))
        x = self.wte(words)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return [self.lm_head(part) for part in x.split(chunk, dim=1)] if chunk else self.lm_head(x)


def _is_trained(name: str, method: str) -> bool:
    if method == "lora":
        return "lora_" in name
    norms = ("norm_1", "norm_2", "ln_f") if method == "adapter-v2" else ()
    return any(part in name for part in ("adapter_", "gating_factor", *norms))


class _Product(torch.autograd.Function):
    """The product with an unpacked weight by bitsandbytes 0.41, which keeps its input until the graph goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        ctx.state, ctx.tensors = state, (x, packed) if ctx.needs_input_grad[0] else (None, None)
        return F.linear(x, dequantize_4bit(packed, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        from bitsandbytes.functional import dequantize_4bit

        return gradient @ dequantize_4bit(ctx.tensors[1], ctx.state).to(gradient.dtype), None, None, None


def _fabric(packed: str) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import BitsandbytesPrecision

    if packed != "none":
        bitsandbytes: Any = import_module("bitsandbytes")

        def multiply(x: Tensor, weight: Tensor, quant_state: Any, out: None = None, bias: Tensor | None = None) -> Any:
            return _Product.apply(x, weight, bias, quant_state)  # type: ignore[no-untyped-call]

        bitsandbytes.matmul_4bit = multiply
        mode: Any = packed
        return Fabric(devices=1, plugins=BitsandbytesPrecision(mode, torch.bfloat16))
    return Fabric(devices=1, precision="bf16-true")


def _loss(logits: list[Tensor], labels: Tensor) -> Tensor:
    logits[-1] = logits[-1][..., :-1, :]
    parts = [
        F.cross_entropy(part.reshape(-1, part.size(-1)), words.reshape(-1), ignore_index=-1, reduction="none")
        for part, words in zip(logits, labels[..., 1:].split(logits[0].size(1), dim=1), strict=True)
    ]
    return torch.cat(parts).mean()


def train(network: str, method: str, packed: str, batch_size: int) -> None:
    """Evaluate, and make a step of two batches, of which the first has the longest sample."""
    shape = _SHAPES[network]
    fabric = _fabric(packed)
    fabric.launch()
    with fabric.init_module():
        model = _Network(shape, method)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = _is_trained(name, method)
    model = fabric.setup_module(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if packed == "none":
        optimizer: Any = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)
    else:
        optimizers: Any = import_module("bitsandbytes.optim")
        optimizer = optimizers.PagedAdamW(trained, lr=3e-4, weight_decay=0.01)
    optimizer = fabric.setup_optimizers(optimizer)
    with torch.inference_mode() if method == "lora" else torch.no_grad():
        _evaluate(fabric, model, batch_size)
    for is_last in (False, True):
        words = torch.ones(batch_size, shape.longest // (3 if is_last else 1), dtype=torch.int64)
        words, labels = fabric.to_device((words, words.clone()))
        logits = model(words, chunk=_CHUNK)
        loss = _loss(logits, labels)
        fabric.backward(loss / 2)
    optimizer.step()
    optimizer.zero_grad()


def _evaluate(fabric: Any, model: nn.Module, batch_size: int) -> None:
    model.eval()
    for length in _EVALUATED:
        words = fabric.to_device(torch.ones(batch_size, length, dtype=torch.int64))
        logits = model(words)[..., :-1, :]
        F.cross_entropy(logits.reshape(-1, logits.size(-1)), words[..., 1:].reshape(-1), ignore_index=-1)
    model.train()


if __name__ == "__main__":
    network, method, packed, batch_size = sys.argv[1:]
    train(network, method, packed, int(batch_size))
