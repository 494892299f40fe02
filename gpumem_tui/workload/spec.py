"""The training to run, in a form that crosses a process boundary. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpumem_tui.catalog.shapes import ModelFile, ModelShape, shape_from_wire
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.command import Command

Through = Literal["steps", "eval", "save", "all"]


def split_file(text: str) -> tuple[Path, str]:
    """Return the file and the name in ``FILE[:NAME]``; a colon may be part of a file's own name."""
    file, colon, name = text.rpartition(":")
    if colon and not Path(text).exists():
        return Path(file), name
    return Path(text), ""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model that transformers builds from its config.json.

    Attributes:
        name: what to call it.
        model_type, architecture: as the configuration has them; `architecture` is empty where it names no class.
        no_formula: why there is no closed form; empty where there is one.
        seq_len: tokens a sample; 0 for a model of images.
        is_text_alone: it takes images or sound as well, and is trained without.
    """

    name: str
    model_type: str
    architecture: str
    no_formula: str
    seq_len: int
    is_text_alone: bool = False

    @property
    def kind(self) -> str:
        """The class of the model, or its type where it names none."""
        alone = " (on text alone)" if self.is_text_alone else ""
        return (self.architecture or self.model_type) + alone


@dataclass(frozen=True)
class WorkloadSpec:
    """The workload to train: a model of the catalog by a recipe, a user's file (``FILE[:NAME]``), or a user's command.

    Exactly one of the three is given, or a shape with the command that trains it as transformers builds it.

    Attributes:
        hugging_face: next to a command that this program has written: what it trains, by the recipe.
        assumed_rows: what share is kept where shapes depend on computed values: see `AssumedRows`.
        longest: of a command's inputs, the length to train on from the second step on; None for the program's own.
        rank: of a command on a simulated GPU, the one that is followed; the others are never started.
        through: the parts of a command that its run continues through once its steps are made; ``steps`` for none.
        resume: whether a command is to begin from a checkpoint, as one of its own runs would have saved it.
        as_torch: the version of torch to trace as, such as ``2.0``; empty for the one that traces.
        model_file: what `shape` was read from, perhaps with changes since; None for a model of the catalog.
        why_plain: why a shape read from a file is trained as our plain network, not as transformers' class.
    """

    recipe: Recipe
    shape: ModelShape | None = None
    file: str | None = None
    command: Command | None = None
    hugging_face: HuggingFaceModel | None = None
    assumed_rows: tuple[tuple[str, float], ...] = ()
    model_file: ModelFile | None = None
    why_plain: str = ""
    longest: int | None = None
    rank: int = 0
    through: Through = "steps"
    resume: bool = False
    as_torch: str = ""

    def __post_init__(self) -> None:
        made_by_transformers = self.hugging_face is not None and self.shape is not None
        makings = (self.file, self.command, None if made_by_transformers else self.shape)
        if sum(making is not None for making in makings) != 1:
            raise ValueError("a workload is a shape, a file or a command")

    @property
    def name(self) -> str:
        """The name of the workload on the screen."""
        if self.hugging_face is not None:
            return self.hugging_face.name
        if self.command is not None:
            return self.command.text
        return self.shape.name if self.shape is not None else str(self.file)

    @property
    def takes_batch(self) -> bool:
        """Return whether it is run at any batch size; a command's line has to say where the size goes."""
        return self.command is None or self.command.takes_batch

    @property
    def is_users_command(self) -> bool:
        """Return whether the user wrote the command that is run, and not this program."""
        return self.command is not None and self.hugging_face is None

    @property
    def noun(self) -> str:
        """The word for it in a sentence where it is run: a user's command or file, or a model."""
        if self.file is not None:
            return "the workload file"
        return "the model" if self.hugging_face is not None or self.command is None else "the command"

    @property
    def network(self) -> str:
        """The network that a model read from a file is traced as; empty for what is no such model."""
        if self.model_file is None:
            return ""
        if self.hugging_face is not None:
            return f"traced as transformers' {self.hugging_face.kind}"
        return f"traced as our plain network of its shape, which may differ from transformers': {self.why_plain}"

    def batch_words(self, batch_size: int) -> str:
        """Return a batch size as a person reads it.

        For a command whose line does not state it: "its own".
        """
        if self.command is not None and not self.command.says_batch:
            return "its own batch"
        return f"batch {batch_size}"

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> WorkloadSpec:
        """Return the inverse of `dataclasses.asdict` after a trip through JSON."""
        shape, file = values["shape"], values["model_file"]
        return cls(
            recipe=Recipe(**values["recipe"]),
            shape=None if shape is None else shape_from_wire(shape),
            file=values["file"],
            command=None if values["command"] is None else Command.from_wire(values["command"]),
            hugging_face=None if values["hugging_face"] is None else HuggingFaceModel(**values["hugging_face"]),
            assumed_rows=tuple((place, share) for place, share in values["assumed_rows"]),
            model_file=None if file is None else ModelFile(**{**file, "shape": shape_from_wire(file["shape"])}),
            why_plain=values["why_plain"],
            longest=values["longest"],
            rank=values["rank"],
            through=values["through"],
            resume=values["resume"],
            as_torch=values["as_torch"],
        )
