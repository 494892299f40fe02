"""The batch size in a configuration file that a command names."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("llamafactory-cli", "train", "x.yaml"),
            "write {batch} in x.yaml as the batch size, or add `per_device_train_batch_size={batch}`",
        ),
        (("python", "train.py", "--config=x.yaml"), "write {batch} in x.yaml as the batch size"),
        (("python", "train.py", "missing.yaml"), "write {batch} where the batch size goes"),
        (("python", "train.py", "x.yaml", "--bs", "4"), "write `--bs {batch}` instead of `--bs 4`"),
    ],
)
def test_how_a_line_with_a_file_is_to_be_written(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "x.yaml").write_text("per_device_train_batch_size: 4")
    command = Command(words, str(tmp_path))
    assert not command.takes_batch
    assert command.rewriting == said


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
