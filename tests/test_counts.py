"""The output of `.ci/counts` on a change, and which subjects `.ci/subjects` refuses, tried with a real repository."""

from __future__ import annotations

import subprocess

import pytest

from tests.test_changelog import CHECK, Repository, repository

__all__ = ["repository"]

BEFORE = """
import dataclasses
from typing import NamedTuple

import click


@dataclasses.dataclass(frozen=True)
class A:
    a: int


class B(NamedTuple):
    b: int


@click.command()
@click.option("--a")
def main(a: str) -> None: ...
"""
AFTER = (
    BEFORE
    + """

class C(msgspec.Struct, frozen=True):
    c: int


class D(Generic[T]):
    option = click.Option(["--b"])
    other = sectioned("--c", section="CI")
"""
)
SCREEN = 'KEYS = [Binding("a", "b"), binding.Binding("c", "d")]\n'


def said(repository: Repository, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts there, from a folder within."""
    folder = repository.folder / "gpumem_tui"
    return subprocess.run([CHECK.with_name(name), *arguments], cwd=folder, capture_output=True, text=True)


def test_what_a_change_adds_is_counted(repository: Repository) -> None:
    options = "gpumem_tui/options/options.toml"
    repository.commit("tests: begin", {"gpumem_tui/a.py": BEFORE, options: "[model]\n", "gpumem_tui/tui/b.py": ""})
    before = repository.git("rev-parse", "HEAD").strip()
    added = {"gpumem_tui/a.py": AFTER, options: "[model]\n[gpu]\n", "gpumem_tui/tui/b.py": SCREEN}
    repository.commit("tests: add", {**added, "tests/c.py": AFTER, "gpumem_tui/c.py": SCREEN})
    told = """
          options       2 →       5  +3
          records       2 →       3  +1
             keys       0 →       2  +2
    """
    lines = [" ".join(line.split()) for line in told.strip().splitlines()]
    for arguments in ((), (before,)):
        done = said(repository, "counts", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert shown[0].startswith("since ")
        assert shown[1] == f"product lines {BEFORE.count(chr(10))} → {AFTER.count(chr(10)) + 2} +11"
        assert shown[2:] == lines


def test_a_branch_is_compared_with_where_it_left_the_main_one(repository: Repository) -> None:
    repository.git("update-ref", "refs/remotes/origin/main", repository.base)
    for number in (2, 3):
        repository.commit("tests: add", {"gpumem_tui/a.py": "a = 1\n" * number})
    (repository.folder / "gpumem_tui/b.py").write_text("b = 1\n")  # what is not committed counts too
    assert "product lines       1 →       4  +3" in said(repository, "counts").stdout


def test_the_first_commit_has_nothing_to_be_compared_with(repository: Repository) -> None:
    done = said(repository, "counts")
    assert (done.returncode, done.stderr) == (1, "counts: there is no commit to compare with\n")


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("simulator: count softmax's grad*output product", ""),
        ("README: say when the table was run", ""),
        ("monitor, tui: bring the clock into one place", ""),
        ("monitor: " + "é" * 63, ""),
        ("monitor: " + "é" * 64, "73 characters, of 72"),
        ("Count softmax's product", "no area before a colon"),
        ("simulator: counts softmax's product", "'counts' is no imperative"),
        ("simulator: counted softmax's product", "'counted' is no imperative"),
        ("simulator: a product is counted", "'a' is no imperative"),
    ],
)
def test_a_subject_says_in_72_characters_what_is_done(repository: Repository, subject: str, fault: str) -> None:
    repository.commit(subject, {"gpumem_tui/a.py": "a = 2\n"})
    done = said(repository, "subjects", repository.base)
    assert done.returncode == bool(fault)
    assert done.stderr.partition("\n")[0].endswith(f"{subject}: {fault}" if fault else "")
