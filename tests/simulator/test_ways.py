"""Whether anything may be sized by a number that a program reads from the GPU, as its own source shows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpumem_tui.simulator.device import uses
from gpumem_tui.simulator.device import ways as following
from gpumem_tui.simulator.device.ways import NUMBER, WHOLE, Way, way


class _Read(Exception):
    """A program has read a value, and need not run on."""


_READING = """
class Tensor:
    def __init__(self, kind):
        self.kind = kind
    def item(self):
        self.way = way(self.kind)
        raise Read
    tolist = cpu = item
"""
"""A tensor that answers what a program reads by nothing but the way of it; its lines are none of the program's."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    uses.files_by_word.cache_clear()
    monkeypatch.setattr(uses, "is_own", lambda path: path.startswith(str(tmp_path)))  # these tests are none of it
    yield tmp_path
    uses.files_by_word.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def way_of(folder: Path, source: str, kind: int = WHOLE) -> Way:
    path = folder / "program.py"
    path.write_text(dedent(source))
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    sys.modules["program"] = program
    spec.loader.exec_module(program)
    names: dict[str, Any] = {"way": way, "Read": _Read}
    exec(compile(_READING, "<a tensor>", "exec"), names)
    read = names["Tensor"](kind)
    with pytest.raises(_Read):
        program.run(read, ())
    found: Way = read.way
    return found


SIZING = {
    "on the same line": "def run(score, x):\n    n = score.item(); return x[:n]",
    "a dict": """
        stats = {}
        def measure(score):
            stats["keep"] = score.item()
        def run(score, x):
            measure(score)
            return x[: stats["keep"]]
        """,
    "a dict that is given": """
        def measure(score, into):
            into.update(keep=score.item())
        def run(score, x):
            found = {}
            measure(score, into=found)
            return x.new_zeros(found["keep"])
        """,
    "an attribute of an object that is given": """
        class Plan: pass
        def run(score, x):
            plan = Plan()
            setattr(plan, "rows", score.item())
            return cut(x, plan)
        def cut(x, plan):
            return x.narrow(0, 0, plan.rows)
        """,
    "a data class": """
        from dataclasses import dataclass
        @dataclass
        class Plan:
            rows: int
            def cut(self, x):
                return x[: self.rows]
        def run(score, x):
            return Plan(score.item()).cut(x)
        """,
    "another module": """
        import sizes
        def run(score, x):
            sizes.STATE.keep = score.item()
            return sizes.cut(x)
        """,
    "numpy": """
        import numpy as np
        def run(score, x):
            return x[: np.cumsum(np.asarray(score.tolist()))[-1]]
        """,
    "text": """
        import json
        def run(score, x):
            return x[: json.loads(json.dumps({"n": score.item()}))["n"]]
        """,
    "the environment": """
        import os
        def run(score, x):
            n = score.item()
            os.environ["ROWS"] = f"{n}"
            return x[: int(os.environ["ROWS"])]
        """,
    "the environment, by a function": """
        import os
        def run(score, x):
            os.environ.update(ROWS=str(score.item()))
            return x[: int(os.environ["ROWS"])]
        """,
    "a library": """
        from itertools import product
        import einops
        def run(score, x):
            return einops.repeat(x, "a -> n a", n=score.item())
        """,
    "a generator": """
        def counts(score):
            yield score.item()
        def run(score, x):
            for n in counts(score):
                return range(n)
        """,
    "a method that returns it": """
        class Score:
            def __call__(self, score):
                return score.item()
        def run(score, x):
            return x[Score()(score) :]
        """,
    "a loop": """
        def run(score, x):
            n = score.item()
            while n > 3:
                n -= 1
        """,
}


