"""The ranks of a job in a table: bytes per bucket, how far they differ, and the one that is nearest to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpumem_tui.memory import Bucket, Unknown, Value
from gpumem_tui.tui.figures import ABSENT, MUTED, Span, compact_bytes
from gpumem_tui.tui.views.probed import seconds
from gpumem_tui.tui.views.readings import fit
from gpumem_tui.watch.jobs import Job, Rank, total_bytes
from gpumem_tui.watch.published import Placed
from gpumem_tui.watch.records import Sample

Row = list[Span]
_WORST = "▲"


@dataclass(frozen=True)
class _Column:
    """A figure in bytes; left out first where `rank` is highest and there is no room."""

    title: str
    figure: Callable[[Sample], Value]
    rank: int

    @property
    def width(self) -> int:
        return max(9, len(self.title) + 2)


def _bucket(bucket: Bucket) -> Callable[[Sample], Value]:
    return lambda sample: sample.buckets[bucket]


_COLUMNS = (
    _Column("PARAMS", _bucket(Bucket.PARAMETERS), 1),
    _Column("GRADS", _bucket(Bucket.GRADIENTS), 2),
    _Column("OPTIM", _bucket(Bucket.OPTIMIZER), 3),
    _Column("ACTIV@PEAK", lambda sample: sample.peak_buckets[Bucket.ACTIVATIONS], 4),
    _Column("OTHER", _bucket(Bucket.OTHER), 7),
    _Column("ALLOC", total_bytes, 5),
    _Column("RESERVED", lambda sample: sample.reserved_bytes, 6),
    _Column("PEAK", lambda sample: sample.peak_allocated_bytes, 0),
)
_LEAD_WIDTH = 39
_RETRIES_WIDTH = 9


def ranks_rows(job: Job, gpu_name: Callable[[Placed], str], width: int) -> list[Row]:
    """A line a rank, then the spread of each figure.

    Args:
        gpu_name: the device as the Monitor numbers it.
    """
    columns = _fitting(width)
    worst = job.worst
    rows: list[Row] = [[(_heading(columns), f"bold {MUTED}")]]
    rows += [_row(rank, gpu_name, columns, worst=rank is worst) for rank in job.ranks]
    rows += [[], _spread_row("spread", columns, job), _spread_row("", columns, job, share=True), []]
    if worst is not None:
        rows.append([(_WORST, "bold $warning"), (f" rank {worst.number} holds the most: it runs out first", "")])
    if job.absent:
        rows.append(
            [(f"{job.absent} of {job.world_size} ranks do not publish here: on other machines, or not yet", MUTED)]
        )
    return rows


def _fitting(width: int) -> list[_Column]:
    """The columns that there is room for."""
    room = width - _LEAD_WIDTH - _RETRIES_WIDTH
    chosen: set[str] = set()
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if column.width > room:
            break
        chosen.add(column.title)
        room -= column.width
    return [column for column in _COLUMNS if column.title in chosen]


def _heading(columns: list[_Column]) -> str:
    lead = f"{'RANK':>6}{'PID':>9}  {'DEVICE':<7}{'STEP':>8} {'STEP S':>7}"
    titles = "".join(f"{column.title:>{column.width}}" for column in columns)
    return f"{fit(lead, _LEAD_WIDTH)}{titles}{'RETRIES':>{_RETRIES_WIDTH}}"


def _row(rank: Rank, gpu_name: Callable[[Placed], str], columns: list[_Column], *, worst: bool) -> Row:
    mark = (_WORST if worst else " ", "bold $warning")
    style = "bold" if worst else ""
    lead = f"{rank.number:>5}{rank.watched.pid:>9}  "
    if rank.placed is None:
        return [mark, (f"{lead}no step has finished yet", MUTED)]
    sample = rank.placed.sample
    device = fit(gpu_name(rank.placed), 7)
    pace = seconds(sample.step_s).replace(" ", "")
    lead += f"{device}{sample.record.step:>8,} {pace:>7}"
    sizes = "".join(f"{compact_bytes(column.figure(sample)):>{column.width}}" for column in columns)
    retries = sample.retries
    many = ABSENT if isinstance(retries, Unknown) else f"{retries:,}"
    hot = isinstance(retries, int) and retries > 0
    return [
        mark,
        (f"{fit(lead, _LEAD_WIDTH - 1)}{sizes}", style),
        (f"{many:>{_RETRIES_WIDTH}}", "bold $warning" if hot else style),
    ]


def _spread_row(title: str, columns: list[_Column], job: Job, *, share: bool = False) -> Row:
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
    return [(f"{title:>6}".ljust(_LEAD_WIDTH) + "".join(cells), MUTED)]
