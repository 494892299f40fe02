"""Makes the pictures of this folder from the real screens and real searches: `python screenshots/make.py`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpumem_tui.options import WorkloadOptions, simulated_device
from gpumem_tui.search.runner import SearchConfig
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.screens.search import SearchScreen
from gpumem_tui.tui.search_state import SearchState, Stage

FOLDER = Path(__file__).parent
SIZE = (120, 40)
CLOCK = datetime(2026, 1, 1, 12, 0)


def _ended(state: SearchState) -> bool:
    return state.verdict is not None


def _well_under_way(state: SearchState) -> bool:
    """Some trials are done and one is in the middle of a step."""
    running = state.running
    return (
        state.stage is Stage.RUNNING and len(state.trials) >= 6 and running is not None and running.sample is not None
    )


async def _picture(
    name: str, options: WorkloadOptions, config: SearchConfig, when: Callable[[SearchState], bool]
) -> None:
    screen = SearchScreen(config, options, autostart=True, clock=lambda: CLOCK)
    app = GpuMemApp({"search": lambda: screen}, "search")
    async with app.run_test(size=SIZE) as pilot:
        while not when(screen.state):
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        svg = app.export_screenshot(title="gpumem-tui")
        await screen.end()
    # Rich names the classes of every picture at random; fixed names keep a remade picture equal to the last one.
    (FOLDER / f"{name}.svg").write_text(re.sub(r"terminal-\d+", f"terminal-{name}", svg))


async def _all() -> None:
    a100, rtx4090 = simulated_device("a100-80gb"), simulated_device("rtx-4090-24gb")
    gpt2 = WorkloadOptions()
    mixed = WorkloadOptions(precision="amp-bf16")
    llama = WorkloadOptions(model="llama-3-8b")
    await _picture("search-finished", gpt2, SearchConfig(gpt2.spec(), a100), _ended)
    await _picture("search-running", mixed, SearchConfig(mixed.spec(), a100, strategy="ramp"), _well_under_way)
    await _picture("search-nothing-fits", llama, SearchConfig(llama.spec(), rtx4090), _ended)


if __name__ == "__main__":
    asyncio.run(_all())
