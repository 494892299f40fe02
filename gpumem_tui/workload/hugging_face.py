"""A Hugging Face model built from its config.json, trained on random data.

It is the class that the configuration names, of the transformers of the interpreter that runs it, without weights from
anywhere, and it is trained as transformers' Trainer does: its own loss, of whose outputs only the loss outlives the
forward pass; no padding and no attention mask.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from gpumem_tui.errors import in_one_line
from gpumem_tui.formula.recipe import ALL_LINEAR, Recipe
from gpumem_tui.formula.records import PRECISION_RECORDS, PrecisionRecord
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.models.layers import KERNELS
from gpumem_tui.workload.optimizers import optimizer_of
from gpumem_tui.workload.quantized import four_bit_settings, materialize, pack_base
from gpumem_tui.workload.trained import adapt, freeze_transformers, trained

_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
)
"""Where transformers lists, by configuration, the classes that have a loss, in the order in which they are tried for a
configuration that names none."""

_OTHERWISE = "give your step with --workload, or your command after --"
_USUAL_SIDE, _COLOURS = 224, 3
"""Side and channels of images, where the configuration does not set them."""

_MEL_FRAMES_A_POSITION = 2
"""Whisper's encoder halves the frames (WhisperEncoder: the second convolution has stride 2)."""


