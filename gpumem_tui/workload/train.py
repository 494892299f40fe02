"""Trains a model of the catalog, of a config.json, or a user's three functions, as open-source training loops do.

``python -m gpumem_tui.workload.train --model gpt2 --precision bf16 --batch-size 4`` trains on the GPU on random data,
until it has made its steps or whoever follows has seen enough. It may be run by path in any Python that has torch, as
``--python`` has it: it uses the standard library and torch only, but for ``--config``, which takes that Python's
transformers, and for ``--model`` without ``--shape``, which asks the catalog.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:  # run by path: what is next to it is not to be found by name
    sys.path[0] = os.getcwd()
    if "gpumem_tui" not in sys.modules:  # nobody follows, who would have imported it
        site = str(Path(__file__).resolve().parents[1] / "run" / "site")
        others = os.environ.get("PYTHONPATH", "")
        if "GPUMEM_TUI_TRIAL" in os.environ and site not in others.split(os.pathsep):  # a wrapper has replaced it
            os.environ["PYTHONPATH"] = f"{site}{os.pathsep}{others}" if others else site
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very program
        sys.path.append(str(Path(__file__).resolve().parents[2]))

from gpumem_tui.catalog.shapes import ModelShape, shape_from_wire
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.spec import split_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from gpumem_tui.step.workload import Workload

_CHANGES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "image_size")
"""Fields of a shape that options change."""

_MOST_STEPS = 10_000
"""Whoever follows the program ends it long before."""


class NoTorchError(ImportError):
    """The interpreter has no torch; the message is one line with the remedy."""

    says_where = True


def main(arguments: Sequence[str] | None = None) -> None:
    """Train until all steps are made.

    Raises:
        NoTorchError: there is no torch here.
        WorkloadError: it cannot be trained as asked; one line.
    """
    asked = _parsed(arguments)
    try:
        import torch
    except ImportError as error:
        remedy = "install torch there, or give --python the interpreter of the environment you train in"
        raise NoTorchError(f"{sys.executable} cannot import torch ({error}): {remedy}", name="torch") from error
    recipe = Recipe(**{field.name: getattr(asked, field.name) for field in fields(Recipe)})
    if hasattr(torch, "simgpu"):
        gc.disable()  # else cycles are freed at moments that differ from run to run
    if (recipe.ranks > 1 or recipe.sharding != "none") and "RANK" in os.environ:
        torch.distributed.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=recipe.ranks)
    hook = sys.excepthook
    try:
        train(_workload(asked, recipe), asked.batch_size, asked.steps)
    except BaseException:
        sys.excepthook = hook  # whoever follows hears of errors by it; a file's libraries set their own, as rich does
        raise


def train(workload: Workload, batch_size: int, steps: int) -> None:
    """Build, then make so many steps on the current CUDA device."""
    import torch

    from gpumem_tui.step.phases import begin_step
    from gpumem_tui.step.workload import WorkloadError

    device = torch.device("cuda")
    model, optimizer = workload.build(device)
    for _ in range(steps):
        begin_step()
        workload.train_step(model, optimizer, workload.make_batch(batch_size, device))
        torch.cuda.synchronize()
        if not torch.cuda.max_memory_allocated():
            raise WorkloadError(_empty(workload, model))
    begin_step()


def _empty(workload: Workload, model: nn.Module) -> str:
    """Say why a step has left the GPU empty."""
    places = sorted({parameter.device.type for parameter in model.parameters()})
    where = f"the model is on the {places[0].upper()}" if places else "the model has no parameters"
    return (
        f"a step of {workload.name} leaves the GPU empty ({where}): "
        "build and make_batch must put model and batch on the `device` they are given"
    )


def _workload(asked: argparse.Namespace, recipe: Recipe) -> Workload:
    if asked.workload:
        from gpumem_tui.workload.user_file import load_workload_file

        return load_workload_file(*split_file(asked.workload))
    changes = {name: getattr(asked, name) for name in _CHANGES}
    if asked.config:
        from gpumem_tui.workload.hugging_face import HuggingFaceWorkload

        return HuggingFaceWorkload(asked.config, recipe, asked.seq_len or 0, asked.image_size or 0)
    from gpumem_tui.workload.standard import CatalogWorkload

    return CatalogWorkload(_shape(asked).overridden(**changes), recipe)


def _shape(asked: argparse.Namespace) -> ModelShape:
    if asked.shape:
        return shape_from_wire({"name": asked.model, **json.loads(asked.shape)})
    from gpumem_tui.catalog.loader import find_model

    return find_model(asked.model)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpumem_tui.workload.train", description=__doc__)
    parser.add_argument("--model", help="a model of the catalog")
    parser.add_argument("--shape", help="its shape, as JSON, instead of the catalog's")
    parser.add_argument("--config", help="the config.json of a model that transformers builds")
    parser.add_argument("--workload", help="FILE.py[:NAME] with build, make_batch and train_step")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, default=_MOST_STEPS)
    for name in _CHANGES:
        parser.add_argument(_option(name), type=int)
    for field in fields(Recipe):
        if isinstance(field.default, bool):
            parser.add_argument(_option(field.name), action="store_true")
        else:
            parser.add_argument(_option(field.name), type=type(field.default), default=field.default)
    return parser.parse_args(arguments)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    words = sys.argv[1:]
    del sys.argv[1:]  # they are not a workload file's, which may look for its own
    main(words)
