"""The decoder of the `NiuHuangxiaozi` recordings, written anew to ask the device for what theirs asked.

Four blocks of width 512 and 16 heads over 10,000 tokens: RMS norm, rotary positions kept on the host, attention and
softmax written out, a gated feed-forward network, einsum for every product, and an Adam that replaces its state.
"""

from __future__ import annotations

import torch
from torch import nn

_VOCABULARY, _WIDTH, _HEADS, _HIDDEN, _LAYERS, _POSITIONS, _BATCH = 10_000, 512, 16, 1_344, 4, 256, 10
_THETA = 10_000.0


def forward(context: int, device: torch.device) -> tuple[object, ...]:
    """Three forward passes, graphs dropped. Returns what is alive at the end."""
    model = _Decoder(device)
    tokens = torch.randint(0, _VOCABULARY, (_BATCH, context)).to(device)
    for _ in range(3):
        model(tokens)
    return model, tokens


def forward_and_backward(context: int, device: torch.device) -> tuple[object, ...]:
    """Three training steps on the last position's logits. Returns what is alive at the end."""
    model = _Decoder(device)
    optimizer = _Adam(model.parameters())
    tokens = torch.randint(0, _VOCABULARY, (_BATCH, context)).to(device)
    labels = torch.randint(0, _VOCABULARY, (_BATCH,)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(tokens)
        predicted = _whole(_whole(logits).select(1, -1), 1)
        loss = _cross_entropy(predicted, labels)
        loss.backward()
        optimizer.step()
    return model, optimizer, tokens, labels, logits, predicted, loss


def _whole(tensor: torch.Tensor, dimension: int = 0) -> torch.Tensor:
    """``tensor[:]``, which torch 2.6 made a slice with a gradient of its own and torch 2.13 leaves out."""
    whole: torch.Tensor = torch.ops.aten.slice(tensor, dimension)
    return whole


def _weight(rows: int, columns: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, device=device).uniform_().erfinv_())


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(outputs, inputs, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class _Norm(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return x / size * self.weight


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    highest = torch.max(scores, dim=-1, keepdim=True)[0]
    return torch.exp(scores - highest) / torch.sum(torch.exp(scores - highest), dim=-1, keepdim=True)


class _Attention(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (_Linear(_WIDTH, _WIDTH, device) for _ in range(4))
        pairs = _WIDTH // _HEADS // 2
        turns = torch.arange(_POSITIONS)[:, None] * _THETA ** (-torch.arange(pairs) / pairs)
        self.sine, self.cosine = torch.sin(turns), torch.cos(turns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[-2]
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.unflatten(-1, (_HEADS, -1)).transpose(-3, -2) for part in (query, key, value))
        query = self._turned(query)
        key = self._turned(key)
        mixed = _attend(query, key, value, torch.tril(torch.ones(tokens, tokens)))
        mixed = mixed.transpose(-3, -2).flatten(-2)
        return self.output(mixed)  # type: ignore[no-any-return]

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-2])
        sine = self.sine[positions].to(x.device)[:, :, None]
        cosine = self.cosine[positions].to(x.device)[:, :, None]
        x = x.unflatten(-1, (-1, 2))
        first = cosine * x[..., :1] - sine * x[..., 1:]
        second = sine * x[..., :1] + cosine * x[..., 1:]
        turned = torch.cat([first, second], dim=-1)
        return turned.flatten(-2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.to(query.device)
    products = torch.einsum("...qd,...kd->...qk", query, key)
    scores = products / torch.sqrt(torch.tensor(query.shape[-1], device=products.device))
    masked = scores.masked_fill_(~mask.bool(), -float("inf"))
    weights = _softmax(masked)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class _FeedForward(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.gate, self.up = (_Linear(_WIDTH, _HIDDEN, device) for _ in range(2))
        self.down = _Linear(_HIDDEN, _WIDTH, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        activated = gate * torch.sigmoid(gate)
        up = self.up(x)
        product = activated * up
        return self.down(product)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm(device) for _ in range(2))
        self.attention, self.feed_forward = _Attention(device), _FeedForward(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        attended = self.attention(normed)
        middle = attended + x
        normed_again = self.norms[1](middle)
        fed = self.feed_forward(normed_again)
        return fed + middle  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = _weight(_VOCABULARY, _WIDTH, device)
        self.blocks = nn.ModuleList(_Block(device) for _ in range(_LAYERS))
        self.norm = _Norm(device)
        self.head = _Linear(_WIDTH, _VOCABULARY, device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    highest = torch.max(logits, dim=-1, keepdim=True)[0]
    logs = logits - highest - torch.log(torch.sum(torch.exp(logits - highest), dim=-1, keepdim=True))
    chosen = torch.zeros_like(logs)
    chosen.scatter_(-1, labels.unsqueeze(-1), 1)
    return -torch.sum(chosen * logs) / logits.shape[0]


class _Adam(torch.optim.Optimizer):
    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})  # type: ignore[arg-type]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"m": torch.zeros_like(parameter.data), "v": torch.zeros_like(parameter.data)}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.data, self.state[parameter]
            m = state["m"]
            new_m = 0.9 * m + 0.1 * gradient
            state["m"] = new_m
            v = state["v"]
            new_v = 0.999 * v + 0.001 * gradient**2
            state["v"] = new_v
            parameter.data = parameter.data - 0.001 * (new_m / (torch.sqrt(new_v) + 1e-8))
            parameter.data = parameter.data - 0.0 * parameter.data