@pytest.mark.parametrize("source", SIZING.values(), ids=SIZING)
def test_a_size_that_a_whole_number_may_come_to(folder: Path, source: str) -> None:
    (folder / "sizes.py").write_text(
        "class State: pass\nSTATE = State()\nNAMES = 'sizes'\ndef cut(x):\n    return x[: STATE.keep]\n"
    )
    (folder / "einops.py").write_text("def repeat(x, words, **sizes): ...\n")
    (folder / "site-packages").mkdir()
    (folder / "einops.py").rename(folder / "site-packages" / "einops.py")
    sys.path.insert(1, str(folder / "site-packages"))
    try:
        assert way_of(folder, source).may_size
    finally:
        sys.path.remove(str(folder / "site-packages"))


CHOOSING = {
    "a mask of an array": """
        import numpy as np
        def run(s, x):
            s = s.cpu().numpy()
            return x[np.where(s > 0.5)[0]]
        """,
    "a list that a test adds to": """
        def run(s, x):
            hard = []
            for place, value in enumerate(s.tolist()):
                if value < 0.5:
                    continue
                hard.append(place)
            return x[hard]
        """,
    "a comprehension": "def run(s, x):\n    return x[[at for at, one in enumerate(s.tolist()) if one > 0.5]]",
    "its share": "def run(s, x):\n    return x[: int(s.item() * len(x))]",
    "a frame": """
        import pandas as pd
        def run(s, x):
            frame = pd.DataFrame({"s": s.cpu()})
            return x[frame[frame.s > 0.5].index]
        """,
    "their number": "def run(s, x):\n    values = s.tolist()\n    return x[: len([one for one in values if one > 1])]",
}


@pytest.mark.parametrize("source", CHOOSING.values(), ids=CHOOSING)
def test_rows_that_fractions_may_choose(folder: Path, source: str) -> None:
    assert way_of(folder, source, NUMBER).may_size


HARMLESS = {
    "a loss": """
        def run(loss, x, best=1e9, total=0.0):
            losses = []
            value = loss.item()
            losses.append(value)
            total += value * x.size(0)
            if value < best:
                best, counter = value, 0
            print(f"{value:.3f}", sum(losses) / len(losses), losses[-10:], int(100 * value))
            writer.add_scalar("loss", value, step)
            scheduler.step(value)
            bar.set_postfix(loss=value)
            return total / 3
        """,
    "a meter": """
        class Meter:
            def update(self, value, n=1):
                self.sum += value * n
                self.count += n
                self.avg = self.sum / self.count
        def run(loss, x):
            meter = Meter()
            meter.update(loss.item(), x.size(0))
            for batch in range(10):
                print(meter.avg, x[: 5 + batch])
        """,
    "a share of right answers": """
        def run(found, x, correct=0, total=0):
            for _ in range(4):
                correct += found.item()
                total += len(x)
            print("%d of %d" % (correct, total), 100.0 * correct / total)
            return {"accuracy": correct / total}
        """,
    "early stopping": """
        class Stopping:
            def __call__(self, loss):
                if loss > self.best:
                    self.counter += 1
                    if self.counter >= 7:
                        self.stop = True
        def run(loss, x):
            Stopping()(loss.item())
            return x[:32]
        """,
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, NUMBER) for name in HARMLESS), ("a share of right answers", WHOLE)]
)
def test_what_is_only_shown_compared_or_averaged_sizes_nothing(folder: Path, name: str, kind: int) -> None:
    assert not way_of(folder, HARMLESS[name], kind).may_size


def test_the_lines_that_work_with_it_and_whether_it_is_divided_by(folder: Path) -> None:
    source = "def run(found, x):\n    ok = found.item()\n    rest = 9 - ok\n    print(1)\n    return ok / rest\n"
    found = way_of(folder, source)
    path = str(folder / "program.py")
    assert found.divides
    assert [found.reaches(path, line) for line in range(2, 6)] == [True, True, False, True]


def test_a_way_that_leads_through_very_many_statements_may_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = "\n    ".join(f"n{i + 1} = n{i}" for i in range(40))
    source = f"def run(score, x):\n    n0 = score.item()\n    {steps}\n    return n40"
    assert not way_of(folder, source).may_size
    monkeypatch.setattr(following, "_MOST_STEPS", 20)
    following._way.cache_clear()
    assert way_of(folder, source).may_size
