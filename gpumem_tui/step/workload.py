"""The interface of a workload: three functions that build a model, make a batch and run one training step."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class WorkloadError(Exception):
    """A workload that cannot be run as asked; the message is one line naming the option or file to change."""

    says_where = True


class Workload(Protocol):
    """Something to train. The functions of a workload file have the same names and parameters."""

    @property
    def name(self) -> str:
        """The name on screens and in messages."""
        ...

    def build(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """Make the model and its optimizer, on the device."""
        ...

    def make_batch(self, batch_size: int, device: torch.device) -> object:
        """Make one batch of `batch_size` samples on the device, in the form that `train_step` takes."""
        ...

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: object) -> None:
        """Do one full step: forward, backward, optimizer step, gradients dropped."""
        ...
