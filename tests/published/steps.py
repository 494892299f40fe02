"""Whole training steps that others measured, written anew from what their programs do. Step as in `operators`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from tests.published.operators import Step, attend

# The decoder of Stanford's course CS336 with its AdamW

_COURSE = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20),
           "xl": (2560, 10240, 32, 32)}  # fmt: skip
"""Width, hidden width, layers, heads."""
_COURSE_WORDS, _COURSE_BATCH = 10_000, 4


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * size
        return self.weight * x


class _CourseBlock(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (_Linear(width, width) for _ in range(4))
        self.gate, self.down, self.up = _Linear(width, hidden), _Linear(hidden, width), _Linear(width, hidden)
        self.before_attention, self.before_feeding = _Norm(width), _Norm(width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        attended = self._attend(self.before_attention(x), turns)
        middle = x + attended
        return middle + self._feed(self.before_feeding(middle))

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(_silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    def _attend(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        query, key = _turned(query, turns), _turned(key, turns)
        positions = torch.arange(x.shape[1])
        mask = (positions[:, None] >= positions[None])[None]
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.output(mixed)  # type: ignore[no-any-return]


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
    cosine, sine = turns[:, : x.shape[-2], :].unbind(0)
    turned = cosine * first - sine * second
    turned_too = sine * first + cosine * second
    return torch.stack((turned, turned_too), dim=-1).flatten(-2)


class _Course(nn.Module):
    def __init__(self, size: str, tokens: int) -> None:
        super().__init__()
        width, hidden, layers, heads = _COURSE[size]
        self.embedding = nn.Parameter(torch.empty(_COURSE_WORDS, width))
        self.register_buffer("turns", torch.empty(2, tokens, width // heads // 2))
        self.blocks = nn.ModuleList(_CourseBlock(width, hidden, heads) for _ in range(layers))
        self.norm, self.head = _Norm(width), _Linear(width, _COURSE_WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens, :]
        for block in self.blocks:
            x = block(x, self.turns)
        x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def _course_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logs = -_log_softmax(logits)
    return torch.mean(torch.gather(logs, -1, labels.unsqueeze(-1)))


class _CourseAdamW(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.data, self.state[parameter]
            parameter.data -= 1e-5 * parameter.data
            old_m, old_v = state.get("m", torch.zeros_like(gradient)), state.get("v", torch.zeros_like(gradient))
            m = 0.9 * old_m + 0.1 * gradient
            v = 0.999 * old_v + 0.001 * torch.square(gradient)
            parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            state["m"], state["v"] = m, v


def course(size: str, tokens: int) -> Step:
    """fp32 on 4 sequences; logits and loss of a step live until the next one has its own."""
    words = torch.randint(0, _COURSE_WORDS, (_COURSE_BATCH, tokens + 1))
    inputs, labels = words[:, :-1], words[:, 1:]
    model = _Course(size, tokens)
    optimizer = _CourseAdamW(model.parameters())
    held: list[torch.Tensor] = []

    def step() -> None:
        logits = model(inputs)
        held[:1] = [logits]
        loss = _course_loss(logits, labels)
        held[1:] = [loss]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# minGPT

_MINGPT = {"nano": (48, 3, 3), "xl": (1600, 48, 25)}
"""Width, layers, heads."""


class _MinGptBlock(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feeding = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drops = nn.ModuleList(nn.Dropout(0.1) for _ in range(3))
        self.register_buffer("mask", torch.tril(torch.ones(positions, positions)).view(1, 1, positions, positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.before_attention(x))
        return x + self.drops[2](self.down(_gelu(self.up(self.before_feeding(x)))))  # type: ignore[no-any-return]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.size()
        parts = self.mix(x).split(width, dim=2)
        query, key, value = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf"))
        scores = F.softmax(scores, dim=-1)
        scores = self.drops[0](scores)
        mixed = scores @ value
        mixed = mixed.transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.drops[1](self.output(mixed))  # type: ignore[no-any-return]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class _MinGpt(nn.Module):
    def __init__(self, size: str, vocabulary: int, positions: int) -> None:
        super().__init__()
        width, layers, heads = _MINGPT[size]
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(_MinGptBlock(width, heads, positions) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(0, tokens.shape[1], device=tokens.device).unsqueeze(0)
        words, places = self.words(tokens), self.positions(positions)
        x = self.drop(words + places)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


def mingpt(size: str, zeroed: str) -> Step:
    """Its demo: 64 samples of 11 tokens of 3 words. `zeroed`: gradients dropped after the "forward" or the "step"."""
    model = _MinGpt(size, 3, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), foreach=False)
    held: list[object] = []

    def step() -> None:
        batch = [torch.randint(0, 3, (64, 11), device="cpu").to(model.head.weight.device) for _ in range(2)]
        held[:1] = [batch]
        logits, loss = model(*batch)
        held[1:] = [logits, loss]
        if zeroed == "forward":
            model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        if zeroed == "step":
            model.zero_grad(set_to_none=True)

    return step
