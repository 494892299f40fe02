"""Rows that a GPU measured next to what this checkout predicts of them: `python -m tests.gpu.measured [ROW …]`.

Needs no GPU, but an interpreter (`--python`) that has what the programs need. Inside is a row whose allocated bytes are
within 0.1 %, whose reserved ones are within 1 %, and whose total is in the range that is predicted. Each row outside
has its cause in `causes.toml` next to the figures: the exit code is 1 where a row lacks one, or has one and is inside.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.catalog.shapes import CatalogError
from tests.gpu.outcome import (
    ALLOCATED_PERCENT,
    RESERVED_PERCENT,
    Cause,
    Comparison,
    Predicted,
    header_lines,
    predict,
    read_csv,
    summary,
    text_line,
    write_csv,
    write_markdown,
)
from tests.gpu.rows import Interpreter, NotHere, Row, load_rows, selected
from tests.published.measurements import DEFAULT_RECORDINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_FOLDER = DEFAULT_RECORDINGS / "h200"
NO_CAUSE = "not known"

_ABOUT_CAUSES = """\
# Why rows of measured.csv lie outside of what is predicted of them here, and by how much they do: `Cause` in
# tests/gpu/outcome.py. `python -m tests.gpu.measured` complains of an entry that no longer holds, with --update it is
# taken out."""


class Laboratory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the figures of a folder were measured (machine.toml).

    Attributes:
        simulated: the catalog's name of that GPU.
        packages: the versions there.
    """

    gpu: str
    simulated: str
    driver: str
    cuda: str
    cudnn: str
    measured: str
    packages: dict[str, str]


class Folder:
    """A folder of measured rows: machine.toml, measured.csv, causes.toml, and the histories in events/."""

    def __init__(self, path: Path) -> None:
        self.machine = msgspec.convert(_toml(path / "machine.toml"), Laboratory)
        self._causes = path / "causes.toml"
        has_causes = self._causes.exists()
        self.causes = msgspec.convert(_toml(self._causes), dict[str, Cause]) if has_causes else {}
        self.real = read_csv(path / "measured.csv")

    @property
    def rows(self) -> list[Row]:
        """The rows that were measured, in the order of the programs' table."""
        return [row for row in load_rows() if row.name in self.real]

    def compared(self, row: Row, predicted: Predicted) -> Comparison:
        """A row with what is predicted of it, and its cause if it has one."""
        cause = self.causes.get(row.name)
        real = self.real[row.name]
        return Comparison(
            name=row.name, kind=row.kind, real=real, predicted=predicted, cause=cause.why if cause else ""
        )  # fmt: skip

    def complaint(self, found: Comparison) -> str:
        """The fault of a row's cause on record; empty without one."""
        cause = self.causes.get(found.name)
        if cause is None:
            return f"outside without a cause: {'; '.join(found.outside)}" if found.outside else ""
        if not found.outside:
            return "inside: take its cause out of causes.toml"
        if not found.is_whole:
            return "" if cause.error and cause.error in found.predicted.error else found.predicted.error
        for name, now, limit, noted in (
            ("allocated", found.allocated_percent, ALLOCATED_PERCENT, cause.allocated_percent),
            ("reserved", found.reserved_percent, RESERVED_PERCENT, cause.reserved_percent),
        ):
            if abs(now - (noted or 0.0)) > limit:
                return f"{name} {now:+.2f} %, {noted or 0.0:+.2f} % by causes.toml"
        device = found.device if found.device in ("above", "below") else ""
        return "" if device == cause.device else f"device {found.device}, {cause.device or 'inside'} by causes.toml"

    def update(self, rows: Sequence[Comparison]) -> None:
        """Write causes.toml as these rows are now: without those inside, with those that are outside anew.

        Facts about why stays; where nothing is, the cause is NO_CAUSE, and somebody has to find it.
        """
        for row in rows:
            known = self.causes.pop(row.name, Cause(why=NO_CAUSE))
            if not row.outside:
                continue
            if row.is_whole:
                far = [
                    round(percent, 2) if abs(percent) > limit else None
                    for percent, limit in (
                        (row.allocated_percent, ALLOCATED_PERCENT),
                        (row.reserved_percent, RESERVED_PERCENT),
                    )
                ]
                device = row.device if row.device in ("above", "below") else ""
                now = Cause(why=known.why, allocated_percent=far[0], reserved_percent=far[1], device=device)
            else:
                now = Cause(why=known.why, error=known.error or row.predicted.error)
            self.causes[row.name] = now
        order = {name: self.causes[name] for name in self.real if name in self.causes}
        self._causes.write_text(
            "\n\n".join([_ABOUT_CAUSES, *map(_table, order, order.values())]) + "\n", encoding="utf-8"
        )


def _table(name: str, cause: Cause) -> str:
    """A cause as TOML, its words last."""
    values = {key: getattr(cause, key) for key in ("allocated_percent", "reserved_percent", "device", "error", "why")}
    return "\n".join(
        [
            f"[{name}]",
            *(
                f"{key} = {json.dumps(value, ensure_ascii=False)}"
                for key, value in values.items()
                if value not in (None, "")
            ),
        ]
    )


def _toml(path: Path) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, 1 where a cause is lacking or stale, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.measured", description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="default: the H200's")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="runs the programs (default: this)")
    parser.add_argument("--clones", type=Path, metavar="DIR", help="a folder of clones, such as DIR/nanoGPT")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--update", action="store_true", help="write causes.toml as the rows are now")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="rows at once")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="all without any")
    options = parser.parse_args(arguments)
    try:
        folder = Folder(options.folder)
        gpu = find_gpu(folder.machine.simulated)
        python = Interpreter(options.python, gpu.compute_capability)
        rows = selected(options.rows, folder.rows)
    except (NotHere, CatalogError, OSError, msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    found = []
    print(*header_lines(), sep="\n")
    with ThreadPoolExecutor(options.n) as pool:
        predicted = pool.map(partial(_predicted, python, f"sim:{folder.machine.simulated}", options.clones), rows)
        for row, each in zip(rows, predicted, strict=True):
            if isinstance(each, NotHere):
                print(f"{row.name}: {each}", flush=True)
                continue
            found.append(folder.compared(row, each))
            print(text_line(found[-1]), flush=True)
    for line in summary(found):
        print(line)
    title = f"{folder.machine.gpu}, driver {folder.machine.driver}, torch {folder.machine.packages['torch']}"
    if options.csv:
        write_csv(options.csv, found)
    if options.markdown:
        write_markdown(options.markdown, title, found)
    if options.update:
        folder.update(found)
        return 0
    complaints = {row.name: said for row in found if (said := folder.complaint(row))}
    for name, said in complaints.items():
        print(f"{name}: {said}")
    return int(bool(complaints))


def _predicted(python: Interpreter, gpu: str, clones: Path | None, row: Row) -> Predicted | NotHere:
    try:
        python.check(row)
        row.folder(clones)
    except NotHere as error:
        return error
    return predict(row, python.path, gpu, clones)


if __name__ == "__main__":
    sys.exit(main())
