"""Initial weights of the transformers."""

from __future__ import annotations

from torch import nn

_STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2019, Devlin et al. 2018)."""


def init_transformer(module: nn.Module) -> None:
    """Give the linear layers and embeddings under `module` small weights.

    torch's default for embeddings, a standard deviation of 1, would make a tied head's logits overflow fp16.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=_STD)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
