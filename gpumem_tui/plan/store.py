"""Saved plans: one JSON file each in the user's data folder, whole or not there at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
from platformdirs import user_data_path

from gpumem_tui.catalog.config_file import ModelFile
from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.recipe import Extra, Recipe
from gpumem_tui.plan.control import PlanError
from gpumem_tui.plan.controls import plan_of
from gpumem_tui.plan.goals import NO_GOALS, Goals
from gpumem_tui.plan.plan import Plan, draft_of
from gpumem_tui.system import replacing

SCHEMA = 1
_SUFFIX = ".json"
_LONGEST = 60
_NAME = re.compile(r"\w[\w .+-]*")


class StoreError(Exception):
    """A plan that cannot be saved or read: one line that says which, why, and how to fix it."""


@dataclass(frozen=True)
class SavedPlan:
    """A plan and what the user calls it."""

    name: str
    plan: Plan


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a saved plan: shape and GPU in full, so that a later catalog does not change it."""

    schema: int
    shape: ModelShape
    recipe: Recipe
    gpu: Gpu
    batch_size: int
    headroom: float
    target_batch: int | None
    extras: tuple[Extra, ...]
    goals: Goals = NO_GOALS
    model_file: ModelFile | None = None


class PlanStore:
    """The plans in one folder.

    Args:
        folder: where they lie; None for this program's data folder. Made when the first plan is saved.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else user_data_path("gpumem-tui") / "plans"

    def save(self, name: str, plan: Plan) -> Path:
        """Write a plan under a name, in place of the one that had it; a crash leaves the old one or the new one.

        Raises:
            StoreError: a name that is no file name, or a folder that cannot be written.
        """
        path = self._path(name)
        content = _File(SCHEMA, **{**plan.values, "extras": tuple(sorted(plan.extras))})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        except OSError as error:
            raise StoreError(f"cannot save {path}: {error.strerror}") from error
        return path

    def has(self, name: str) -> bool:
        """Return whether a plan of that name has been saved."""
        return bool(_NAME.fullmatch(name)) and (self.folder / f"{name}{_SUFFIX}").exists()

    def delete(self, name: str) -> None:
        """Remove the plan of that name.

        Raises:
            StoreError: there is none, or it cannot be removed.
        """
        path = self._path(name)
        try:
            path.unlink()
        except OSError as error:
            raise StoreError(f"cannot delete {path}: {error.strerror}") from error

    def load(self, name: str) -> Plan:
        """Read the plan of that name.

        Raises:
            StoreError: there is none, or its file does not hold a plan.
        """
        path = self._path(name)
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_File)
            if content.schema != SCHEMA:
                raise StoreError(f"{path} has schema {content.schema}; this version reads {SCHEMA}")
            values = {name: getattr(content, name) for name in content.__struct_fields__ if name != "schema"}
            return plan_of(draft_of(Plan(**{**values, "extras": frozenset(content.extras)})))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        except PlanError as error:
            raise StoreError(f"{path} is no plan: {error.control.replace('_', ' ')} {error}; delete it") from error
        except ValueError as error:  # what JSON and the types raise
            raise StoreError(f"{path} is no plan: {error}; delete it") from error

    def saved(self) -> tuple[tuple[SavedPlan, ...], tuple[str, ...]]:
        """Return every saved plan by name, and a line for each file that holds none."""
        plans, complaints = [], []
        for path in sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.name.lower()):
            try:
                plans.append(SavedPlan(path.stem, self.load(path.stem)))
            except StoreError as error:
                complaints.append(str(error))
        return tuple(plans), tuple(complaints)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            raise StoreError(
                f"{name!r} cannot name a plan: use up to {_LONGEST} letters, digits, spaces and . + - _, a letter or "
                "digit first"
            )
        return self.folder / f"{name}{_SUFFIX}"
