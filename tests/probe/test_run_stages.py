"""The peak of each stage of a run, by the allocator's own counter, which the probe never resets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpumem_tui.probe.files import Files
from gpumem_tui.probe.wire import StagePeak, Stages
from gpumem_tui.watch.documents import read_document
from tests.probe.watched import run

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

PROGRAM = """
import os, sys
sys.path.insert(0, os.environ["ROOT"])
import torch, gpumem_tui
from torch import nn
from gpumem_tui.probe import probe, stages
from tests.cuda_standin import cuda_played
probe.INTERVAL_S, probe.SAMPLE_SHARE, stages.READ_ALLOWANCE_S = 0, 1e9, 60
model, other = nn.Linear(8, 8), nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
plain = nn.Module.train, nn.Module.eval, torch.save

def use(mib):
    cuda.allocators[0].free(cuda.allocate(mib << 20))

with cuda_played() as cuda:
    gpumem_tui.attach()
    held = cuda.allocate(100 << 20)
    for step in range(4):
        use(200 + 100 * min(step, 1))
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        STAGES
    assert nn.Module.train is plain[0]  # followed within evaluations alone
    assert torch.cuda.max_memory_allocated() == HIGHEST << 20
"""


def _stages(directory: Path, stages: str, highest: int) -> dict[str, StagePeak]:
    program = PROGRAM.replace("STAGES", stages.replace("\n", "\n        ")).replace("HIGHEST", str(highest))
    done = run(["-c", program], directory, watched=False, more={"ROOT": str(ROOT)})
    assert done.code == 0, done.errors
    (ring,) = directory.glob("*.ring")
    document: Any = read_document(Stages, Files.of_ring(ring), os.getuid())
    assert not done.published[0].last.errors
    return {one.stage: one for one in document.peaks}


def _mib(peak: StagePeak) -> tuple[int, int]:
    return peak.least_bytes // MIB, peak.most_bytes // MIB


def test_an_evaluation_that_takes_most(tmp_path: Path) -> None:
    """From `eval` to `train`; a model that nothing trains evaluates nothing."""
    stages = "other.eval(); use(30)\nif step: model.eval(); use(500 + 2 * step); model.train()"
    found = _stages(tmp_path, stages, 606)
    assert {name: _mib(one) for name, one in found.items()} == {
        "warm-up": (300, 300),
        "train": (400, 604),  # its later steps do not raise the counter any more
        "evaluate": (606, 606),
    }
    assert found["evaluate"].step == 4
    assert found["evaluate"].buckets["parameters"] == 0  # they are in host memory here


def test_what_raises_no_counter_is_a_range(tmp_path: Path) -> None:
    found = _stages(tmp_path, "if step == 2: torch.save(model.state_dict(), os.devnull)", 400)
    assert {name: _mib(one) for name, one in found.items()} == {
        "warm-up": (300, 300),
        "train": (400, 400),
        "save": (100, 400),
    }


def test_a_model_that_takes_over_trained_weights(tmp_path: Path) -> None:
    """Loading into what is trained is none, nor is a file in memory a save."""
    stages = "import io; torch.save(1, io.BytesIO()); model.load_state_dict(model.state_dict())"
    found = _stages(tmp_path, f"{stages}\nother.load_state_dict(model.state_dict())", 400)
    assert {*found} == {"warm-up", "train", "weight sync"}


def test_no_training_is_followed_without_a_gpu(tmp_path: Path) -> None:
    program = PROGRAM.replace("with cuda_played() as cuda:", "if True:").replace("    held =", "    #")
    program = program.replace("        use(200", "        #").replace("STAGES", "").partition("    assert")[0]
    done = run(
        ["-c", program + "assert (nn.Module.train, nn.Module.eval, torch.save) == plain\n"],
        tmp_path, watched=False, more={"ROOT": str(ROOT)},
    )  # fmt: skip
    assert done.code == 0, done.errors
    assert not list(tmp_path.glob("*.stages.json"))
