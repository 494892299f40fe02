"""What is trained, where and how: the left panel's lines, their short form, and the header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown, format_bytes, format_count
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.ranges import largest_words
from gpumem_tui.tui.search.state import SearchState
from gpumem_tui.workload.spec import HuggingFaceModel

_PANEL_CHARACTERS = 160
_LINE_CHARACTERS = 60
"""How much of a command is shown: in the panel, which has several lines for it, and within a line."""


def workload_lines(config: SearchConfig) -> Iterator[tuple[str, str]]:
    """Name and value, a line each; without a name, a sentence across the panel."""
    shape, recipe, command = config.workload.shape, config.workload.recipe, config.workload.command
    if config.workload.hugging_face is not None:
        yield from _hugging_face_lines(config.workload.hugging_face)
        yield from _recipe_lines(recipe)
        return
    if shape is None:
        yield ("file", short_name(config)) if command is None else ("command", "")
        if command is not None:
            yield "", _shortened(command.text, _PANEL_CHARACTERS)
            if config.device.host:
                yield "in", _shortened(command.cwd, _PANEL_CHARACTERS)
        if recipe.gpus > 1:
            yield "ranks", f"{recipe.gpus:,}"
        yield "", "It decides model, precision and optimizer itself."
        return
    yield "model", shape.name
    yield "params", f"{count_parameters(shape):,}"
    if shape.stages:
        yield "blocks", "-".join(map(str, shape.stages))
    for name in ("layers", "hidden", "heads", "vocab"):
        if value := getattr(shape, name):
            yield name, f"{value:,}"
    if shape.seq_len:
        yield "seq len", f"{shape.seq_len:,}"
    if shape.image_size:
        yield "image", f"{shape.image_size} px"
    yield from _recipe_lines(recipe)


def _recipe_lines(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.has_adapters:
        yield "adapter", recipe.adapter_words
    if recipe.has_frozen_layers:
        yield "frozen", recipe.freeze_words
    yield "precision", recipe.precision
    yield "optimizer", recipe.optimizer
    yield "recompute", recipe.recompute
    yield "attention", recipe.attention


def _hugging_face_lines(model: HuggingFaceModel) -> Iterator[tuple[str, str]]:
    yield "model", model.name
    yield "type", model.model_type
    yield "class", model.kind
    if model.seq_len:
        yield "seq len", f"{model.seq_len:,}"


def strategy_lines(state: SearchState) -> Iterator[tuple[str, str]]:
    """How it is searched, and the largest batch by each prediction: with the headroom by both, and without by trace."""
    config = state.config
    yield "strategy", config.strategy
    yield "steps", f"{config.steps} a trial"
    yield "headroom", f"{config.headroom:.0%}"
    if config.limit_bytes is not None:
        yield "cap", format_bytes(config.limit_bytes)
    if config.target_batch is not None:
        yield "target", f"{config.target_batch:,} a step"
    if config.workload.shape is not None:
        yield "formula", _largest(state.formula.max_batch_size)
    traced, name = state.traced, "traced"
    if config.headroom and config.workload.shape is not None:
        yield name, _largest(state.with_headroom)
        name = "up to OOM"
    if isinstance(traced, Traced) and (words := largest_words(traced.max_batch_size, traced.may_fit_batch_size)):
        yield name, f"batch {words}"
    elif name == "traced":
        yield name, "–"


def workload_summary(config: SearchConfig) -> str:
    """The workload and the strategy in one line."""
    shape, recipe, model = config.workload.shape, config.workload.recipe, config.workload.hugging_face
    target = "" if config.target_batch is None else f"target {config.target_batch:,}"
    if model is not None:
        size = f"seq {model.seq_len:,}" if model.seq_len else ""
        return " · ".join(
            filter(None, (model.name, model.model_type, size, *_recipe_words(recipe), config.strategy, target))
        )
    if shape is None:
        ranks = f"{recipe.gpus:,} ranks" if recipe.gpus > 1 else ""
        return " · ".join(filter(None, (short_name(config), ranks, config.strategy, target)))
    size = f"seq {shape.seq_len:,}" if shape.seq_len else f"{shape.image_size} px" if shape.image_size else ""
    parts = [
        shape.name, f"{format_count(count_parameters(shape))} params", size, *_recipe_words(recipe), config.strategy,
        target,
    ]  # fmt: skip
    return " · ".join(part for part in parts if part)


def _recipe_words(recipe: Recipe) -> Iterator[str]:
    yield recipe.adapter_words
    yield recipe.freeze_words
    yield recipe.precision
    yield recipe.optimizer
    yield "" if recipe.recompute == "none" else f"recompute {recipe.recompute}"
    yield "" if recipe.attention == "auto" else f"attention {recipe.attention}"


def device_words(config: SearchConfig) -> tuple[str, str]:
    """The device's host and name, in capitals that it is simulated if it is, with a cap on it; and why it was taken."""
    device = config.device
    cap = f" · cap {format_bytes(config.limit_bytes)}" if config.limit_bytes is not None else ""
    host = f"{device.host}: " if device.host else ""
    return f"{host}{'SIMULATED ' if device.simulated else ''}{device.gpu.title}{cap}", device.reason


def short_name(config: SearchConfig) -> str:
    """The workload's name within a line: a file's without its folder, and no more than the beginning of a command."""
    workload = config.workload
    if workload.command is not None:
        return _shortened(workload.name, _LINE_CHARACTERS)
    return workload.name if workload.shape is not None else Path(workload.name).name


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _largest(value: int | Unknown) -> str:
    return "–" if isinstance(value, Unknown) else f"batch {value:,}"
