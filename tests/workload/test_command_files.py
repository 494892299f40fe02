"""The batch size in a configuration file that a command names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpumem_tui.workload.command import Command
from tests.command.running import Project


def test_a_copy_lies_beside_the_file_and_goes_away(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text('{"micro": {batch}, "passes": {accumulation}, "zero": {"stage": 3}}')
    (tmp_path / "plain.yaml").write_text("lr: 1")
    command = Command(
        ("python", "train.py", "--deepspeed=conf/ds.json", "plain.yaml", "--bs", "{batch}"), str(tmp_path)
    )
    assert command.takes_batch
    with command.written(8, 2) as words:
        assert words[:2] == ("python", "train.py")
        assert words[3:] == ("plain.yaml", "--bs", "8")
        option, _, copy = words[2].partition("=")
        assert option == "--deepspeed"
        assert Path(copy).parent == Path("conf")
        assert json.loads((tmp_path / copy).read_text()) == {"micro": 8, "passes": 2, "zero": {"stage": 3}}
    assert [file.name for file in (tmp_path / "conf").iterdir()] == ["ds.json"]


@pytest.mark.scripts
def test_a_search_fills_the_file(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("c.json", '{"batch": {batch}}')
    project.write(
        "train.py",
        """
        import json, sys, torch

        batch = json.load(open(sys.argv[1]))["batch"]
        net = torch.nn.Linear(1000, 1000).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(5):
            net(torch.randn(batch, 1000).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py", "c.json", options=("--batch-size", "2000"))
    assert done.json["traced"]["buckets"]["batch_data"] == 2000 * 1000 * 4
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.json", "train.py"]


def test_a_file_that_another_file_names_is_copied_with_it(tmp_path: Path) -> None:
    """As LLaMA-Factory's YAML names DeepSpeed's JSON, from the folder of the command or from its own."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/ds.json").write_text('{"train_micro_batch_size_per_gpu": {batch}}')
    (tmp_path / "conf/near.json").write_text('{"bs": {batch}, "of": "conf/x.yaml"}')
    (tmp_path / "conf/x.yaml").write_text("deepspeed: conf/ds.json\nother: near.json\ndata: data.json\n")
    (tmp_path / "data.json").write_text("{batch}" * 200_000)
    (tmp_path / "train.sh").write_text("llamafactory-cli train conf/x.yaml\n")
    (tmp_path / "train.sh").chmod(0o755)
    before = sorted(tmp_path.rglob("*"))
    command = Command(("./train.sh", "data.json"), str(tmp_path))
    assert command.takes_batch
    with command.written(8) as words:
        script = tmp_path / words[0]
        assert words[1] == "data.json"
        assert script.stat().st_mode & 0o100
        yaml = tmp_path / script.read_text().split()[-1]
        lines = dict(line.split(": ") for line in yaml.read_text().splitlines())
        assert (tmp_path / lines["deepspeed"]).read_text() == '{"train_micro_batch_size_per_gpu": 8}'
        assert '"bs": 8' in yaml.with_name(lines["other"]).read_text()
        assert lines["data"] == "data.json"
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "llamafactory-cli").write_text('#!/bin/sh\ncat "$2" "$(sed -n "s/deepspeed: //p" "$2")"')
    (tmp_path / "llamafactory-cli").chmod(0o755)
    line = command.files_at(8) + command.text_at(8)
    ran = subprocess.run(
        ["sh", "-c", f"PATH=.:$PATH; {line}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "deepspeed: conf/ds-8.json" in ran.stdout, line
    assert ran.stdout.endswith('{"train_micro_batch_size_per_gpu": 8}')


def test_the_line_to_run_writes_the_file_with_the_batch_size(tmp_path: Path) -> None:
    (tmp_path / "c d-batch.yaml").write_text("batch: {batch}\npasses: {accumulation}\n")
    command = Command(("cat", "c d-batch.yaml"), str(tmp_path))
    line = command.files_at(12, 3) + command.text_at(12, 3)
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "batch: 12\npasses: 3\n", line
    assert (tmp_path / "c d-12.yaml").is_file()
    plain = Command(("python", "train.py", "--bs", "{batch}"), str(tmp_path))
    assert plain.files_at(12) + plain.text_at(12) == "python train.py --bs 12"
