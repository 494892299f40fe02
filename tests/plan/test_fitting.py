"""The batch and the passes of a step, the sets of changes that are tried, and the line of a fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.techniques import injected
from gpumem_tui.memory import GIB, Range
from gpumem_tui.plan.dialects import spoken, typed_command, with_accumulation
from gpumem_tui.plan.fitting import ALLOWED, Fitted, _sets, choose
from gpumem_tui.run.events import TrialDone
from gpumem_tui.search.frameworks import dialects
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.workload.command import Command
from tests.plan.commands import command_config

KNOWN = {one.key: one for one in injected(find_gpu("a100-80gb"), 1)}
SWITCHES = """
parser.add_argument("--gradient_checkpointing", action="store_true", help="recompute")
parser.add_argument("--use_8bit_adam", action="store_true")
parser.add_argument("--lr", type=float)
parser.add_argument("--use_lora", type=str, default="no")
parser.add_argument("--accum", type=int, default=1)
"""


@pytest.mark.parametrize(
    ("safe", "target", "ranks", "accumulates", "found"),
    [
        (22, 64, 1, True, (22, 3)),  # 16 would make four passes
        (24, 96, 1, True, (24, 4)),
        (21, 64, 1, True, (16, 4)),  # exactly, at three quarters
        (60, 64, 1, True, (32, 2)),  # as many passes as 60 take
        (200, 64, 1, True, (64, 1)),
        (22, None, 1, True, (22, 1)),
        (22, 64, 2, True, (16, 2)),
        (22, 64, 1, False, (22, 1)),
        (0, 64, 1, True, (0, 1)),
    ],
)
def test_the_batch_and_its_passes(
    safe: int, target: int | None, ranks: int, accumulates: bool, found: tuple[int, int]
) -> None:
    assert choose(safe, target, ranks, accumulates=accumulates) == found


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_a_step_has_the_samples_in_as_few_passes_as_costs_little(
    safe: int, target: int, ranks: int, multiple: int
) -> None:
    sizes = Sizes(multiple)
    safe = sizes.at_most(safe)
    size, passes = choose(safe, target, ranks, sizes)
    assert size <= safe
    assert sizes.at_most(size) == size
    if not safe:
        return
    least = -(-target // (safe * ranks))
    assert size * passes * ranks >= target
    assert least <= passes <= -(-least * 4 // 3)
    assert (size - multiple) * passes * ranks < target
    if passes > least:
        assert size * passes * ranks == target


def test_sets_of_changes_come_by_price_and_an_optimizer_goes_with_no_adapter() -> None:
    offered = [KNOWN[key] for key in ("lora", "adamw-8bit", "checkpointing")]
    found = [tuple(one.key for one in chosen) for chosen in _sets(offered)]
    assert sorted(map(set, found), key=sorted) == sorted(
        ({"lora"}, {"adamw-8bit"}, {"checkpointing"}, {"lora", "checkpointing"}, {"adamw-8bit", "checkpointing"}),
        key=sorted,
    )
    assert found.index(("lora",)) > found.index(("adamw-8bit", "checkpointing")), "it trains every weight"


def test_each_change_that_may_be_allowed_is_said_by_some_framework() -> None:
    assert {*ALLOWED} <= {key for dialect in dialects().values() if dialect.form for key in dialect.says}


def test_the_options_of_a_script_come_before_its_frameworks_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"from accelerate import Accelerator\nAccelerator()\n{SWITCHES}")
    config = command_config("accelerate", "launch", "train.py", "--bs", "{batch}")
    command = replace(config.workload.command or Command((), ""), cwd=str(tmp_path))
    config = replace(config, workload=replace(config.workload, command=command))
    chosen = [KNOWN[key] for key in ("checkpointing", "adamw-8bit", "autocast")]
    typed = typed_command(config, chosen)
    assert (typed.injected, typed.written) == ((), ())
    assert typed.command.text == (
        "accelerate launch --mixed_precision bf16 train.py --bs {batch} --gradient_checkpointing --use_8bit_adam"
    )
    assert spoken(KNOWN["checkpointing"], config).how == "--gradient_checkpointing"
    assert typed_command(config, (KNOWN["lora"],)).injected == (KNOWN["lora"],), "it is no switch"
    again = replace(config, workload=replace(config.workload, command=typed.command))
    assert typed_command(again, chosen[:1]).injected == tuple(chosen[:1]), "the line has it already"
    passes = with_accumulation(command)
    assert passes is not None
    assert passes.text == "accelerate launch train.py --bs {batch} --accum {accumulation}"


def test_the_line_of_a_fit() -> None:
    config = command_config("train", "--bs", "{batch}", "--a", "{accumulation}", gpu="rtx-4090-24gb", ranks=2)
    config = replace(config, passes=3, target_batch=130)
    ran = TrialDone(22, "fit", 20 * GIB, 21 * GIB, 22 * GIB, None, "", 1.0, 3)
    found = Fitted(config, 22, 3, 22, (KNOWN["checkpointing"],), used=Range(22 * GIB, 22 * GIB), result=ran)
    assert found.words == (
        "batch 22 on each of 2 GPUs × 3 passes = 132 samples a step, 130 wanted; 22.00 of 23.64 GiB; "
        f"checkpointed blocks ({KNOWN['checkpointing'].how}); predicted for simulated NVIDIA GeForce RTX 4090"
    )
    assert found.line == "train --bs 22 --a 3"
    exactly = replace(found, batch_size=16, passes=6, safe=20, config=replace(config, target_batch=192))
    assert "× 6 passes = 192 samples a step, as wanted (20 would fit); " in exactly.words
    fewer = replace(found, config=replace(config, target_batch=132), changes=())
    assert fewer.words.startswith("batch 22 on each of 2 GPUs × 3 passes = 132 samples a step; 22.00 of 23.64 GiB; ")
    on_gpu = replace(config, device=replace(config.device, simulated=False, uuid="GPU-1", more_uuids=("GPU-2",)))
    assert replace(found, config=on_gpu).line == "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2 train --bs 22 --a 3"
