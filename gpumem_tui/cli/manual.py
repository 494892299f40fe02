"""`manual`: how everything works, a topic at a time."""

from __future__ import annotations

import click

from gpumem_tui.manual import ABOUT, TOPICS, index, text
from gpumem_tui.report.output import is_terminal


@click.command
@click.argument("topic", type=click.Choice((*TOPICS, *ABOUT)), required=False, metavar="[TOPIC]")
def manual(topic: str | None) -> int:
    """How everything works, a topic at a time: on the screen, or as text when piped.

    Without TOPIC the topics are listed. TOPIC may also be a command, such as predict.
    """
    topic = ABOUT.get(topic or "", topic)
    if is_terminal():
        from gpumem_tui.tui.kit.manual import ManualApp

        ManualApp(topic or "").run()
    else:
        click.echo(text(topic) if topic else index(), nl=False)
    return 0
