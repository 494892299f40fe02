"""The ranks of a job in a table: bytes per bucket, how far they differ, and the one that is nearest to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_tui.memory import Bucket, Unknown, Value
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, Row, compact_bytes, fit
from gpumem_tui.tui.process.probed import seconds
from gpumem_tui.watch.jobs import Job, Rank, total_bytes
from gpumem_tui.watch.published import Placed

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample

_WORST = "▲"


@dataclass(frozen=True)
class _Column:
    """A figure in bytes; left out first where `rank` is highest and there is no room."""

    title: str
    figure: Callable[[ProbeSample], Value]
    rank: int

    @property
    def width(self) -> int:
        return max(9, len(self.title) + 2)


def _bucket(bucket: Bucket) -> Callable[[ProbeSample], Value]:
    return lambda sample: sample.buckets[bucket]


_COLUMNS = (
    _Column("PARAMS", _bucket(Bucket.PARAMETERS), 1),
    _Column("GRADS", _bucket(Bucket.GRADIENTS), 2),
    _Column("OPTIM", _bucket(Bucket.OPTIMIZER), 3),
    _Column("ACTIV PEAK", lambda sample: sample.peak_buckets[Bucket.ACTIVATIONS], 4),
    _Column("OTHER", _bucket(Bucket.OTHER), 7),
    _Column("ALLOC", total_bytes, 5),
    _Column("RESERVED", lambda sample: sample.reserved_bytes, 6),
    _Column("PEAK", lambda sample: sample.peak_allocated_bytes, 0),
)
_ROOMY = 90
"""Cells from which pid and step time are shown."""
_RETRIES_WIDTH = 9


def ranks_rows(job: Job, gpu_name: Callable[[Placed], str], width: int) -> list[Row]:
    """A line a rank, then the spread of each figure.

    Args:
        gpu_name: the device as the Monitor numbers it.
    """
    roomy = width >= _ROOMY
    heading = _lead("RANK", "PID", "DEVICE", "STEP", "STEP TIME", roomy=roomy)
    columns = _fitting(width - len(heading) - _RETRIES_WIDTH)
    worst = job.worst
    titles = "".join(f"{column.title:>{column.width}}" for column in columns)
    rows: list[Row] = [[(f"{heading}{titles}{'RETRIES':>{_RETRIES_WIDTH}}", f"bold {MUTED}")]]
    rows += [_row(rank, gpu_name, columns, worst=rank is worst, roomy=roomy) for rank in job.ranks]
    rows.append([])
    for title, share in (("spread", False), ("", True)):
        rows.append([(f"{title:>6}".ljust(len(heading)) + _spread(columns, job, share=share), MUTED)])
    rows.append([])
    if worst is not None:
        rows.append([(_WORST, "bold $warning"), (f" rank {worst.number} holds the most: it runs out first", "")])
    if job.absent:
        rows.append(
            [(f"{job.absent} of {job.world_size} ranks do not publish here: on other machines, or not yet", MUTED)]
        )
    return rows


def _fitting(room: int) -> list[_Column]:
    """The columns that there is room for."""
    chosen: set[str] = set()
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if column.width > room:
            break
        chosen.add(column.title)
        room -= column.width
    return [column for column in _COLUMNS if column.title in chosen]


def _lead(rank: str, pid: str, device: str, step: str, pace: str, *, roomy: bool) -> str:
    """The cells left of the figures."""
    if roomy:
        return f"{rank:>6}{pid:>9}  {fit(device, 7)}{step:>8}{pace:>10}"
    return f"{rank:>6}  {fit(device, 7)}{step:>8}"


def _row(rank: Rank, gpu_name: Callable[[Placed], str], columns: list[_Column], *, worst: bool, roomy: bool) -> Row:
    mark = (_WORST if worst else " ", "bold $warning")
    style = "bold" if worst else ""
    number, pid = str(rank.number), str(rank.watched.pid)
    if rank.placed is None:
        return [mark, (_lead(number, pid, "", "", "", roomy=roomy)[1:], ""), ("  no step has finished yet", MUTED)]
    sample = rank.placed.sample
    step, pace = f"{sample.record.step:,}", seconds(sample.step_s)
    lead = _lead(number, pid, gpu_name(rank.placed), step, pace, roomy=roomy)[1:]
    sizes = "".join(f"{compact_bytes(column.figure(sample)):>{column.width}}" for column in columns)
    retries = sample.retries
    many = ABSENT if isinstance(retries, Unknown) else f"{retries:,}"
    hot = isinstance(retries, int) and retries > 0
    return [mark, (f"{lead}{sizes}", style), (f"{many:>{_RETRIES_WIDTH}}", "bold $warning" if hot else style)]


def _spread(columns: list[_Column], job: Job, *, share: bool) -> str:
    """Most less least of each figure, in bytes or as a share of the most."""
    cells = []
    for column in columns:
        spread = job.spread(column.figure)
        text = ABSENT
        if spread is not None:
            apart_bytes = spread.most_bytes - spread.least_bytes
            text = compact_bytes(apart_bytes)
            if share:
                text = f"{apart_bytes / spread.most_bytes:.1%}" if spread.most_bytes else ""
        cells.append(f"{text:>{column.width}}")
    return "".join(cells)
