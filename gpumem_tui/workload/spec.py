"""What to train, in a form that crosses a process boundary. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe

if TYPE_CHECKING:
    from gpumem_tui.workload.base import Workload


def split_file(text: str) -> tuple[Path, str]:
    """The file and the name in ``FILE[:NAME]``; a colon may be part of a file's own name."""
    file, colon, name = text.rpartition(":")
    if colon and not Path(text).exists():
        return Path(file), name
    return Path(text), ""


@dataclass(frozen=True)
class WorkloadSpec:
    """A model of the catalog trained by a recipe, or a user's own file (``FILE[:NAME]``); exactly one is given."""

    recipe: Recipe
    shape: ModelShape | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.file is None):
            raise ValueError("a workload is either a shape or a file")

    @property
    def name(self) -> str:
        """What to call it on the screen."""
        return self.shape.name if self.shape is not None else str(self.file)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> WorkloadSpec:
        """The inverse of `dataclasses.asdict` after a trip through JSON."""
        shape = values["shape"]
        return cls(
            recipe=Recipe(**values["recipe"]),
            shape=None if shape is None else ModelShape(**{**shape, "stages": tuple(shape["stages"])}),
            file=values["file"],
        )

    def load(self) -> Workload:
        """The runnable workload. Imports torch.

        Raises:
            WorkloadError: the file or the combination of options cannot be trained; one clear line.
        """
        from gpumem_tui.workload.standard import CatalogWorkload
        from gpumem_tui.workload.user_file import load_workload_file

        if self.shape is not None:
            return CatalogWorkload(self.shape, self.recipe)
        assert self.file is not None
        return load_workload_file(self.file)
