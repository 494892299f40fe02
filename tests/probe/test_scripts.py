"""Unmodified training scripts under the probe: what it publishes equals an independent count, to the byte."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.probe.watched import HERE, SCRIPTS, TORCHRUN, Run, run


def _counted(script: str, directory: Path, *launcher: str, arguments: tuple[str, ...] = ()) -> Run:
    done = run([*launcher, HERE / "counted.py", SCRIPTS / f"{script}.py", *arguments], directory)
    assert done.code == 0, done.errors
    return done


def _assert_equal_to_the_byte(done: Run) -> None:
    """As of the process's end, when script and probe see equal values."""
    assert len(done.published) == len(done.counts) > 0
    for found, counts in zip(done.published, done.counts, strict=True):
        assert found.last.parameters_bytes == counts["parameters"] > 0
        assert found.last.gradients_bytes == counts["gradients"]
        assert found.last.optimizer_bytes == counts["optimizer"] > 0
        assert found.last.errors == found.last.dropped == 0
        assert found.header.ended_ns > 0


def _needs(*libraries: str) -> pytest.MarkDecorator:
    lacking = [library for library in libraries if find_spec(library) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {' and '.join(lacking)}")


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("plain", 40),
        pytest.param("scaler_accumulation", 40, marks=pytest.mark.slow),
        pytest.param("two_optimizers", 40, marks=pytest.mark.slow),
        pytest.param("gan", 80, marks=pytest.mark.slow),
        pytest.param("vae", 40, marks=pytest.mark.slow),
        pytest.param("lbfgs", 20, marks=pytest.mark.slow),
        pytest.param("optimizer_in_backward", 40, marks=pytest.mark.slow),
        pytest.param("lightning_fit", 20, marks=[_needs("lightning"), pytest.mark.scripts]),
        pytest.param("lightning_manual", 20, marks=[_needs("lightning"), pytest.mark.scripts]),
        pytest.param("accelerate_loop", 20, marks=[_needs("accelerate"), pytest.mark.scripts]),
        pytest.param("hugging_face_trainer", 10, marks=[_needs("transformers", "accelerate"), pytest.mark.scripts]),
        pytest.param(
            "hugging_face_lora", 10, marks=[_needs("transformers", "accelerate", "peft"), pytest.mark.scripts]
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
    assert (found.records[0].gradients_bytes > 0) == (
        script != "optimizer_in_backward"
    )  # there each is dropped at once
    assert found.header.process.entry == "run"


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("averages", 60),
        pytest.param("preferences", 60, marks=pytest.mark.slow),
        pytest.param("notebook", 90, marks=pytest.mark.slow),
        pytest.param("swapped", 60, marks=pytest.mark.slow),
    ],
)
def test_models_that_are_made_in_mid_run_are_found_while_it_runs(script: str, steps: int, tmp_path: Path) -> None:
    """A moving average, a reference model, adapters, a cell that is run again, a model in place of another."""
    done = _counted(script, tmp_path / "published")
    _assert_equal_to_the_byte(done)
    (found,) = done.published
    (counts,) = done.counts
    training = [record for record in found.records if record.phase == "optimizer"]
    assert training[0].parameters_bytes != counts["parameters"]
    assert counts["parameters"] in {record.parameters_bytes for record in training}
    assert found.last.step == steps


MANY_OBJECTS = """
import gc, resource, sys, time
import torch
from torch import nn

def highest_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def train(model, optimizer):
    model(torch.ones(1, 8)).sum().backward()
    started = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - started

def main():
    data = [[number] for number in range(2_000_000)]
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer)
    gc.get_objects = None  # which would be a list of them all
    import gpumem_tui
    gpumem_tui.attach()
    before = highest_mib()
    print(train(model, optimizer), highest_mib() - before, len(data))

main()
"""


@pytest.mark.slow
def test_a_program_with_millions_of_objects_is_not_held_up(tmp_path: Path) -> None:
    """Where the probe comes late, too: the step in which it looks for modules took 0.7 s, and 38 MB."""
    done = run(["-c", MANY_OBJECTS], tmp_path / "published", watched=False)
    assert (done.code, done.errors) == (0, "")
    step_s, grown_mib, _ = map(float, done.output.split())
    assert step_s < 0.3  # 0.05 where nothing else runs
    assert grown_mib < 10
    (found,) = done.published
    assert found.records[0].parameters_bytes == 2 * 72 * 4
    assert found.last.errors == 0
    assert found.documents["model"]["complete"] is False


@pytest.mark.slow
def test_processes_that_train_one_model_together(tmp_path: Path) -> None:
    """Objects of a function of theirs are gone as they end: their last sample of training is compared."""
    done = run([SCRIPTS / "hogwild.py"], tmp_path / "published")
    assert done.code == 0, done.errors
    assert len(done.published) == len(done.counts) == 2
    for found, counts in zip(done.published, done.counts, strict=True):
        training = [record for record in found.records if record.phase == "optimizer"][-1]
        assert training.parameters_bytes == counts["parameters"] > 0
        assert training.gradients_bytes == counts["gradients"]
        assert training.optimizer_bytes == counts["optimizer"]
        assert (found.last.step, found.last.errors) == (20, 0)
        assert found.header.ended_ns > 0


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


@pytest.mark.slow
def test_steps_count_once_when_torch_comes_to_hook_the_parents_step_too(tmp_path: Path) -> None:
    done = run(["-c", WRAPPED_LATER], tmp_path / "published")
    assert (done.code, done.errors) == (0, "")
    (found,) = done.published
    assert [record.step for record in found.records] == [1, 2, 3, 4, 5, 6, 6]  # the last as the program ends


@pytest.mark.parametrize(
    ("script", "steps"),
    [pytest.param("compiled", 10, marks=pytest.mark.slow), pytest.param("nano_gpt", 20, marks=pytest.mark.scripts)],
)
def test_nothing_is_compiled_for_the_probe(script: str, steps: int, tmp_path: Path) -> None:
    """Nor does it break a graph in two: frames and graphs are those of a run without it."""
    program: list[str | Path] = [HERE / "counted.py", SCRIPTS / f"{script}.py", "--compile"]
    unwatched = run(program, tmp_path / "none", watched=False)
    watched = _counted(script, tmp_path / "published", arguments=("--compile",))
    assert watched.counts == unwatched.counts
    assert watched.counts[0]["graphs"] >= 1
    _assert_equal_to_the_byte(watched)
    assert watched.published[0].last.step == steps


@pytest.mark.parametrize(
    "script",
    [
        "fully_sharded",
        pytest.param("data_parallel", marks=pytest.mark.slow),
        pytest.param("muon", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(script: str, tmp_path: Path) -> None:
    done = _counted(script, tmp_path / "published", *TORCHRUN)
    _assert_equal_to_the_byte(done)
    assert [found.header.process.rank for found in done.published] == [0, 1]
    assert {found.header.process.world_size for found in done.published} == {2}
    (job,) = {found.header.process.job for found in done.published}
    assert job, "the id of torchrun's rendezvous"
