"""What the program's three main screens have in common."""

from __future__ import annotations

from textual.geometry import Size
from textual.widgets import Footer, Static

from gpumem_tui.tui.kit.textual_internals import SizedScreen


class MainScreen(SizedScreen):
    """Monitor, Search or Plan: a screen on keys 1, 2, 3, made when first shown and kept until the end.

    Attributes:
        ending: the program is being left: nothing is begun any more.
    """

    ending = False

    def interrupt(self) -> bool:
        """Ctrl-C was pressed. Whether the screen has seen to it; else the program ends."""
        return False

    def cancel(self) -> None:
        """End whatever runs behind the screen; safe to call from any thread, returns at once."""

    async def end(self) -> int:
        """End whatever runs behind the screen, wait until it is gone, and return the exit code for leaving now."""
        self.ending = True
        self.cancel()
        return 0

    def fit_width(self, size: Size, smallest: tuple[int, int], roomy_footer: int) -> bool:
        """Make the footer compact where it has no room, and say what size is needed; True where there is less."""
        footer = self.query_one(Footer)
        footer.compact = size.width < roomy_footer
        footer.show_command_palette = size.width >= roomy_footer
        needed, given = "×".join(map(str, smallest)), f"{size.width}×{size.height}"
        self.query_one("#too-small", Static).update(f"needs {needed}, this is {given}")
        return size.width < smallest[0] or size.height < smallest[1]

    def on_unmount(self) -> None:
        """However the screen ends, what runs behind it does too."""
        self.cancel()
