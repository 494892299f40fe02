"""A trial whose process cannot be started is one line, and leaves nothing open behind."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.run import interpreters
from gpumem_tui.run.children import CannotStart, Child
from gpumem_tui.run.control import Control, Terms, Unusable, converse
from gpumem_tui.run.events import TrialDone, TrialRequest
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.line import line_of
from gpumem_tui.workload.spec import WorkloadSpec
from tests.search.trials import workload


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def request(spec: WorkloadSpec) -> TrialRequest:
    return TrialRequest(spec, find_gpu("a100-80gb"), simulated=True, batch_size=1, steps=1)


def starter(folder: Path, kind: str) -> Callable[[], Child]:
    """Starts a trial's process: forked by an interpreter that is kept, or a fresh one."""
    spec = workload(folder)
    if kind == "fresh":
        spec = WorkloadSpec(Recipe(), command=Command((sys.executable, "-c", "pass"), str(folder)))
    line = line_of(spec, sys.executable)
    return lambda: Child(request(spec), line.filled(1), line.cwd, ())


@contextmanager
def at_most_open(files: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", ["forked", "fresh"])
def test_too_many_open_files(tmp_path: Path, kind: str) -> None:
    """However far it got: one more file may be opened each time, until the process starts."""
    start = starter(tmp_path, kind)
    start().end()  # what the first start keeps open is open
    interpreters.close_idle()  # those of earlier tests end by themselves after a while
    before = open_files()
    failures: list[str] = []
    lowest = os.dup(0)
    os.close(lowest)
    for more in range(60):
        started = None
        with at_most_open(lowest + more):
            try:
                started = start()
            except CannotStart as error:
                failures.append(str(error))
        if started is not None:
            started.end()
            break
        interpreters.close_idle()
        assert open_files() == before
    assert len(failures) > 2
    interpreters.close_idle()
    assert {failure.partition(" (")[0] for failure in failures} == {"no process can be started: Too many open files"}
    assert open_files() == before


@pytest.mark.parametrize("kind", ["forked", "fresh"])
def test_no_place_for_temporary_files(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = starter(tmp_path, kind), open_files()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(CannotStart, match=f"no process can be started: .*{tmp_path}/missing"):
        start()
    assert open_files() == before


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, folder = workload(tmp_path), tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(Unusable, match=r"^no process can be started here: No such file or directory$"):
        list(converse(request(spec), Terms(sys.executable, (), 60.0), Control()))


def test_an_interpreter_with_a_pythonpath_of_its_own(tmp_path: Path) -> None:
    """As of a script that sets up an environment and starts the Python in it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    told = list(converse(request(workload(tmp_path)), Terms(str(python), (), 60.0), Control()))
    assert isinstance(told[-1], TrialDone)
