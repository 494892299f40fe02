"""A folder of a user's own, for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command.running import Project, Python
from tests.command.warm import warm_python


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python that starts with torch imported."""
    with warm_python(tmp_path_factory.mktemp("warm")) as python:
        Python.path = python
        yield python
        Python.path = sys.executable


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, warm: str) -> Project:
    """An empty folder in which scripts can be run."""
    return Project(tmp_path, sys.executable if getattr(request.module, "IS_COLD", False) else warm)
