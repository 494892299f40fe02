"""A catalog model trained the way open-source training loops train it, on random data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.records import PRECISION_RECORDS, SHARDING_RECORDS, has_own_precision
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.distributed import build_sharded, cut_model
from gpumem_tui.workload.models import build_model
from gpumem_tui.workload.models.layers import check_recompute
from gpumem_tui.workload.optimizers import optimizer_factory, optimizer_of
from gpumem_tui.workload.quantized import materialize
from gpumem_tui.workload.trained import adapt_blocks, freeze_layers

_INITIAL_LOSS_SCALE = 2.0**10
"""Below GradScaler's own 2**16: a first step whose gradients overflow is skipped, and the optimizer would
have no state yet when memory is measured."""


class CatalogWorkload:
    """The Workload of one shape and recipe.

    Raises:
        WorkloadError: a recipe that one GPU cannot run with PyTorch alone.
    """

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        check_recompute(shape, recipe)
        if reason := why_formula_only(shape, recipe):
            raise WorkloadError(reason)
        self.name = shape.name
        self.shape = shape
        self.recipe = recipe
        self._precision = PRECISION_RECORDS[recipe.precision]
        self._scaler: torch.amp.GradScaler | None = None

    def build(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer, made on the device: never in host memory.

        Raises:
            WorkloadError: sharding, where no process group of the recipe's size exists.
        """
        if self._precision.scales_loss:
            self._scaler = torch.amp.GradScaler(device.type, init_scale=_INITIAL_LOSS_SCALE)
        with _default_dtype(self._dtype):
            if self.recipe.tensor_parallel > 1:
                self._check_world(f"--tensor-parallel {self.recipe.tensor_parallel}", self.recipe.tensor_parallel)
                with torch.device("meta"):
                    model = self._model()
                cut_model(model, self.shape, self.recipe, device)
                model.to_empty(device=device)
                return model, optimizer_of(self.recipe.optimizer, model)
            if self.recipe.sharding != "none":
                self._check_world(f"--sharding {self.recipe.sharding}", self.recipe.gpus)
                return build_sharded(self._model, optimizer_factory(self.recipe.optimizer), self.recipe, device)
            if self.recipe.has_adapters:
                with torch.device("meta"):
                    model = self._model()
                materialize(model, device)  # so the whole base is never there unquantized
            else:
                with torch.device(device):
                    model = self._model()
        if self.recipe.channels_last:
            to: Any = model.to  # its annotations lack the one argument
            model = to(memory_format=torch.channels_last)
        return model, optimizer_of(self.recipe.optimizer, model)

    def _model(self) -> nn.Module:
        model = build_model(self.shape, self.recipe)
        if self.recipe.has_adapters:
            adapt_blocks(model, self.shape, self.recipe)
        freeze_layers(model, self.shape, self.recipe)
        if self.recipe.compile:
            compile_network(model, self.recipe)
        return model

    def _check_world(self, option: str, wanted: int) -> None:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if ranks != wanted:
            raise WorkloadError(
                f"{option}: this process is one of {ranks} ranks, not of {wanted}; a search with --gpu sim:NAME and "
                "`predict` trace it"
            )

    def make_batch(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for `train_step`.

        gpt2, llama: token ids [batch, tokens] twice; bert: token ids and labels [batch]; vit, resnet: images
        [batch, 3, pixels, pixels] and labels; mlp: features [batch, inputs] and labels. Ids, labels are int64.
        """
        shape = self.shape
        if shape.record.inputs == "tokens":
            inputs = torch.randint(shape.vocab, (batch_size, shape.seq_len), device=device)
        elif shape.record.inputs == "features":
            inputs = torch.randn(batch_size, shape.inputs, device=device, dtype=self._dtype)
        else:
            pixels = shape.image_size
            inputs = torch.randn(batch_size, 3, pixels, pixels, device=device, dtype=self._dtype)
            if self.recipe.channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
        if shape.record.predicts_tokens:
            return inputs, torch.randint(shape.vocab, (batch_size, shape.seq_len), device=device)
        return inputs, torch.randint(shape.classes, (batch_size,), device=device)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: object) -> None:
        """Run forward, backward and the optimizer's step, and drop the gradients.

        Written as a usual loop is, down to which local names outlive the forward pass: they hold memory.
        """
        assert optimizer is not None, "build() made one"
        inputs, targets = cast("tuple[Tensor, Tensor]", batch)
        name = "" if has_own_precision(self.recipe) else self._precision.autocast
        autocast: torch.dtype | None = getattr(torch, name) if name else None
        with self._loss_on_parts():
            self._step(model, optimizer, inputs, targets, autocast)

    def _loss_on_parts(self) -> AbstractContextManager[None]:
        """Return what has the loss run on the parts of a vocabulary that is cut, forward and backward."""
        if self.recipe.tensor_parallel == 1:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return cast("AbstractContextManager[None]", loss_parallel())

    def _step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: Tensor,
        targets: Tensor,
        autocast: torch.dtype | None,
    ) -> None:
        with torch.autocast(inputs.device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(inputs)
            # In fp32 at every precision: autocast does it unasked, loops for 16-bit weights write it out.
            loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))
        if self._scaler is None:
            loss.backward()
            optimizer.step()
        else:
            self._scaler.scale(loss).backward()
            self._scaler.step(optimizer)
            self._scaler.update()
        optimizer.zero_grad()

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of weights and of floating-point inputs."""
        found: torch.dtype = getattr(torch, self._precision.weights)
        return found


def compile_network(model: nn.Module, recipe: Recipe) -> None:
    """Have `torch.compile` compile a network once it is called.

    As a whole, or, where its blocks are sharded by FSDP or cut, each of them, as torchtitan does (`apply_compile` in
    torchtitan/models/llama3/infra/parallelize.py).
    """
    by_block = SHARDING_RECORDS[recipe.sharding].by_fsdp or recipe.tensor_parallel > 1
    for module in cast("nn.ModuleList", model.blocks) if by_block else (model,):
        module.compile()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
