"""Changes that make a command fit together: which are likely, and how they are typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from gpumem_tui.plan.combining import command_of, likely
from gpumem_tui.plan.command import CommandPlan, Together
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.workload.command import Command
from tests.plan.commands import base_predicted, base_trace, change, changed, command_config


def _config(words: tuple[str, ...] = ("python", "train.py", "--batch-size", "16"), cwd: str = "/") -> SearchConfig:
    config = command_config(*words, gpu="rtx-4090-24gb")
    return replace(config, workload=replace(config.workload, command=Command(words, cwd)))


def _plan(batch_size: int, config: SearchConfig | None = None) -> CommandPlan:
    config = config or _config()
    what_ifs = (changed(config, "checkpointing", activations=200), changed(config, "adafactor", optimizer=0))
    return CommandPlan(config, batch_size, base_predicted(config), what_ifs)


def test_the_cheapest_comes_first_and_each_holds_the_same_samples() -> None:
    found = likely(_plan(16))
    assert [one.price for one in found] == sorted(one.price for one in found)
    assert found[0].changes == (), "smaller passes alone: nothing is cheaper"
    assert all((one.passes - 1) * one.batch_size < 16 <= one.passes * one.batch_size for one in found)
    assert {"checkpointing"} in [{one.key for one in together.changes} for together in found]


def test_a_batch_that_nothing_says_stays() -> None:
    config = _config(("python", "train.py"))
    assert {one.batch_size for one in likely(_plan(16, config))} <= {16}


def test_what_fits_counts_the_gradients_of_earlier_passes() -> None:
    plan = _plan(16)
    largest = base_trace(plan.config).max_batch_size
    assert isinstance(largest, int)
    alone = Together((), largest, 2, base_trace(plan.config))
    assert plan.fits_with(alone)
    assert not plan.fits_with(replace(alone, beside_bytes=4096 * MIB))


@pytest.mark.parametrize(
    ("script", "typed", "written"),
    [
        (
            "from transformers import HfArgumentParser, TrainingArguments",
            "python train.py --batch-size 4 --gradient_checkpointing True --gradient_accumulation_steps 4",
            (),
        ),
        (
            "TrainingArguments(per_device_train_batch_size=batch_size)",
            "python train.py --batch-size 4",
            ("TrainingArguments(gradient_checkpointing=True)", "gradient_accumulation_steps × 4"),
        ),
        ("gradient_accumulation_steps = 5 * 8", "python train.py --batch-size 4", ("gradient_accumulation_steps × 4",)),
        ("", "python train.py --batch-size 4", ("4 passes before each optimizer step, the loss divided by 4",)),
    ],
)
def test_the_command_is_in_the_programs_own_words(
    tmp_path: Path, script: str, typed: str, written: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(script)
    config = _config(cwd=str(tmp_path))
    line, besides = command_of(_plan(16, config), Together((change("checkpointing", config),), 4, 4))
    assert line == typed
    assert besides[-len(written) :] == written if written else not besides
