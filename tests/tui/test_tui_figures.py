"""Widths that the panels rely on, and the ASCII translation."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpumem_tui.ascii import to_ascii, wants_ascii
from gpumem_tui.memory import GIB, KIB, MIB, Unknown
from gpumem_tui.tui.kit.figures import compact_bytes, is_narrow, percent, signed, span_width, wrapped
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS, OUTCOME_SYMBOLS

LARGEST_DEVICE = 1 << 75
"""The need of a formula when a user asks for a batch of a billion."""


@given(st.integers(-LARGEST_DEVICE, LARGEST_DEVICE))
def test_figures_fit_their_columns(size_bytes: int) -> None:
    assert len(compact_bytes(abs(size_bytes))) <= 7
    assert len(signed(size_bytes)) <= 8


@given(st.floats(-1e9, 1e9))
def test_percentages_fit_their_column(share: float) -> None:
    assert len(percent(share)) <= 6


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0"),
        (512, "512 B"),
        (816 * KIB, "816 KiB"),
        (3 * MIB, "3.0 MiB"),
        (80 * GIB, "80.00"),
        (-GIB, "−1.00"),
        (9999 * GIB, "9999.00"),
        (10000 * GIB, "10 TiB"),
        (1 << 52, "4 PiB"),
    ],
)
def test_small_figures_name_their_unit_and_gib_does_not(size_bytes: int, text: str) -> None:
    assert compact_bytes(size_bytes) == text


def test_unknown_is_a_dash_and_never_zero() -> None:
    assert compact_bytes(Unknown("not supported")) == "–"
    assert percent(None) == "–"
    assert percent(1e-9) != percent(0.0)


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=20), st.integers(10, 80))
def test_wrapped_items_stay_whole_and_within_the_width(words: list[str], width: int) -> None:
    rows = wrapped([[(word, "")] for word in words], width, gap=2)
    assert [text.strip() for row in rows for text, _ in row if text.strip()] == words
    assert all(span_width(row) <= width for row in rows)


@given(st.text(max_size=40))
def test_ascii_is_ascii(text: str) -> None:
    assert to_ascii(text).isascii()


@pytest.mark.parametrize("text", ["e\u0301te\u0301", "训练 train", "ก็", "a\u200bb", "é", "ｗｉｄｅ", "🙂", "▸ ░ … −"])
def test_ascii_is_as_wide_as_what_it_replaces(text: str) -> None:
    assert len(to_ascii(text)) == cell_len(text)


def test_patterns_and_symbols_differ_without_colour_in_both_alphabets() -> None:
    patterns = [pattern for pattern, _ in BUCKET_LOOKS.values()]
    symbols = list(OUTCOME_SYMBOLS.values())
    for glyphs in (patterns, symbols):
        assert len(set(glyphs)) == len(glyphs)
        assert len({to_ascii(glyph) for glyph in glyphs}) == len(glyphs)


def test_ascii_can_be_asked_for_and_refused() -> None:
    assert wants_ascii({"GPUMEM_TUI_ASCII": "1"})
    assert not wants_ascii({"GPUMEM_TUI_ASCII": "0"})


@pytest.mark.parametrize(("encoding", "wanted"), [("UTF-8", False), ("ANSI_X3.4-1968", True), ("ISO-8859-1", True)])
def test_a_locale_without_utf8_gets_ascii(encoding: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: encoding)
    assert wants_ascii({}) is wanted


def test_each_narrow_character_takes_one_cell() -> None:
    narrow = [character for character in map(chr, range(sys.maxunicode)) if is_narrow(character)]
    assert len(narrow) > 1000
    assert {cell_len(character) for character in narrow} == {1}
