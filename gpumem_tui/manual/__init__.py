"""The manual: one Markdown file a topic, read where the work is: `gpumem-tui manual TOPIC`, and `?` on each screen."""

from __future__ import annotations

from pathlib import Path

TOPICS = (
    "commands",
    "search",
    "fit",
    "serving",
    "plan",
    "monitor",
    "recordings",
    "hosts",
    "browser",
    "watch",
    "trackers",
    "snapshots",
    "python",
    "notebooks",
    "agents",
    "ledger",
    "accuracy",
)
"""Every topic, in the order in which the index lists them."""

ABOUT = {
    "predict": "commands", "free": "monitor", "serve": "browser", "models": "search", "gpus": "search",
    "doctor": "accuracy", "schema": "plan", "settings": "monitor", "grafana": "monitor", "alerts": "monitor",
    "run": "watch", "attach": "watch", "look": "watch",
}  # fmt: skip
"""By command whose name is no topic, the topic that explains it."""


def text(topic: str) -> str:
    """Return the Markdown of a topic, one of `TOPICS`."""
    return Path(__file__).with_name(f"{topic}.md").read_text(encoding="utf-8")


def titles() -> dict[str, str]:
    """Return each topic's title, from the first line of its file."""
    return {topic: text(topic).partition("\n")[0].removeprefix("# ") for topic in TOPICS}


def index() -> str:
    """Return the list of topics as Markdown: each topic's name, and its title from the first line of its file."""
    lines = [f"- **{topic}**: {title}" for topic, title in titles().items()]
    return "\n".join(["# The manual", "", "`gpumem-tui manual TOPIC` opens one of these:", "", *lines, ""])
