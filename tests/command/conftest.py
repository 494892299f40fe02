"""A folder of a user's own, for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command.running import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """An empty folder in which scripts can be run."""
    return Project(tmp_path)
