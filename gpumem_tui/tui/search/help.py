"""The Search screen's help: keys, columns, marks, buckets."""

from __future__ import annotations

from gpumem_tui.memory import Bucket
from gpumem_tui.tui.kit.dialogs import help_entry, help_heading
from gpumem_tui.tui.kit.figures import MUTED, Row
from gpumem_tui.tui.kit.glyphs import BAR_ORDER, BUCKET_LOOKS, FIT_MARK, OUTCOME_SYMBOLS

_KEYS = (
    ("s", "start a search, or start over after its end"),
    ("p", "hold the search after the step that runs; p again goes on"),
    ("c", "cancel: the running trial is killed, what was found stays"),
    ("e", "edit the workload, the GPU and the strategy"),
    ("v", "plot or table, where there is room for one"),
    ("↑ ↓", "look at another trial of the log"),
    ("1 2 3", "Monitor, Search, Plan"),
    ("ctrl+p", "all commands by name"),
    ("q", "leave; a running search is cancelled"),
)
_OUTPUT_KEYS = (
    ("o", "what the command prints, or the log of trials"),
    ("z", "the output as large as the screen; z again, or esc, leads back"),
    ("y", "copy the command with the largest batch size found"),
    ("", "on a simulated GPU what the command computes, such as its loss, reads 0"),
)
_BEFORE_OUTPUT = 5
"""Where they stand among the others."""


def search_help(tried_title: str, *, is_command: bool = False) -> list[Row]:
    """The lines of the help.

    Args:
        tried_title: what the third column is called here.
        is_command: a command is searched: its output has keys, and there is no closed form of it.
    """
    keys = [*_KEYS[:_BEFORE_OUTPUT], *_OUTPUT_KEYS, *_KEYS[_BEFORE_OUTPUT:]] if is_command else _KEYS
    simulated = tried_title == "Simulated"
    formula = "the textbook's closed form; knows no cache and no context" if not is_command else "none for a command"
    step = "the command's step" if is_command else "a real step"
    ran = "the traced step run once more" if simulated else "the step on this GPU"
    compared = "formula" if simulated and not is_command else "traced"
    columns = (
        ("Formula", formula),
        ("Traced", f"{step} recorded without a GPU, replayed at any size"),
        (tried_title, f"{ran}, in a process of its own"),
        ("error", f"{compared} − {tried_title.lower()}, in bytes and of the trial's figure"),
    )
    marks = (
        (FIT_MARK, "a trial that fits, at the memory the device then held"),
        (OUTCOME_SYMBOLS["oom"], "out of memory, at what it would have needed by trace"),
        (OUTCOME_SYMBOLS["error"], "a trial that failed for another reason"),
    )
    return [
        help_heading("Keys"), *(help_entry(key, what) for key, what in keys), [],
        help_heading("Columns"), *(help_entry(name, what) for name, what in columns),
        help_entry("", "figures without a unit are GiB; – is unknown, never 0"), [],
        help_heading("Chart"), *(help_entry(mark, what) for mark, what in marks), [],
        help_heading("Buckets"), *(_bucket(bucket) for bucket in BAR_ORDER),
    ]  # fmt: skip


def _bucket(bucket: Bucket) -> Row:
    pattern, colour = BUCKET_LOOKS[bucket]
    return [(pattern * 2, colour), (f" {bucket.title:<17}", ""), (bucket.meaning, MUTED)]
