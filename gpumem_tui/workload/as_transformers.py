"""Which models transformers builds from their config.json, and the command that trains one so.

A configuration names a class of transformers', and that class keeps what our plain network of the same shape does not:
GPT-2's ``gelu_new`` keeps every step of its formula, Llama's repeated key and value heads are copies.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

from gpumem_tui.catalog.config_file import ConfigFile
from gpumem_tui.catalog.shapes import ModelFile, ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload import line
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import HuggingFaceModel, WorkloadSpec

_ASKED_FOR_S = 20.0
"""So long for an interpreter to say whether it finds transformers."""


def of_config(shape: ModelShape, recipe: Recipe, file: ModelFile, python: str) -> WorkloadSpec:
    """Return what trains a model whose shape was read from a file.

    Its own class where the interpreter has transformers, and that class trains as the recipe states; else our plain
    network of the shape, with why.

    Args:
        shape: as in the file, perhaps with another length or image size; with other changes it is not the file's.
    """
    plain = WorkloadSpec(recipe, shape=shape, model_file=file)
    if why := _why_plain(shape, recipe, file, python):
        return replace(plain, why_plain=why)
    model = HuggingFaceModel(file.shape.name, file.model_type, file.architecture, "", shape.seq_len, file.is_text_alone)
    image_size = 0 if shape.image_size == file.shape.image_size else shape.image_size
    command = program(file.path, recipe, python, shape.seq_len, image_size)
    return replace(plain, command=command, hugging_face=model)


def _why_plain(shape: ModelShape, recipe: Recipe, file: ModelFile, python: str) -> str:
    if replace(shape, seq_len=file.shape.seq_len, image_size=file.shape.image_size) != file.shape:
        return "the shape is not the file's"
    if recipe.gpus > 1:
        return "transformers' class is traced on one GPU"
    if recipe.recompute == "selective":
        return "transformers has no selective recompute"
    return "" if has_transformers(python) else f"{python} has no transformers"


@lru_cache
def has_transformers(python: str) -> bool:
    """Return whether an interpreter finds transformers, without importing it."""
    if python == sys.executable:
        return find_spec("transformers") is not None
    asked = "import importlib.util, sys; sys.exit(importlib.util.find_spec('transformers') is None)"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, timeout=_ASKED_FOR_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def model_file(file: ConfigFile, shape: ModelShape, *, dequantize: bool) -> ModelFile:
    """Return what a shape was read from."""
    return ModelFile(
        file.path, shape, dequantize, file.model_type, file.architecture, file.takes_more_than_text
    )  # fmt: skip


def program(path: str, recipe: Recipe, python: str, seq_len: int, image_size: int) -> Command:
    """Return the command that trains what transformers builds from a config.json, by a recipe.

    Args:
        seq_len: tokens a sample. `image_size`: pixels a side. 0 for what the file states.
    """
    return line.program(python, {"config": path, "seq_len": seq_len, "image_size": image_size}, recipe)
