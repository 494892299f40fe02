"""Device totals of whole programs on one DGX A100 40 GB, by nvidia-smi once a second, and the predicted range.

Source: itu-rad/GPUMemNet at f01eb05. `timm`: timm's train.py in cuDNN's benchmark mode, of 5,085 networks and batch
sizes in Related_works/FakeTensor/fake_tensor.xlsx those with a network that is here. `own`: the authors' own scripts,
without that mode (Test_Pipeline/cnn_models, figures in GPUMemNet_CNN.xlsx), and transformers' BertForMaskedLM of 512
words (Results_plotter_for_paper/data.csv), whose peak is the same under Adam and under plain SGD. Images are 224 x 224,
all is fp32.

Most of what a small batch takes there is the context: kernels are loaded at once. A network of 43 parameters held 1,451
MiB on that machine (Datasets/MLP/mlp_data_step2.csv), the least of the 5,085 runs 1,731 MiB, which has cuDNN's kernels
too; each less the allocator's 22 MiB: a small segment, and one with the cuBLAS workspaces. Not among the rows: runs at
the end of the device (ViT-L with 128 images), the scripts of networks by other names, and the other language models of
data.csv, whose optimizer and lengths are not stated: no optimizer explains them at 512 words.

`python -m tests.published totals` prints them.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Range
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import UNLIMITED_BYTES, AffineTrace
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.device.streams import SimulatedStream
from gpumem_tui.workload.models import build_model
from tests.published.accuracy import cudnn_benchmark

_TABLE = Path(__file__).with_name("totals.csv")
_CONTEXT = Range(1429 * MIB, 1709 * MIB)
_STEPS = 3
_TORCH = "2.5"
"""Not stated; transformers had the `BertSdpaSelfAttention` that the authors print from May 2024 to January 2025."""
_PIXELS, _CLASSES, _WORDS = 224, 1000, 512
TRANSFORMERS = ("bert-base",)
"""Networks that are its."""


@dataclass(frozen=True)
class Total:
    """One run; `why` is the cause where it is outside of the range, and how far at most (`outside_percent`)."""

    id: str
    program: str
    network: str
    batch_size: int
    measured_bytes: int
    outside_percent: float
    why: str

    def predicted(self) -> Range:
        """Trace its steps, and return between what totals of the device they lie."""
        gpu = find_gpu("a100-40gb")
        simulated = SimulatedGpu(gpu, profile_for(_TORCH, gpu), unlimited=True)
        gc.collect()
        with cudnn_benchmark(self.program == "timm"):
            with simulate(simulated) as device, torch.device(device):
                _PROGRAMS[self.program](self.network, self.batch_size, device)
            finder = BatchFinder(AffineTrace.constant(simulated.finish()))
        capacity = gpu.cuda_total_range - _CONTEXT
        fits = finder.fits(self.batch_size, capacity.low_bytes)
        room = capacity if fits else Range(UNLIMITED_BYTES, UNLIMITED_BYTES)
        return finder.reserved_range(self.batch_size, room.high_bytes, room) + _CONTEXT


def load() -> list[Total]:
    """All rows of the table."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        return [
            Total(
                f"gmn-{row['program']}-{row['network']}-{row['batch_size']}", row["program"], row["network"],
                int(row["batch_size"]), int(row["measured_mib"]) * MIB, float(row["outside_percent"] or 0), row["why"],
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


# Programs


def _timm(network: str, batch_size: int, _device: torch.device) -> None:
    """SGD with Nesterov's momentum and weight decay, and a loader that makes the next batch on a stream of its own."""
    model = _network(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=2e-5)
    for images, labels in _prefetched(batch_size):
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()


def _prefetched(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    stream, used_by_model = SimulatedStream(), SimulatedStream(stream_id=0)
    mean, deviation = torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    images = labels = torch.zeros(0)
    for number in range(_STEPS + 1):
        with stream:
            next_images = torch.zeros(batch_size, 3, _PIXELS, _PIXELS, dtype=torch.uint8)
            next_labels = torch.zeros(batch_size, dtype=torch.long)
            next_images = next_images.to(torch.float32).sub_(mean).div_(deviation)
        if number:
            yield images, labels
        used_by_model.wait_stream(stream)
        images, labels = next_images, next_labels


def _own(network: str, batch_size: int, device: torch.device) -> None:
    """Adam; the last batch, its outputs and its loss live until the next ones are there."""
    model = _masked_words() if network in TRANSFORMERS else _network(network)
    optimizer = torch.optim.Adam(model.parameters())
    shape = (batch_size, _WORDS) if network in TRANSFORMERS else (batch_size, 3, _PIXELS, _PIXELS)
    for _ in range(_STEPS):
        inputs = torch.zeros(shape, device="cpu")
        if network in TRANSFORMERS:
            words = inputs.long().to(device)
            outputs = model(input_ids=words, labels=words.clone())  # kept, its logits too
            loss = outputs.loss
        else:
            inputs, labels = inputs.to(device), torch.zeros(batch_size, dtype=torch.long)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


_PROGRAMS: dict[str, Callable[[str, int, torch.device], None]] = {"timm": _timm, "own": _own}


# Networks that the catalog lacks


def _network(name: str) -> nn.Module:
    if name == "vgg16":
        return _vgg16()
    if name == "convnext-base":
        return _convnext_base()
    return build_model(find_model(name), Recipe("fp32"))


def _masked_words() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=28996)).train()  # type: ignore[no-any-return]


def _vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    hidden = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    hidden += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, _CLASSES)]
    return nn.Sequential(*layers, nn.Flatten(), *hidden)


class _ChannelNorm(nn.LayerNorm):
    """Over the channels of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        mixed = self.down(F.gelu(self.up(mixed))).permute(0, 3, 1, 2)
        return mixed.mul(self.scale.reshape(1, -1, 1, 1)) + x  # type: ignore[no-any-return]


def _convnext_base() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((128, 3), (256, 3), (512, 27), (1024, 3)):
        if channels == 3:
            layers += [nn.Conv2d(channels, width, 4, stride=4), _ChannelNorm(width)]
        else:
            layers += [_ChannelNorm(channels), nn.Conv2d(channels, width, 2, stride=2)]
        layers += [_ConvNextBlock(width) for _ in range(depth)]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), _ChannelNorm(channels), nn.Flatten(), nn.Linear(1024, _CLASSES)
    )
