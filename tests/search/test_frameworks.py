"""A framework is a whole table of dialects.toml: its line is recognized, a mistake in the table is one clear error."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.catalog.loader import toml_tables
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.options.workload import simulated_device
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.frameworks import dialect_of, dialects, line_for_any_batch, read_dialects, with_batch
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec

PROGRAMS = {
    "llama-factory": ("llamafactory-cli train x.yaml", ""),
    "axolotl": ("axolotl train x.yaml", ""),
    "torchtune": ("tune run lora_finetune_single_device --config x.yaml", ""),
    "trl": ("trl sft --config x.yaml", ""),
    "trainer": ("python train.py", "HfArgumentParser(TrainingArguments)"),
    "lightning-cli": ("python train.py fit", "LightningCLI(Model)"),
    "accelerate": ("accelerate launch train.py", "accelerator = Accelerator()"),
    "nanogpt": ("python train.py", "exec(open('configurator.py').read())"),
    "trainer-inside": ("python train.py", "TrainingArguments(bf16=True)"),
    "lightning": ("python train.py", "import lightning as L"),
    "accelerate-inside": ("python train.py", "accelerator = Accelerator()"),
}
"""By framework, a line that trains with it and what its script states."""
COMPOSER = {
    "title": "Composer",
    "by_text": ["from composer"],
    "inside": "Trainer({name}={value})",
    "passes": "device_train_microbatch_size",
    "says": {"autocast": "precision='amp_bf16'"},
}


def read(**changes: Any) -> str:
    """Why a table of Composer with these changes is refused; empty where it is not."""
    try:
        read_dialects({"composer": {**COMPOSER, **changes}})
    except CatalogError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", toml_tables("dialects.toml"))
def test_a_framework_is_known_by_a_line(tmp_path: Path, name: str) -> None:
    assert name in PROGRAMS, "a line of it belongs into this test"
    line, script = PROGRAMS[name]
    (tmp_path / "train.py").write_text(script)
    assert dialect_of(Command(tuple(line.split()), str(tmp_path))) == dialects()[name]
    assert dialects()[name].title


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"says": {"autocst": "precision='amp_bf16'"}}, "`says.autocst` is no known change; did you mean autocast?"),
        ({"says": {"sharded": "fsdp=True"}}, "`says.sharded` is no known change"),
        ({"says": {"autocast": True}}, "Expected `str`, got `bool` - at `$.says[...]`"),
        ({"passes": 4}, "Expected `str`, got `int` - at `$.passes`"),
        ({"by_text": "from composer"}, "Expected `array`, got `str` - at `$.by_text`"),
        ({"overides": True}, "Object contains unknown field `overides`"),
        ({"by_text": []}, "by_program, by_text: nothing gives its programs away"),
        ({"batch": "batch_size"}, "batch: the line has no form to say it in"),
        ({"inside": "Trainer({nam}={value})"}, "inside: 'nam' means nothing; {name}, {dashed} and {value} do"),
        ({"ranks": ["composr -n {gpus}"]}, "ranks: composr is no launcher of gpumem_tui/launchers.py"),
        ({"like": "trainr"}, "like: there is no table 'trainr'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_in_a_table_is_named_with_the_table_and_the_key(changes: dict[str, Any], said: str) -> None:
    assert read() == ""
    assert read(**changes) == f"dialects.toml: composer: {said}"


def typed(command: Command) -> str:
    config = SearchConfig(WorkloadSpec(Recipe(), command=command), simulated_device("t4-16gb"), typed=("--steps", "4"))
    return line_for_any_batch(config, "search").replace("gpumem-tui search --steps 4 -- ", "… ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llamafactory-cli train x.yaml", "`… llamafactory-cli train x.yaml per_device_train_batch_size={batch}`"),
        ("axolotl train x.yaml", "`… axolotl train x.yaml --micro-batch-size={batch}`"),
        ("tune run it --config x.yaml", "`… tune run it --config x.yaml batch_size={batch}`"),
        (
            "python train.py --config=x.yaml",
            "`sed '1s/per_device_train_batch_size: 4/per_device_train_batch_size: {batch}/' x.yaml > x-batch.yaml && "
            "… python train.py --config=x-batch.yaml`",
        ),
        (
            "python train.py missing.yaml",
            "give the program an option for its batch size, then `… python train.py missing.yaml --batch-size {batch}`",
        ),
        ("python train.py x.yaml --bs 4 --lr 1", "`… python train.py x.yaml --bs {batch} --lr 1`"),
        ("python train.py bs=4 lr=1", "`… python train.py bs={batch} lr=1`"),
        (
            "deepspeed --module a.b --train.batch_size 256 --train.micro_batch_size 2",
            "`… deepspeed --module a.b --train.batch_size 256 --train.micro_batch_size {batch}`",
        ),
    ],
)
def test_the_line_to_type_for_any_batch_size(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text("per_device_train_batch_size: 4")
    command = Command(tuple(line.split()), str(tmp_path))
    assert not command.takes_batch
    assert typed(command) == said


@pytest.mark.parametrize(
    ("name", "text", "filled"),
    [
        ("x.yaml", "lr: 64\ndata:\n  batch_size: 64\n", "lr: 64\ndata:\n  batch_size: {batch}\n"),
        ("x.toml", "[data]\nbatch-size = 8 # of a pass\n", "[data]\nbatch-size = {batch} # of a pass\n"),
        ("x.json", '{"eval_batch_size": 2,\n "batch_size": 2}', '{"eval_batch_size": 2,\n "batch_size": {batch}}'),
        (
            "a b.yaml",
            "train_batch_size: 32\nmicro_batch_size: 4\n",
            "train_batch_size: 32\nmicro_batch_size: {batch}\n",
        ),
        ("x.yaml", "train:\n  batch_size: 8\nval:\n  batch_size: 8\n", ""),
        ("x.json", '{"val": {"batch_size": 8}, "train": {"batch_size": 8}}', ""),
        ("x.yaml", "batch_size: auto\n", ""),
    ],
)
def test_one_line_for_a_batch_size_in_a_file_works_as_typed(tmp_path: Path, name: str, text: str, filled: str) -> None:
    (tmp_path / name).write_text(text)
    command = Command(("python", "train.py", f"--config={name}"), str(tmp_path))
    written = command.batch_written
    if not filled:
        assert written is None
        assert typed(command).startswith(f"write {{batch}} in {name} as the batch size, then `… python")
        return
    assert written is not None
    line, copy = written
    again = command.with_file(name, copy)
    assert typed(command) == f"`{line} && … {again.text}`"
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert (tmp_path / copy).read_text() == filled
    assert again.takes_batch
    assert typed(command) == f"`… {again.text}`"  # that file is there now
    (tmp_path / copy).write_text("another's")
    assert command.batch_written is None


HYDRA = "@hydra.main(version_base=None, config_path='conf', config_name='main')\ndef main(terms): ..."
FIRE = "def main(lr: float = 1e-3, val_batch=2, batch_size: int = 16): ...\nfire.Fire(main)"
TRAINER = "HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()"


@pytest.mark.parametrize(
    ("script", "line", "filled"),
    [
        (HYDRA, "python train.py", "python train.py train.batch_size={batch}"),
        (FIRE, "python train.py", "python train.py --batch_size {batch}"),
        (TRAINER, "python train.py", "python train.py --per_device_train_batch_size {batch}"),
        ("int(os.environ.get('BATCH_SIZE', 64))", "python train.py", "env BATCH_SIZE={batch} python train.py"),
        ("os.environ['BATCH_SIZE']", "env BATCH_SIZE=4 python train.py", "env BATCH_SIZE={batch} python train.py"),
        ("os.getenv('BATCH_SIZE')", "env A=1 torchrun train.py", "env BATCH_SIZE={batch} A=1 torchrun train.py"),
        ("bs = int(sys.argv[1])", "python train.py 32 big", "python train.py {batch} big"),
        ("bs = int(sys.argv[2])", "python train.py", ""),
        ("p.add_argument('--bs')", "torchrun -m train", "torchrun -m train --bs {batch}"),
        (
            "",
            "bash -c 'cd . && python train.py -b 8 | tee log'",
            "bash -c 'cd . && python train.py -b {batch} | tee log'",
        ),
        ("p.add_argument('--bs')", "bash -c 'python train.py'", "bash -c 'python train.py --bs {batch}'"),
        ("p.add_argument('--bs')", "bash -c 'cd . && python train.py'", ""),
    ],
    ids=["Hydra", "Fire", "Trainer", "variable", "set", "more", "place", "no place", "-m", "shell", "appended", "two"],
)
def test_the_batch_is_put_where_the_program_reads_it(tmp_path: Path, script: str, line: str, filled: str) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "conf" / "train").mkdir(parents=True)
    (tmp_path / "conf" / "main.yaml").write_text("defaults:\n  - train: long\nval:\n  batch_size: 2\n")
    (tmp_path / "conf" / "train" / "long.yaml").write_text("lr: 1\nbatch_size: 16\n")
    command = with_batch(Command(tuple(shlex.split(line)), str(tmp_path)))
    assert (command.text if command else "") == filled


def test_an_option_to_be_written_goes_into_a_shells_text(tmp_path: Path) -> None:
    command = Command(("bash", "-c", "python train.py"), str(tmp_path))
    assert typed(command) == f"{NO_WAY} `… bash -c 'python train.py --batch-size {{batch}}'`"


NO_WAY = "give the program an option for its batch size, then"


@pytest.mark.parametrize(
    ("script", "added"),
    [
        ('parser.add_argument("-b", "--batch-size", type=int)', "--batch-size {batch}"),
        ("parser.add_argument('--val-batch-size'); parser.add_argument('--bs', default=8)", "--bs {batch}"),
        ('@click.option("--train-batch-size", default=8)', "--train-batch-size {batch}"),
        ('flags.DEFINE_integer("batch_size", 8, "samples")', "--batch_size {batch}"),
        ("class Terms:\n    batch_size: int = 8\n\nterms = tyro.cli(Terms)", "--batch_size {batch}"),
        ("class Terms:\n    batch_size: int = 8\n\nterms = Terms()", ""),
        ("batch_size = 8", ""),
    ],
)
def test_a_data_set_is_no_place_for_the_batch_and_the_programs_own_option_is(
    tmp_path: Path, script: str, added: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "alpaca.json").write_text('[{"instruction": "Say a batch size", "output": "batch_size: 4"}]')
    (tmp_path / "lora.yaml").write_text("rank: 8\ntarget: all\nseed: 1\n")
    words = ("python", "train.py", "--data", "alpaca.json", "--lora=lora.yaml")
    line = " ".join(words)
    command = Command(words, str(tmp_path))
    assert typed(command) == (f"`… {line} {added}`" if added else f"{NO_WAY} `… {line} --batch-size {{batch}}`")
    (tmp_path / "ds.json").write_text('{"zero": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    beside = Command((*words, "ds.json"), str(tmp_path))
    in_file = f"write {{batch}} in ds.json as the batch size, then `… {line} ds.json`"
    assert typed(beside) == (f"`… {line} ds.json {added}`" if added else in_file)
