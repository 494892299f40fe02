"""What is used of textual-serve's insides is there."""

from __future__ import annotations

from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from gpumem_tui.serve.visit import USED


async def test_textual_serve_has_what_is_used_of_its_insides() -> None:
    async def nothing(*_: object) -> None:
        """Not called."""

    service = AppService("", write_bytes=nothing, write_str=nothing, close=nothing, download_manager=DownloadManager())
    assert [name for name in USED if not hasattr(service, name)] == []
    assert service._build_environment(100, 30)["COLUMNS"] == "100"
