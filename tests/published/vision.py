"""Networks of videos, segmentation and proposals that others measured on V100s, in plain PyTorch.

mmaction2's zoo (its branch 0.x) has the most MiB that torch allocated on eight GPUs, of clips whose sizes its
configurations state, MMSegmentation's and detectron2's zoos in GB (whether of 1000 or 1024 MB is not stated),
with torch 1.3 to 1.8: DistributedDataParallel, SGD with momentum, no autocast. All of them run with detectron2's and
mmaction2's own code, too, and take equal memory: `predict -- python -m torch.distributed.run --nproc-per-node 8 …`.

Not among the rows: what was measured at another batch size than its configuration has, as SlowFast's ResNet-101.

`gpumem-tui predict --gpu sim:v100-32gb --torch-version 1.8 -- python -m torch.distributed.run --nproc-per-node 8
tests/published/vision.py video 8 4` predicts a row, `python -m tests.published vision` all of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.memory import GIB, MIB, Range
from tests.published.compiled import Row

_STEPS = 3
_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_VIDEO = "open-mmlab/mmaction2 configs/recognition/{}/README.md of 0.x, 8 V100"
_SEGMENTATION = "open-mmlab/mmsegmentation configs/fcn/metafile.yaml 1.2.2, 4 V100"
_PROPOSALS = "facebookresearch/detectron2 MODEL_ZOO.md@02b5c4e, 8 V100"
_FEW = "a few MiB: the versions of torch and cuDNN are not stated"


def predicted(row: Row, found: dict[str, Any]) -> Range:
    """Return between what sizes the most that is allocated is, by its trace.

    Near the loss of a network of videos, where its peak is, convolutions are small. Detectors and segmentation have
    theirs at the largest ones, with the workspace that cuDNN may take.
    """
    size_bytes = found[row.what]
    workspaces = next((one["high_bytes"] for one in found["unknowns"] if one["name"] == "cuDNN workspaces"), 0)
    return Range(size_bytes, size_bytes if row.program[1] == "video" else size_bytes + workspaces)


def _row(name: str, source: str, program: str, bytes_: float, percent: float, version: str, why: str = "") -> Row:
    return Row(
        name, source, "v100-32gb", ("vision.py", *program.split()), "peak_allocated_bytes", bytes_ / GIB, percent, why,
        gpus=8, torch=version,
    )  # fmt: skip


ROWS = (
    *(
        _row(f"mmaction-{name}", _VIDEO.format(folder), program, mib * MIB, 0.1, "1.8", _FEW)
        for name, folder, program, mib in (
            ("slowonly-4", "slowonly", "video 8 4", 3168), ("slowonly-8", "slowonly", "video 8 8", 5820),
            ("slowonly-4-24", "slowonly", "video 24 4", 8472),
            ("slowonly-nl-4", "slowonly", "video 8 4 --non-local", 4435),
            ("slowonly-nl-8", "slowonly", "video 8 8 --non-local", 8895),
            ("i3d-32", "i3d", "video 8 32 --inflated", 5170),
            ("i3d-nl-32", "i3d", "video 8 32 --inflated --non-local", 6438),
        )
    ),
    _row("mmseg-fcn-r50", _SEGMENTATION, "fcn 2 50", 5.7e3 * MIB, 2.5, "1.5"),
    _row("mmseg-fcn-r101", _SEGMENTATION, "fcn 2 101", 9.2e3 * MIB, 1.5, "1.5"),
    _row("detectron2-rpn-fpn", _PROPOSALS, "proposals 2 fpn", 2.7e3 * MIB, 25, "1.3"),
    _row("detectron2-rpn-c4", _PROPOSALS, "proposals 2 c4", 1.5e3 * MIB, 22, "1.3"),
)  # fmt: skip


# Videos


class _Block3d(nn.Module):
    """A bottleneck of three dimensions; `inflated`: its first convolution reaches over three frames."""

    def __init__(self, given: int, width: int, stride: int, *, inflated: bool, non_local: bool) -> None:
        super().__init__()
        reach = 3 if inflated else 1
        kernels = (((reach, 1, 1), 1, width), ((1, 3, 3), stride, width), ((1, 1, 1), 1, 4 * width))
        layers: list[nn.Module] = []
        channels = given
        for kernel, step, made in kernels:
            pads = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
            layers += [nn.Conv3d(channels, made, kernel, (1, step, step), pads, bias=False), nn.BatchNorm3d(made)]
            layers.append(nn.ReLU(inplace=True))
            channels = made
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if given != channels:
            down = nn.Conv3d(given, channels, 1, (1, stride, stride), bias=False)
            self.shortcut = nn.Sequential(down, nn.BatchNorm3d(channels))
        self.activation = nn.ReLU(inplace=True)
        self.rest: nn.Module = _NonLocal(channels) if non_local else nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(self.activation(self.layers(x) + self.shortcut(x)))


class _NonLocal(nn.Module):
    """Attention over all places of all frames, of half the channels, with keys and values at half the resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.query = nn.Conv3d(channels, half, 1)
        self.key, self.value = (nn.Sequential(nn.Conv3d(channels, half, 1), nn.MaxPool3d((1, 2, 2))) for _ in range(2))
        self.out = nn.Sequential(nn.Conv3d(half, channels, 1, bias=False), nn.BatchNorm3d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.value(x).flatten(2).permute(0, 2, 1)
        query = self.query(x).flatten(2).permute(0, 2, 1)
        weights = query @ self.key(x).flatten(2)
        weights /= query.shape[-1] ** 0.5
        mixed = weights.softmax(dim=-1) @ value
        mixed = mixed.permute(0, 2, 1).contiguous().reshape(x.shape[0], -1, *x.shape[2:])
        return x + self.out(mixed)  # type: ignore[no-any-return]


class _Video(nn.Module):
    """SlowOnly of ResNet-50, or I3D: `inflated`."""

    def __init__(self, *, inflated: bool, non_local: bool) -> None:
        super().__init__()
        reach, step = (5, 2) if inflated else (1, 1)
        stem: list[nn.Module] = [nn.Conv3d(3, 64, (reach, 7, 7), (step, 2, 2), (reach // 2, 3, 3), bias=False)]
        stem += [nn.BatchNorm3d(64), nn.ReLU(inplace=True), nn.MaxPool3d((1, 3, 3), (step, 2, 2), (0, 1, 1))]
        patterns = (
            ((1, 1, 1), (1, 0) * 2, (1, 0) * 3, (0, 1, 0)) if inflated else ((0,) * 3, (0,) * 4, (1,) * 6, (1,) * 3)
        )
        channels = 64
        for stage, pattern in enumerate(patterns):
            for number, is_inflated in enumerate(pattern):
                attends = non_local and stage in (1, 2) and number % 2 == 0
                stride = 2 if stage and not number else 1
                stem.append(_Block3d(channels, 64 << stage, stride, inflated=bool(is_inflated), non_local=attends))
                channels = 256 << stage
            if inflated and not stage:
                stem.append(nn.MaxPool3d((2, 1, 1), (2, 1, 1)))
        self.layers = nn.Sequential(*stem, nn.AdaptiveAvgPool3d(1), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(channels, 400)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(clips))
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long).to(scores.device))


def _video(batch_size: str, frames: str, *options: str) -> tuple[nn.Module, list[int]]:
    model = _Video(inflated="--inflated" in options, non_local="--non-local" in options)
    return model, [int(batch_size), 3, int(frames), 224, 224]


# Images


class _Frozen(nn.Module):
    """A batch norm that does not learn, as detectron2 has it: nothing is kept of its input."""

    scale: torch.Tensor
    bias: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, channels, 1, 1))
        self.register_buffer("bias", torch.zeros(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.bias


class _Block(nn.Module):
    """A bottleneck of two dimensions; Caffe's has its stride in the first convolution."""

    def __init__(
        self, given: int, width: int, stride: int, spread: int, norm: Callable[[int], nn.Module], *, as_caffe: bool
    ) -> None:
        super().__init__()
        first, second = (stride, 1) if as_caffe else (1, stride)
        made = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(given, width, 1, first, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, second, spread, spread, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, made, 1, bias=False), norm(made),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if given != made:
            self.shortcut = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), norm(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.layers(x) + self.shortcut(x))


def _stages(
    depth: int, norm: Callable[[int], nn.Module], spreads: Sequence[int], *, as_caffe: bool = False
) -> nn.ModuleList:
    """Make the four stages; where `spreads` is above 1 its convolutions reach wider in place of a stride."""
    stages, channels, before = nn.ModuleList(), 64, 1
    for stage, count in enumerate(_DEPTHS[depth]):
        blocks = []
        for number in range(count):
            stride = 2 if stage and not number and spreads[stage] == 1 else 1
            spread = spreads[stage] if number else before
            blocks.append(_Block(channels, 64 << stage, stride, spread, norm, as_caffe=as_caffe))
            channels = 256 << stage
        before = spreads[stage]
        stages.append(nn.Sequential(*blocks))
    return stages


class _Convolutional(nn.Module):
    """FCN on a ResNet of eight pixels a place, with a head on its third stage next to the last one's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given, made, stride in ((3, 32, 2), (32, 32, 1), (32, 64, 1)):
            layers += self._convolved(given, made, stride)
        self.stem = nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1))
        self.stages = _stages(depth, nn.SyncBatchNorm, (1, 1, 2, 4))
        self.last = nn.Sequential(*self._convolved(2048, 512), *self._convolved(512, 512))
        self.joined = nn.Sequential(*self._convolved(2560, 512))
        self.scores = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(512, 19, 1))
        self.beside = nn.Sequential(*self._convolved(1024, 256), nn.Dropout2d(0.1), nn.Conv2d(256, 19, 1))

    def _convolved(self, given: int, made: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.SyncBatchNorm(made), nn.ReLU(inplace=True)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(images)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        classes = torch.zeros(len(images), *images.shape[2:], dtype=torch.long).to(images.device)
        joined = self.joined(torch.cat([maps[4], self.last(maps[4])], dim=1))
        return self._loss(self.scores(joined), classes) + 0.4 * self._loss(self.beside(maps[3]), classes)

    def _loss(self, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        scores = F.interpolate(scores, size=classes.shape[1:], mode="bilinear", align_corners=False)
        loss = F.cross_entropy(scores, classes, reduction="none", ignore_index=255).mean()
        scores.topk(1, dim=1)  # its accuracy
        return loss


def _segmentation(batch_size: str, depth: str) -> tuple[nn.Module, list[int]]:
    return _Convolutional(int(depth)), [int(batch_size), 3, 512, 1024]


class _Proposals(nn.Module):
    """The first stage of Faster R-CNN: what detectron2 trains as RPN, on a pyramid or on the fourth map."""

    def __init__(self, *, pyramid: bool) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), _Frozen(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.stem = nn.Sequential(*stem)
        self.stages = _stages(50, _Frozen, (1, 1, 1, 1), as_caffe=True)[: 4 if pyramid else 3]
        for frozen in (self.stem, self.stages[0]):
            frozen.requires_grad_(False)
        channels, anchors = (256, 3) if pyramid else (1024, 15)
        widths = [256 << stage for stage in range(4)] if pyramid else []
        self.across = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in widths)
        self.shared = nn.Conv2d(channels, channels, 3, padding=1)
        self.scores, self.moves = nn.Conv2d(channels, anchors, 1), nn.Conv2d(channels, 4 * anchors, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(images)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        features = self._pyramid(maps[1:]) if len(self.across) else maps[-1:]
        losses = []
        for one in features:
            hidden = F.relu(self.shared(one))
            losses += [self.scores(hidden).flatten(1), self.moves(hidden).flatten(1)]
        sampled = torch.arange(256).to(images.device)
        scores, moves = torch.cat(losses[::2], dim=1), torch.cat(losses[1::2], dim=1)
        return scores[:, sampled].sigmoid().sum() + moves[:, sampled].abs().sum()

    def _pyramid(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        above: torch.Tensor | None = None
        for number in reversed(range(len(maps))):
            inner = self.across[number](maps[number])
            above = inner if above is None else inner + F.interpolate(above, scale_factor=2.0, mode="nearest")
            made.append(self.smooth[number](above))
        return [*reversed(made), F.max_pool2d(made[0], 1, 2)]


def _proposals(batch_size: str, kind: str) -> tuple[nn.Module, list[int]]:
    """Images of COCO as large as they get: 800 x 1333 pixels, to a multiple of 32."""
    return _Proposals(pyramid=kind == "fpn"), [int(batch_size), 3, 800, math.ceil(1333 / 32) * 32]


_PROGRAMS: dict[str, Callable[..., tuple[nn.Module, list[int]]]] = {
    "video": _video, "fcn": _segmentation, "proposals": _proposals,
}  # fmt: skip


def train(program: str, *arguments: str) -> None:
    """Make steps on one of several GPUs."""
    torch.distributed.init_process_group("nccl")
    device = torch.device("cuda", 0)
    network, shape = _PROGRAMS[program](*arguments)
    model = nn.parallel.DistributedDataParallel(network.to(device).train(), [0], broadcast_buffers=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(_STEPS):
        loss = model(torch.zeros(shape).to(device))
        optimizer.zero_grad()
        loss.backward()
        if program == "video":
            nn.utils.clip_grad_norm_(trained, 40.0)
        optimizer.step()


if __name__ == "__main__":
    train(*sys.argv[1:])