class HuggingFaceWorkload:
    """The Workload of a configuration, by a recipe.

    Args:
        path: of the config.json.
        seq_len: tokens a sample. `image_size`: pixels a side, 0 for what the file states.
    """

    def __init__(self, path: str, recipe: Recipe, seq_len: int, image_size: int = 0) -> None:
        self.name = path
        self.recipe = recipe
        self._seq_len, self._image_size = seq_len, image_size
        self._precision = PRECISION_RECORDS[recipe.precision]
        self._scaler: torch.amp.GradScaler | None = None
        self._make_batch: Callable[[int, torch.device], dict[str, Tensor]] = lambda *_: {}
        self._batch: dict[str, Tensor] = {}
        self._loss: Tensor | None = None
        self._what = ""

    def build(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer.

        Raises:
            WorkloadError: there is no transformers here, or it cannot build or train this model so; one line.
        """
        recipe, record = self.recipe, self._precision
        transformers = _transformers()
        with _or_one_line(f"transformers {transformers.__version__} cannot read {self.name}"):
            config, packed_as = _config(transformers, self.name, self._image_size)
        kind = _class(transformers, config)
        with _or_one_line(f"{kind.__name__} cannot be built"):
            model: Any = _build(kind, config, record, torch.device("meta") if recipe.has_adapters else device)
        if recipe.has_adapters:
            settings = four_bit_settings(transformers, recipe.base_quantization, record, packed_as)
            model = _adapted(model, recipe, device, settings)
        if recipe.recompute == "full":
            if not getattr(model, "supports_gradient_checkpointing", False):
                raise WorkloadError(f"--recompute full: {kind.__name__} has no gradient checkpointing; use none")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if recipe.has_frozen_layers:
            freeze_transformers(model, recipe.freeze)
        if recipe.compile:
            model.compile()
        optimizer = optimizer_of(recipe.optimizer, model)
        self._scaler = torch.amp.GradScaler(device.type) if record.scales_loss else None
        self._what = f"{kind.__name__} cannot be trained on a batch as it is made here"
        with _or_one_line(self._what):
            self._make_batch = batches(model, self._seq_len)
        return model, optimizer

    def make_batch(self, batch_size: int, device: torch.device) -> dict[str, Tensor]:
        """Return random inputs and labels. The batch of the step before lives until then, as in a loop."""
        with _or_one_line(self._what):
            self._batch = self._make_batch(batch_size, device)
        return self._batch

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: object) -> None:
        """Run forward, backward and the optimizer's step, and drop the gradients."""
        assert optimizer is not None, "build() made one"
        attention = self.recipe.attention
        chosen_kernel = nullcontext() if attention == "auto" else sdpa_kernel(KERNELS[attention])
        with _or_one_line(self._what), chosen_kernel:
            loss = self._loss = self._loss_of(
                model, cast("dict[str, Tensor]", batch)
            )  # which stays until the next one, as in a loop
            if self._scaler is None:
                loss.backward()
                optimizer.step()
            else:
                self._scaler.scale(loss).backward()
                self._scaler.step(optimizer)
                self._scaler.update()
            optimizer.zero_grad()

    def _loss_of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        name = self._precision.autocast
        dtype: torch.dtype | None = getattr(torch, name) if name else None
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss: Tensor = model(**batch).loss
        return loss


@contextmanager
def _or_one_line(what: str) -> Iterator[None]:
    """Raise what goes wrong within as one line with the remedy; running out of memory is no mistake."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if getattr(error, "says_where", False):
            raise
        first = in_one_line(error).partition(". ")[0]  # transformers explains itself over many
        raise WorkloadError(f"--config: {what} ({type(error).__name__}: {first}): {_OTHERWISE}") from error


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything there is to know is in the file
    try:
        return import_module("transformers")
    except ImportError as error:
        raise WorkloadError(
            f"--config: {sys.executable} cannot import transformers ({in_one_line(error)}), which builds this model: "
            f"install it there, give --python the interpreter you train in, or {_OTHERWISE}"
        ) from error


def _config(transformers: Any, path: str, image_size: int) -> tuple[Any, object]:
    """Return the configuration, as the transformers here reads it, and what it states of how its weights are quantized.

    `options` asks whether they are to be trained unquantized.
    """
    config = transformers.AutoConfig.from_pretrained(path)
    quantization = getattr(config, "quantization_config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.use_cache = False
    if image_size:
        config.image_size = image_size
    return config, quantization


def _class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names if it has a loss, else the first that transformers has for it."""
    automatic = import_module("transformers.models.auto.modeling_auto")
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None and ("For" in name or name.endswith("LMHeadModel")):
            return named
    for table in _HEADS:
        found = getattr(automatic, table, {}).get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise WorkloadError(
        f"--config: transformers {transformers.__version__} has no class with a loss for model_type "
        f"{config.model_type!r}: {_OTHERWISE}"
    )


def _build(kind: Any, config: Any, record: PrecisionRecord, device: torch.device) -> nn.Module:
    """Return the model on the device, in the precision's dtype; its weights are not initialized."""
    dtype = getattr(torch, record.weights)

    def built(attention: str) -> nn.Module:
        with _uninitialized(), torch.device(device):
            model = kind._from_config(config, attn_implementation=attention, dtype=dtype)
            model.tie_weights()  # a part of what is left out
        found: nn.Module = model.to(device).train()
        return found

    try:
        return built("sdpa")
    except (ValueError, ImportError):  # how transformers states that a class has no such implementation
        return built("eager")


def _uninitialized() -> AbstractContextManager[object]:
    """Return transformers' own way not to fill weights that are overwritten anyway; it moved in version 5."""
    for place in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            return cast("AbstractContextManager[object]", import_module(place).no_init_weights())
        except (ImportError, AttributeError):
            continue
    return nullcontext()


def _adapted(model: Any, recipe: Recipe, device: torch.device, settings: Any | None) -> Any:
    """Put adapters in a model made on ``meta``, and it on the device: all of it frozen and, if asked, quantized.

    By PEFT where it is there and the base is not quantized, or by bitsandbytes. Else by our own.

    Args:
        settings: of bitsandbytes; None where the base is not quantized by it.
    """
    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    adapted = chosen(linear, recipe.lora_targets)
    if (recipe.base_quantization == "none" or settings is not None) and (peft := _peft()) is not None:
        dtype = model.dtype
        if settings is not None:
            pack_base(model, settings, device)
        materialize(model, device)
        wanted = peft.LoraConfig(r=recipe.lora_rank, target_modules=adapted, use_dora=recipe.adapter == "dora")
        wide = recipe.adapter_dtype == "fp32"
        made = peft.get_peft_model(model, wanted, autocast_adapter_dtype=wide)
        if not wide:  # next to packed weights PEFT makes them in fp32 anyway
            for adapter in trained(made):
                adapter.data = adapter.data.to(dtype)
        return made.base_model.model.train()
    with torch.device("meta"):
        adapt(model, linear, adapted, recipe)
    materialize(model, device)
    return model


def _peft() -> Any | None:
    try:
        return import_module("peft")
    except ImportError:
        return None


def chosen(linear: Sequence[str], targets: str) -> list[str]:
    """Return the names of layers that have adapters: all, or those whose name ends so, as PEFT's `target_modules` does.

    Raises:
        WorkloadError: no layer has one of the names.
    """
    if targets == ALL_LINEAR:
        return list(linear)
    found = []
    for target in targets.split(","):
        ending = [name for name in linear if f".{name}".endswith(f".{target.strip()}")]
        if not ending:
            last = sorted({name.rpartition(".")[2] for name in linear})
            raise WorkloadError(
                f"--lora-targets: no linear layer is called {target.strip()}; choose among {', '.join(last)}"
            )
        found += ending
    return found


def batches(model: Any, seq_len: int) -> Callable[[int, torch.device], dict[str, Tensor]]:
    """Return what makes a batch of so many samples: random inputs and labels of the shapes that the model takes.

    Args:
        seq_len: tokens a sample; of an encoder–decoder in the encoder and in the decoder.

    Raises:
        WorkloadError: a model that takes neither tokens nor images nor sound's spectra.
    """
    config, name = model.config, type(model).__name__
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    side = getattr(config, "image_size", _USUAL_SIDE)
    image = tuple(side) if isinstance(side, (list, tuple)) else (side, side)

    def labels(samples: int) -> Tensor:
        if "SemanticSegmentation" in name:
            return torch.randint(config.num_labels, (samples, *image))
        if "Classification" in name and "Token" not in name:
            return torch.randint(config.num_labels, (samples,))
        if "TokenClassification" in name:
            return torch.randint(config.num_labels, (samples, seq_len))
        return torch.randint(text.vocab_size, (samples, seq_len))

    def inputs(samples: int) -> dict[str, Tensor]:
        main_input = model.main_input_name
        if main_input == "input_ids" or (main_input == "pixel_values" and _takes_text(config)):
            tokens: dict[str, Tensor] = {"input_ids": torch.randint(text.vocab_size, (samples, seq_len))}
            if _takes_text(config):  # which of them stand for parts of an image: none
                tokens["token_type_ids"] = torch.zeros(samples, seq_len, dtype=torch.int64)
            return tokens
        if main_input == "pixel_values":
            return {"pixel_values": torch.randn(samples, getattr(config, "num_channels", _COLOURS), *image)}
        if main_input == "input_features" and hasattr(config, "max_source_positions"):
            frames = _MEL_FRAMES_A_POSITION * config.max_source_positions
            return {"input_features": torch.randn(samples, config.num_mel_bins, frames)}
        raise WorkloadError(f"--config: {name} takes {main_input}, for which no batch is made here: {_OTHERWISE}")

    def make(samples: int, device: torch.device) -> dict[str, Tensor]:
        if name.endswith("ForQuestionAnswering"):
            ends = {key: torch.randint(seq_len, (samples,)) for key in ("start_positions", "end_positions")}
            batch = {**inputs(samples), **ends}
        else:
            batch = {**inputs(samples), "labels": labels(samples)}
        taken = model.forward.__code__.co_varnames
        dtype = model.dtype
        return {
            key: value.to(device, dtype if value.is_floating_point() else None)
            for key, value in batch.items()
            if key != "token_type_ids" or key in taken
        }

    return make


def _takes_text(config: Any) -> bool:
    """Return whether a model of images and text is trained, here on text alone."""
    return hasattr(config, "vision_config") and hasattr(config, "text_config")
