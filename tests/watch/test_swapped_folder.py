"""Whoever owns a publishing folder swaps it for a link while we work in it: nothing outside is touched.

The swapper is a process that exchanges the two names as fast as the kernel can (renameat2, RENAME_EXCHANGE).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.attach import bootstrap
from gpumem_tui.probe.files import Folder, WireError
from gpumem_tui.watch.folders import KEEP_S, clean
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess
from gpumem_tui.watch.requests import NoAnswer, request_look
from tests.attach.loops import NOBODY
from tests.waiting import DEADLINE_S
from tests.watch.rings import RECORD, RingFile, gone, out_of_memory, this_process

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into the folders of others")
TRIES = 400
SWAP = """
import ctypes, os, sys
one, other = map(os.fsencode, sys.argv[1:])
libc = ctypes.CDLL(None)
assert libc.renameat2(-100, one, -100, other, 2) == 0
print('swapping', flush=True)
while os.getppid() != 1:
    libc.renameat2(-100, one, -100, other, 2)
"""


@contextmanager
def swapped(one: Path, other: Path, user: int | None = None) -> Iterator[None]:
    """Two names are exchanged again and again until the block ends."""
    python = sys.executable if user is None else "/usr/bin/python3"  # ours may be where others may not look
    command = [python, "-c", SWAP, str(one), str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, user=user) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == "swapping\n"
            yield
        finally:
            swapper.kill()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its owner and content."""
    return {path.name: (path.stat().st_uid, path.read_bytes()) for path in folder.iterdir()}


def look_again_and_again(process: ProbedProcess) -> tuple[int, int]:
    """How often a look could be asked for, and how often that was refused; until both have come about."""
    asked = refused = 0
    deadline = time.monotonic() + DEADLINE_S
    while (asked + refused < TRIES or not (asked and refused)) and time.monotonic() < deadline:
        try:
            request_look(process)
            asked += 1
        except NoAnswer:
            refused += 1
    return asked, refused


def publish(folder: Path) -> tuple[RingFile, ProbedProcess]:
    ring = RingFile(folder, this_process())
    ring.sample(RECORD)
    [process] = Watcher([folder]).processes()
    return ring, process


def test_a_look_does_not_follow_the_link(tmp_path: Path) -> None:
    """Here both folders are ours and private, so that nothing but the link tells them apart."""
    _, process = publish(tmp_path / "probes")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(elsewhere)
    with swapped(tmp_path / "probes", tmp_path / "link"):
        asked, refused = look_again_and_again(process)
    assert contents(elsewhere) == {}
    assert asked
    assert refused


def test_cleaning_does_not_follow_the_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "probes", elsewhere):
        for ticks in range(30):
            ring = RingFile(folder, gone(start_ticks=ticks, started_ns=0))
            ring.sample(replace(RECORD, wall_ns=int((time.time() - KEEP_S - 60) * 1e9)))
            ring.document(ring.files.oom, out_of_memory())
    before = contents(elsewhere)
    old = Watcher([tmp_path / "probes"]).processes()
    assert len(old) == 30
    (tmp_path / "link").symlink_to(elsewhere)
    with swapped(tmp_path / "probes", tmp_path / "link"):
        while any((tmp_path / name).is_dir() and not (tmp_path / name).is_symlink() and any((tmp_path / name).iterdir())
                  for name in ("probes", "link")):  # fmt: skip
            clean(old)
    assert contents(elsewhere) == before


def test_an_attach_does_not_follow_the_link(tmp_path: Path) -> None:
    """Neither what runs inside of the process, which answers, nor we, who take the answer away."""
    _, process = publish(tmp_path / "probes")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "answer").write_text("of somebody else")
    (tmp_path / "link").symlink_to(elsewhere)
    before = contents(elsewhere)
    written = refused = 0
    deadline = time.monotonic() + DEADLINE_S
    with swapped(tmp_path / "probes", tmp_path / "link"):
        while (written + refused < TRIES or not (written and refused)) and time.monotonic() < deadline:
            try:
                bootstrap._write(str(tmp_path / "probes"), "answer", b"ours")
                written += 1
            except OSError:
                refused += 1
            with suppress(OSError, WireError), Folder(process.files.directory, (process.uid,)) as folder:
                folder.remove("answer")
    assert contents(elsewhere) == before
    assert written
    assert refused


