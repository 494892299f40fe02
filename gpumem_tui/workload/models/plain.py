"""Networks without attention: ResNet, and a stack of linear layers with ReLU between them.

ResNet (He et al. 2015) is in torchvision's "v1.5" layout: a bottleneck strides in its 3×3 convolution.

Recomputing a block runs its batch normalization twice a step, so running statistics move twice as fast; loss,
gradients and memory are those of a plain run. Recomputing a linear layer gains nothing: what it would drop, its ReLU's
output, is the next layer's input.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.layers import run

_STEM_WIDTH = 64
_EXPANSION = 4
"""Output channels of a bottleneck over its inner width."""


class ResNet(nn.Module):
    """Images [batch, 3, pixels, pixels] to logits [batch, classes]."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        self.stem = nn.Sequential(
            nn.Conv2d(3, _STEM_WIDTH, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(_STEM_WIDTH),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        block = Bottleneck if shape.bottleneck else BasicBlock
        self.blocks = nn.ModuleList()
        channels = _STEM_WIDTH
        for stage, blocks in enumerate(shape.stages):
            width = _STEM_WIDTH * 2**stage
            for index in range(blocks):
                residual = block(channels, width, stride=2 if stage > 0 and index == 0 else 1)
                channels = residual.out_channels
                self.blocks.append(residual)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, shape.classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        x = self.stem(images)
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


class ResidualBlock(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1×1 convolution where the shape changes."""

    def __init__(self, branch: nn.Sequential, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.branch = branch
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(*_conv_norm(in_channels, out_channels, 1, stride=stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        out = self.branch(x)
        out += self.shortcut(x)
        activated: Tensor = self.relu(out)
        return activated


class BasicBlock(ResidualBlock):
    """A residual block of two 3×3 convolutions."""

    def __init__(self, in_channels: int, width: int, *, stride: int) -> None:
        branch = nn.Sequential(
            *_conv_norm(in_channels, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3),
        )
        super().__init__(branch, in_channels, width, stride)


class Bottleneck(ResidualBlock):
    """1×1, 3×3 and 1×1 convolutions, the last one widening."""

    def __init__(self, in_channels: int, width: int, *, stride: int) -> None:
        branch = nn.Sequential(
            *_conv_norm(in_channels, width, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, _EXPANSION * width, 1),
        )
        super().__init__(branch, in_channels, _EXPANSION * width, stride)


def _conv_norm(in_channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(out_channels)


class Mlp(nn.Module):
    """Features [batch, inputs] to logits [batch, classes] through `shape.layers` linear layers in all."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        widths = [shape.inputs, *[shape.hidden] * (shape.layers - 1)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], shape.classes)

    def forward(self, features: Tensor) -> Tensor:
        """Run the module; its class names the inputs."""
        x = features
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(x)
        return logits
