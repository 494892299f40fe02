"""The program in a real headless Chromium."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.serve.browser import browsing, find_chromium
from tests.serve.serving import serving

WIDTH, HEIGHT = 1100, 740
UNACCOUNTED = (213, 94, 0)
"""A colour that only the ledger has (`gpumem_tui/tui/kit/theme.py`): the page's own are greys and a blue."""


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed here (Debian: apt install chromium)")
async def test_a_browser_shows_the_monitor_and_asks_no_other_server(
    environment: dict[str, str], tmp_path: Path
) -> None:
    chromium = find_chromium()
    assert chromium is not None
    with serving(environment) as served:
        async with browsing(chromium, tmp_path / "browser") as page:
            await page.open(served.url, WIDTH, HEIGHT)
            await page.wait_until(lambda: "A100" in page.screen.text and "unaccounted" in page.screen.text, "Monitor")
            await page.wait_until_true("document.body.classList.contains('-first-byte')")
            picture, colours = await page.picture_with(UNACCOUNTED)
            assert struct.unpack(">II", picture[16:24]) == (WIDTH, HEIGHT)
            assert colours[UNACCOUNTED] > 500, "its share of the bar"
            await page.press("?")  # no click is needed before
            await page.wait_until(lambda: "esc closes" in page.screen.text, "the help")
            asked = [url for url in page.asked if not url.startswith("data:")]
            assert {url.partition("://")[2].partition("/")[0] for url in asked} == {served.base.partition("://")[2]}
            assert any(url.endswith(".ttf") for url in page.asked), "the server's own font"


_READ = "navigator.clipboard.readText()"


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed here (Debian: apt install chromium)")
async def test_ctrl_c_copies_what_is_selected_and_without_a_selection_the_screen(
    environment: dict[str, str], tmp_path: Path
) -> None:
    chromium = find_chromium()
    assert chromium is not None
    with serving(environment) as served:
        async with browsing(chromium, tmp_path / "browser") as page:
            permitted = ["clipboardReadWrite", "clipboardSanitizedWrite"]
            await page.call("Browser.grantPermissions", permissions=permitted, origin=served.base)
            await page.open(served.url, WIDTH, HEIGHT)
            await page.wait_until(lambda: "A100" in page.screen.text, "Monitor")
            await page.wait_until_true("document.body.classList.contains('-first-byte')")
            await page.picture_with(UNACCOUNTED)
            await page.drag_with_shift((10, 8), (120, 8))
            await page.press_ctrl_c()
            await page.wait_until_true(f"{_READ}.then(text => text.includes('gpumem') && !text.includes('A100'))")
            assert "is copied, as text" not in page.screen.text, "the program was not told"
            await page.click((400, 600))
            await page.press_ctrl_c()
            await page.wait_until(lambda: "the screen is copied, as text" in page.screen.text, "the notice")
            await page.wait_until_true(f"{_READ}.then(text => text.includes('A100'))")
