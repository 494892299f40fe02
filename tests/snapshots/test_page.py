"""The HTML of a snapshot: it holds the figures, refers to nothing, and no text of a file becomes markup."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import KIB, MIB
from gpumem_tui.snapshots.analysis import analyse
from gpumem_tui.snapshots.comparison import compare
from gpumem_tui.snapshots.page import comparison_page, snapshot_page
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.recording import record, snapshot
from tests.scenes.snapshot import out_of_memory, training
from tests.snapshots import files
from tests.snapshots.files import BASE, block, segment, written

_HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\" style=\"x"


class _Read(HTMLParser):
    """The tags of a page, their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


_TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "b", "i", "span", "div", "table", "tr",
    "th", "td", "svg", "path", "line", "details", "summary", "pre",
}  # fmt: skip
_ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "style", "viewbox", "preserveaspectratio", "d", "x1",
    "x2", "y1", "y2",
}  # fmt: skip


def _pages(folder: Path, *bodies: dict[str, Any], name: str = "snapshot") -> Iterator[str]:
    """The page of each snapshot, and of the first compared with the last."""
    taken = []
    for number, body in enumerate(bodies):
        found = read_snapshot(written(folder, body, f"{name}{number}.pickle"))
        taken.append((found, [analyse(found, device) for device in found.devices]))
    yield from (snapshot_page(*one) for one in taken)
    yield comparison_page(taken[0][0], taken[-1][0], compare(taken[0], taken[-1]))


def test_the_figures_of_a_file_and_of_two(tmp_path: Path) -> None:
    one, failed, both = _pages(tmp_path, snapshot(record(training())), out_of_memory())
    text = _Read(one).text
    for said in ("Peak 1.61 GiB allocated", "optimizer state", "model.py:20 forward", "38 segments", "386 events"):
        assert said in text
    assert one.count("<path class=") == 6  # five categories and what is reserved
    assert "Out of memory at event" in _Read(failed).text
    assert "Before: memory over 386 events" in _Read(both).text
    assert re.search(r"\+0\.\d\d GiB \(1\.61 GiB → 1\.\d\d GiB allocated at the peak\)", _Read(both).text)


def test_nothing_of_a_file_becomes_markup_and_nothing_is_fetched(tmp_path: Path) -> None:
    body = files.fragmented()
    for frames in [body["device_traces"][0][0]["frames"], *(one["blocks"][1]["frames"] for one in body["segments"])]:
        frames[:] = [{"filename": f"/{_HOSTILE}.py", "line": 1, "name": _HOSTILE}]
    body["segments"][0]["blocks"][1]["category"] = _HOSTILE
    body["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = _HOSTILE
    name = _HOSTILE.replace("/", "")
    for page in _pages(tmp_path, body, files.training(), name=name):
        read = _Read(page)
        assert read.tags <= _TAGS
        assert read.attributes <= _ATTRIBUTES
        assert "script" not in {*read.tags}
        assert not re.search(r"https?:|url\(|@import|\bsrc\s*=\s*[^x]", page)
        assert "default-src 'none'" in page
    assert "alert(1)" in read.text


@pytest.mark.parametrize("devices", [1, 8])
def test_a_page_of_many_segments_and_lines_stays_small(tmp_path: Path, devices: int) -> None:
    segments = []
    for number in range(160):
        start = BASE + number * 64 * MIB
        frames = [{"filename": f"/home/ada/{'x' * 200}{number}.py", "line": number, "name": "f" * 100}] * 60
        blocks = [
            block(
                start + at * 64 * KIB, 64 * KIB, "inactive" if at % 2 else "active_allocated", [] if at % 2 else frames
            )
            for at in range(500)
        ]
        segments.append(segment(start, blocks, device=number % devices))
    body = files.body([], segments)
    for page in _pages(tmp_path, body, copy.deepcopy(body)):
        assert len(page.encode()) < 2 * MIB