@as_root
@pytest.mark.parametrize("level", ["the folder", "its parent"])
def test_root_writes_nothing_into_another_folder(level: str) -> None:
    """The folder of another user, exchanged for a link into one that only root may enter; or the one above it is.

    Where the parent is exchanged, what is found in the end is no link, but a private folder of root's.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folders are closed to others
        home = Path(name)
        secret = home / "secret"
        (secret / "probes").mkdir(parents=True, mode=0o700)
        secret.chmod(0o700)
        theirs = home / "theirs"
        for made in (theirs, theirs / "above"):
            made.mkdir(mode=0o755)
        _, process = publish(theirs / "above" / "probes")
        for path in (theirs, *theirs.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        home.chmod(0o755)
        process = replace(process, uid=NOBODY)
        swaps = theirs / "above" / "probes" if level == "the folder" else theirs / "above"
        (theirs / "link").symlink_to(secret / "probes" if level == "the folder" else secret)
        with swapped(swaps, theirs / "link", user=NOBODY):
            asked, refused = look_again_and_again(process)
        assert contents(secret / "probes") == {}
        assert [path.name for path in secret.iterdir()] == ["probes"]
        assert asked
        assert refused
        written = list(theirs.rglob("*.control"))
        assert [path.stat().st_uid for path in written] == [NOBODY]


@as_root
def test_root_reads_no_other_folder() -> None:
    """Files in a private folder of root's are not shown as another user's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        home = Path(name)
        home.chmod(0o755)
        ours = RingFile(home / "ours", this_process(command=("python", "secret.py")))
        ours.sample(RECORD)
        theirs = home / "theirs"
        theirs.mkdir()
        RingFile(theirs / "probes", this_process()).sample(RECORD)
        for path in (theirs, *theirs.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        (theirs / "link").symlink_to(home / "ours")
        shown: set[tuple[str, ...]] = set()
        with swapped(theirs / "probes", theirs / "link", user=NOBODY):
            tries, until = 0, time.monotonic() + 60
            while tries < TRIES or (not shown and time.monotonic() < until):  # theirs is there half of the time
                shown |= {process.process.command for process in Watcher([theirs / "probes"]).processes()}
                tries += 1
        assert shown == {("python", "train.py")}


def test_links_of_a_container_do_not_lead_out_of_it(tmp_path: Path) -> None:
    """The kernel follows an absolute link below /proc/PID/root from our own root directory; that is not done."""
    root = tmp_path / "proc" / "77" / "root"
    outside = tmp_path / "outside"
    (outside / "probes").mkdir(parents=True, mode=0o700)
    root.mkdir(parents=True)
    (root / "var").symlink_to(outside)
    with pytest.raises(FileNotFoundError):
        Folder(root / "var" / "probes", None)
    (root / "up").symlink_to("../../../outside")
    with pytest.raises(FileNotFoundError):
        Folder(root / "up" / "probes", None)
    within = root / str(outside).lstrip("/") / "probes"
    within.mkdir(parents=True, mode=0o700)
    with Folder(root / "var" / "probes", None) as folder:
        assert folder.identity == (within.stat().st_dev, within.stat().st_ino)
    (root / "probes").symlink_to(within)
    with pytest.raises(WireError, match="is not a directory"):
        Folder(root / "probes", None)


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    root = tmp_path / "proc" / "77" / "root"
    root.mkdir(parents=True)
    (root / "one").symlink_to("/other")
    (root / "other").symlink_to("/one")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Folder(root / "one" / "probes", None)
