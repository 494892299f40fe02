"""Programs that stand in PATH while a command is followed."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_tui.run.stand_ins import SITE, keep_followed, nvidia_smi, put_in_path
from tests.command.running import Project

H100 = {"title": "NVIDIA H100 80 GB", "total_bytes": 81559 << 20, "compute_capability": [9, 0]}
TRAIN = """
    import torch

    net = torch.nn.Linear(1000, 1000).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(5):
        net(torch.randn(4, 1000).cuda()).sum().backward()
        optimizer.step()
"""


def test_the_list_of_gpus() -> None:
    assert nvidia_smi(H100, 2, ["-L"]) == (
        "GPU 0: NVIDIA H100 80 GB (UUID: GPU-00000000-0000-0000-0000-000000000000)\n"
        "GPU 1: NVIDIA H100 80 GB (UUID: GPU-00000000-0000-0000-0000-000000000001)\n"
    )


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"), [["81559", "81559"]]),
        (("--query-gpu", "name,memory.total", "--format", "csv,noheader"), [["NVIDIA H100 80 GB", "81559 MiB"]]),
        (("--query-gpu=index,memory.used", "--format=csv"), [["index", "memory.used [MiB]"], ["0", "0 MiB"]]),
        (("-i", "0", "--query-gpu=compute_cap,fan.speed", "--format=csv,noheader"), [["9.0", "[N/A]"]]),
        (("-i", "3", "--query-gpu=index", "--format=csv,noheader"), []),
        (("--query-compute-apps=pid", "--format=csv,noheader"), []),
    ],
)
def test_properties_as_csv(words: tuple[str, ...], rows: list[list[str]]) -> None:
    assert list(csv.reader(io.StringIO(nvidia_smi(H100, 1, list(words))), skipinitialspace=True)) == rows


def test_a_python_in_path_puts_back_what_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    path = put_in_path(tmp_path / "stand-ins", simulated=False)
    assert not (tmp_path / "stand-ins" / "nvidia-smi").exists()
    python = shutil.which("python3", path=path)
    assert python == str(tmp_path / "stand-ins" / "python3")
    script = "import os; print(os.environ['PYTHONPATH'])"
    for before, after in ((".", f"{SITE}:."), ("", str(SITE)), (f"a:{SITE}", f"a:{SITE}")):
        words = [python, "-S", "-c", script]
        said = subprocess.run(words, env={"PATH": path, "PYTHONPATH": before}, capture_output=True, text=True)
        assert said.stdout.strip() == after, said.stderr
    assert keep_followed("PYTHONPATH=src") == f"PYTHONPATH={SITE}:src"
    assert keep_followed("--path=PYTHONPATH") == "--path=PYTHONPATH"


@pytest.mark.scripts
def test_a_replaced_pythonpath_is_survived_or_said(project: Project) -> None:
    project.write("train.py", TRAIN)
    assert project.predict("env", "PYTHONPATH=.", "python", "train.py").json["traced"]["buckets"]["parameters"]
    cut_off = project.predict("env", "-i", sys.executable, "train.py")
    assert cut_off.code == 2
    assert "no Python in it was followed; where it replaces PYTHONPATH, write PYTHONPATH=…:$PYTHONPATH" in (
        cut_off.complaint
    )
