"""Unmodified training scripts under the probe: what it publishes equals an independent count, to the byte."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.probe.watched import HERE, SCRIPTS, TORCHRUN, Run, run


def _counted(script: str, directory: Path, *launcher: str) -> Run:
    done = run([*launcher, HERE / "counted.py", SCRIPTS / f"{script}.py"], directory)
    assert done.code == 0, done.errors
    return done


def _assert_equal_to_the_byte(done: Run) -> None:
    """As of the process's end, when script and probe see the same."""
    assert len(done.published) == len(done.counts) > 0
    for found, counts in zip(done.published, done.counts, strict=True):
        assert found.last.parameters_bytes == counts["parameters"] > 0
        assert found.last.gradients_bytes == counts["gradients"]
        assert found.last.optimizer_bytes == counts["optimizer"] > 0
        assert found.records[0].gradients_bytes > 0
        assert found.last.errors == found.last.dropped == 0
        assert found.header.ended_ns > 0


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("plain", 40),
        ("scaler_accumulation", 40),
        ("two_optimizers", 40),
        ("gan", 80),
        pytest.param(
            "lightning_fit", 20, marks=pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
        ),
        pytest.param(
            "hugging_face_trainer",
            10,
            marks=pytest.mark.skipif(
                find_spec("transformers") is None or find_spec("accelerate") is None,
                reason="needs transformers and accelerate",
            ),
        ),
    ],
)
def test_one_process(script: str, steps: int, tmp_path: Path) -> None:
    done = _counted(script, tmp_path / "published")
    _assert_equal_to_the_byte(done)
    (found,) = done.published
    assert found.last.step == steps
    assert found.records[0].phase == "optimizer"
    assert found.records[0].step == 1
    assert found.header.process.entry == "run"


WRAPPED_LATER = """
import math
import torch
from gpumem_tui.probe import probe

probe.INTERVAL_S, probe.SAMPLE_SHARE = 0.0, math.inf  # every step is looked at

class Child(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

parameter = torch.nn.Parameter(torch.ones(4))
optimizer = Child([parameter], lr=0.1)
for step in range(6):
    if step == 3:
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
"""


def test_steps_count_once_when_torch_comes_to_hook_the_parents_step_too(tmp_path: Path) -> None:
    done = run(["-c", WRAPPED_LATER], tmp_path / "published")
    assert (done.code, done.errors) == (0, "")
    (found,) = done.published
    assert [record.step for record in found.records] == [1, 2, 3, 4, 5, 6, 6]  # the last as the program ends


def test_nothing_is_compiled_for_the_probe(tmp_path: Path) -> None:
    """Nor does it break a graph in two: frames and graphs are those of a run without it."""
    script = [HERE / "counted.py", SCRIPTS / "compiled.py"]
    unwatched = run(script, tmp_path / "none", watched=False)
    watched = _counted("compiled", tmp_path / "published")
    assert watched.counts == unwatched.counts
    assert watched.counts[0]["graphs"] >= 2
    _assert_equal_to_the_byte(watched)
    assert watched.published[0].last.step == 10


@pytest.mark.parametrize("script", ["data_parallel", "fully_sharded"])
def test_two_ranks(script: str, tmp_path: Path) -> None:
    done = _counted(script, tmp_path / "published", *TORCHRUN)
    _assert_equal_to_the_byte(done)
    assert [found.header.process.rank for found in done.published] == [0, 1]
    assert {found.header.process.world_size for found in done.published} == {2}
