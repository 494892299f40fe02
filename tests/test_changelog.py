"""The check that a change users can notice has a line in the change log, tried with a real repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).parent.parent / ".ci" / "changelog"
LOG = ".github/CHANGELOG.md"


class Repository:
    """A git repository with a package and a change log, at its first commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q")
        self.commit("first", {"gpumem_tui/a.py": "a = 1\n", LOG: "# Change log\n"})
        self.base = self.git("rev-parse", "HEAD").strip()

    def git(self, *arguments: str) -> str:
        """Run git as somebody, and return what it prints."""
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        return subprocess.run(
            ["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout

    def commit(self, message: str, files: dict[str, str]) -> None:
        """Write the files and commit them."""
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        self.git("add", ".")
        self.git("commit", "-q", "-m", message)

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run the check against the first commit."""
        return subprocess.run([str(CHECK), self.base], cwd=self.folder, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_change_of_the_package_alone_fails_and_names_the_file(repository: Repository) -> None:
    repository.commit("second", {"gpumem_tui/a.py": "a = 2\n"})
    done = repository.check()
    assert done.returncode == 1
    assert "gpumem_tui/a.py" in done.stderr
    assert "Behaviour: unchanged" in done.stderr


@pytest.mark.parametrize(
    ("message", "files"),
    [
        ("second", {"gpumem_tui/a.py": "a = 2\n", LOG: "# Change log\n\n- a is 2\n"}),
        ("second\n\nBehaviour: unchanged", {"gpumem_tui/a.py": "a = 1  # one\n"}),
        ("second", {"tests/test_a.py": "assert True\n"}),
        ("second", {"gpumem_tui/README.md": "the map\n"}),
    ],
    ids=["with a line", "said to be unchanged", "only tests", "only prose"],
)
def test_other_changes_pass(repository: Repository, message: str, files: dict[str, str]) -> None:
    repository.commit(message, files)
    assert repository.check().returncode == 0
