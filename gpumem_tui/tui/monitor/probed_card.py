"""On a machine without a GPU: the memory of one watched process, in the place of the GPUs."""

from __future__ import annotations

from gpumem_tui.tui.kit.figures import MUTED, Row, fit, ruled
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.kit.shares import Share, bar, legend
from gpumem_tui.tui.process.probed import age_text, seconds
from gpumem_tui.watch.published import WatchedProcess


def probed_card(watched: WatchedProcess, width: int, lines: int) -> list[Row]:
    """Facts, bar and legend in `lines` rows. Of a process on several devices it is the first."""
    title = watched.process.title
    if not watched.own:
        return [ruled([(title, "bold")], [], width), [("no step has finished yet", MUTED)]]
    sample = watched.own[0].sample
    facts: Row = [
        ("step ", MUTED), (f"{sample.record.step:,}", "bold"), (f"  {seconds(sample.step_s)}", ""),
        (f"  {age_text(watched.process.age_s)}", MUTED),
    ]  # fmt: skip
    where = "host memory" if sample.device == "cpu" else sample.device
    room = width - sum(len(text) for text, _ in facts) - len(where) - 6
    left: Row = [(f"{where} ", "bold"), (fit(title, min(len(title), room)), "bold")]
    stretches = [
        Share(bucket.title, bucket.title, size_bytes, BUCKET_LOOKS[bucket])
        for bucket, size_bytes in sample.buckets.items()
        if isinstance(size_bytes, int)
    ]
    return [ruled(left, facts, width), bar(stretches, width), *legend(stretches, width, lines - 2)]
