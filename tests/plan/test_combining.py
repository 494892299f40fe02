"""Changes that make a command fit together: which are likely, and how they are typed."""

from __future__ import annotations

import shlex
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB, Unknown
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.combining import MOST_RUNS, MOST_WHERE_IT_FITS, Planner, Planning, command_of, likely
from gpumem_tui.plan.command import CommandPlan, CommandRuns, techniques_of_command
from gpumem_tui.plan.dialects import half_length, sharded_line, typed_changes, typed_command
from gpumem_tui.plan.recommended import change_words
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Failed
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.frameworks import dialect_of
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Traced
from gpumem_tui.workload.command import Command
from tests.plan.commands import affine, base_predicted, base_trace, change, changed, command_config, ran
from tests.search.traces import traced


def _config(
    words: tuple[str, ...] = ("python", "train.py", "--batch-size", "16"), cwd: str = "/", ranks: int = 1
) -> SearchConfig:
    config = command_config(*words, gpu="rtx-4090-24gb", ranks=ranks)
    return replace(config, workload=replace(config.workload, command=Command(words, cwd)))


def _plan(batch_size: int, config: SearchConfig | None = None) -> CommandPlan:
    config = config or _config()
    what_ifs = (
        changed(config, "checkpointing", batch_size, activations=200),
        changed(config, "adafactor", batch_size, optimizer=0),
    )
    return CommandPlan(config, batch_size, base_predicted(config), what_ifs)


def test_the_cheapest_comes_first_and_each_holds_the_same_samples() -> None:
    found = likely(_plan(16))
    assert [one.price for one in found] == sorted(one.price for one in found)
    assert found[0].changes == (), "smaller passes alone: nothing is cheaper"
    assert all((one.passes - 1) * one.batch_size < 16 <= one.passes * one.batch_size for one in found)
    assert {"checkpointing"} in [{one.key for one in together.changes} for together in found]


def test_what_a_set_took_more_is_taken_to_be_missing_of_those_with_all_of_its_changes() -> None:
    config = _config()
    what_ifs = (changed(config, "checkpointing", 32, activations=900), changed(config, "autocast", 32, activations=900))
    plan = CommandPlan(config, 32, base_predicted(config), what_ifs)

    def keys(plan: CommandPlan) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(tuple(change.key for change in one.changes) for one in likely(plan)))

    _, first, second, both = keys(plan)
    (tried,) = (one.changes for one in what_ifs if (one.changes[0].key,) == first)
    more = ran(tried, 16, 2, base_trace(config), beside_bytes=20_000 * MIB)
    assert keys(replace(plan, tried=(*what_ifs, more))) == [(), second, first, both]


def test_changes_that_leave_out_the_same_bytes_do_not_leave_them_out_twice() -> None:
    """The optimizer's state of 40 GiB stays, however much each saves of the activations."""
    config = _config(("python", "train.py"))
    state = {"optimizer": 26_000}
    what_ifs = [
        changed(config, key, 16, activations=300, **state) for key in ("checkpointing", "compile", "chunked-loss")
    ]
    base = traced(affine(activations=1200, **state), config.device.gpu)
    predicted = replace(base_predicted(config), prediction=replace(base_predicted(config).prediction, traced=base))
    plan = CommandPlan(config, 16, predicted, tuple(what_ifs))
    assert not likely(plan)
    less = changed(config, "adafactor", 16, activations=1200, optimizer=1)
    assert likely(replace(plan, tried=(*what_ifs, less)))


def test_a_batch_that_nothing_says_stays() -> None:
    config = _config(("python", "train.py"))
    assert {one.batch_size for one in likely(_plan(16, config))} <= {16}


def test_what_fits_counts_the_gradients_of_earlier_passes() -> None:
    plan = _plan(16)
    largest = base_trace(plan.config).max_batch_size
    assert isinstance(largest, int)
    alone = ran((), largest, 2, base_trace(plan.config))
    assert plan.fits_with(alone)
    assert not plan.fits_with(replace(alone, beside_bytes=4096 * MIB))


def _estimated(found: Traced) -> Traced:
    return replace(found, done=replace(found.done, is_estimate=True))


def test_an_estimate_that_may_fit_asks_for_no_change() -> None:
    """No change makes it certain: neither is one called for, nor one said not to fit."""
    runs = _Runs(_config())
    estimate = _estimated(base_trace(runs.config))
    told = base_predicted(runs.config)
    plan = CommandPlan(runs.config, 4, replace(told, prediction=replace(told.prediction, traced=estimate)))
    *_, last = Planner(plan, runs, [Combination((change("sgd", runs.config),), 4)], Control(), clock=runs.clock).run()
    assert runs.made == ["sgd"]
    answer = last.plan.answer()
    assert answer.fit == "may fit"
    assert not change_words(last.plan, answer)
    by_formula = {row.fit for row in techniques_of_command(last.plan, answer).helping if row.by == "formula"}
    assert by_formula == {"may fit"}


def test_a_set_that_is_an_estimate_is_said_to_fit_perhaps() -> None:
    plan = _plan(16)
    told = plan.predicted
    traced = _estimated(base_trace(plan.config))
    alone = ran((), 8, 2, traced)
    estimated = replace(told, prediction=replace(told.prediction, traced=traced))
    plan = replace(plan, predicted=estimated, tried=(alone,))
    assert plan.answer().fit == "may not fit"
    assert change_words(plan, plan.answer()) == "To change: 2 passes of 8, traced: it may fit."


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
        ("grad_accum_steps = 5 * 8", "python train.py --batch-size 4", ("grad_accum_steps × 4",)),
        (
            'parser.add_argument("--grad-accum", type=int, help="passes (of a step)", default=2)',
            "python train.py --batch-size 4 --grad-accum 8",
            ("torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), or the library's own switch",),
        ),
        ('parser.add_argument("--grad-accum", default=PASSES)', "python train.py --batch-size 4", ("grad-accum × 4",)),
        ("", "python train.py --batch-size 4", ("4 passes before each optimizer step, the loss divided by 4",)),
    ],
)
def test_the_command_is_in_the_programs_own_words(
    tmp_path: Path, script: str, typed: str, written: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(script)
    config = _config(cwd=str(tmp_path))
    line, besides = command_of(_plan(16, config), Combination((change("checkpointing", config),), 4, 4))
    assert line == typed
    assert besides[-len(written) :] == written if written else not besides


# The order of the runs


@dataclass
class _Runs:
    """Runs that take a second each on a clock of their own; a set's run fails, or finds what the command takes."""

    config: SearchConfig
    batch_size: int = 16
    set_fails: bool = False
    fitting: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    made: list[str] = field(default_factory=list)

    def trace(self, *_: object) -> tuple[Predicted, list[Combination], list[Combination]]:
        raise AssertionError("the command as it is has been traced")

    def run(self, one: Combination, plan: CommandPlan, *_: object) -> Combination:
        if plan.is_alone(one):
            key = one.changes[0].key
            self.made.append(key)
            return changed(self.config, key, one.batch_size, activations=1 if key in self.fitting else 1000)
        self.made.append(one.words)
        return replace(one, traced=Unknown("its run failed") if self.set_fails else base_trace(self.config))

    def clock(self) -> float:
        return float(len(self.made))


def _planned(runs: _Runs, batch_size: int, *keys: str) -> list[Planning]:
    plan = CommandPlan(runs.config, batch_size, base_predicted(runs.config))
    changes = [Combination((change(key, runs.config),), batch_size) for key in keys]
    return list(Planner(plan, runs, changes, Control(), clock=runs.clock).run())


def test_smaller_passes_are_run_first_and_what_fits_asks_for_no_more_sets() -> None:
    runs = _Runs(_config())
    steps = _planned(runs, 16, "checkpointing", "sgd")
    assert runs.made == ["2 passes of 8", "checkpointing", "sgd"]
    fitting = steps[-1].plan.fitting
    assert fitting is not None
    assert fitting.batch_size == 8


def test_after_each_run_the_time_that_the_rest_takes_is_by_the_runs_so_far() -> None:
    runs = _Runs(_config())
    steps = _planned(runs, 16, "checkpointing", "sgd")
    assert [len(step.waiting) for step in steps if step.running is not None] == [2, 1, 0]
    assert [step.left_s for step in steps if step.ran is not None] == [2.0, 1.0, 0.0]


def test_the_headline_is_the_cheapest_of_all_that_fits() -> None:
    """Smaller passes cost nothing: no change that fits as well is named before them."""
    runs = _Runs(_config(), fitting=("checkpointing", "chunked-loss"))
    plan = _planned(runs, 16, "checkpointing", "chunked-loss")[-1].plan
    assert change_words(plan, plan.answer()) == "To change: 2 passes of 8, traced: it fits."
    alone = change_words(replace(plan, tried=plan.what_ifs), plan.answer())
    assert alone.startswith("To change: loss in 8 pieces (cross-entropy over 8 pieces"), (
        "no time, where checkpoints take it"
    )


def test_the_headline_has_the_line_of_the_pass_that_fits(tmp_path: Path) -> None:
    """Ranks that hold parts have a smaller batch each than the line that was run for them alone."""
    (tmp_path / "train.py").write_text("HfArgumentParser")
    config = _config(cwd=str(tmp_path))
    shards = change("sharded", config)
    shards = replace(shards, how="torchrun train.py --batch-size 16")
    tried = ran((shards,), 16, 1, traced(affine(activations=2000), config.device.gpu))
    plan = CommandPlan(config, 16, base_predicted(config), (tried, ran((shards,), 2, 1, base_trace(config))))
    assert change_words(plan, plan.answer()) == (
        "To change: sharded over 8 GPUs + batch 2 on each (torchrun --nproc-per-node 8 train.py --batch-size 2 "
        "--fsdp 'full_shard auto_wrap'), traced: it fits. The price of sharded over 8 GPUs: 8 GPUs, each "
        "with that batch; 1.5 times the communication of plain data parallel training."
    )


def test_a_set_that_is_cheaper_than_the_change_that_fits_is_run() -> None:
    runs = _Runs(_config(("python", "train.py")), fitting=("sgd",))
    _planned(runs, 14, "checkpointing", "sgd", "chunked-loss")
    assert runs.made[:3] == ["checkpointing", "sgd", "chunked-loss"]
    assert runs.made[3:] == ["checkpointed blocks + loss in 8 pieces"], "another optimizer is to be tuned anew"


def test_where_no_change_fits_alone_sets_are_run_until_one_does() -> None:
    runs = _Runs(_config(("python", "train.py")))
    _planned(runs, 30, "checkpointing", "chunked-loss")
    assert runs.made[:2] == ["checkpointing", "chunked-loss"]
    one = _Runs(_config(("python", "train.py")), fitting=("checkpointing",))
    _planned(one, 16, "checkpointing")
    assert one.made == ["checkpointing"], "it fits alone"


def test_changes_that_help_are_run_together_once_though_by_the_estimate_they_do_not_fit() -> None:
    runs = _Runs(_config(("python", "train.py")), fitting=())
    plan = _planned(runs, 400, "checkpointing", "chunked-loss")[-1].plan
    assert not likely(replace(plan, tried=plan.what_ifs))
    assert runs.made == ["checkpointing", "chunked-loss", "checkpointed blocks + loss in 8 pieces"]
    said = change_words(plan, plan.answer())
    assert "makes it fit; with checkpointed blocks + loss in 8 pieces together " in said
    assert " missing" in said


def test_a_set_whose_run_failed_is_not_part_of_another() -> None:
    runs = _Runs(_config(), set_fails=True, fitting=())
    steps = _planned(runs, 16, "checkpointing", "sgd")
    sets = [set(one.changes) for one in steps[-1].plan.together if one.changes]
    assert len(steps[-1].plan.together) <= 2 * MOST_RUNS
    assert not any(earlier <= later for number, earlier in enumerate(sets) for later in sets[number + 1 :])


def test_further_gpus_are_tried_only_where_nothing_fits_without_them_or_they_are_asked_for() -> None:
    """Sharding over more GPUs has the dearest price: it is run after the sets of all else."""
    fits = _Runs(_config())
    plan = _planned(fits, 16, "sharded", "sgd")[-1].plan
    assert fits.made == ["2 passes of 8", "sgd"]
    spared = next(one.traced for one in plan.what_ifs if one.changes[0].key == "sharded")
    assert isinstance(spared, Unknown)
    assert "--what-if sharded" in spared.reason
    asked = _Runs(_config(), wanted=("sharded", "sgd"))
    _planned(asked, 16, "sharded", "sgd")
    assert asked.made == ["2 passes of 8", "sharded", "sgd"]
    needed = _Runs(_config(("python", "train.py")), fitting=("sharded",))
    plan = _planned(needed, 14, "sharded", "sgd")[-1].plan
    assert needed.made == ["sgd", "sharded"]
    assert plan.fitting is not None
    assert plan.fitting.words == "sharded over 8 GPUs + batch 14 on each"


def test_the_same_samples_are_spread_over_the_gpus_that_share_the_model() -> None:
    config = _config()
    plan = CommandPlan(
        config, 16, base_predicted(config), (changed(config, "sharded", 16, activations=1200, optimizer=1),)
    )
    spread = [one for one in likely(plan) if one.gpus == 8]
    assert [(one.batch_size, one.passes) for one in spread] == [(2, 1), (1, 2)]
    assert spread[0].words == "sharded over 8 GPUs + batch 2 on each"


def test_what_takes_one_trace_goes_on_beside_the_run_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits here until another one has begun, so that they end only if two run at a time; their order stays."""
    monkeypatch.setattr("gpumem_tui.plan.combining.has_room_for_two", lambda: True)
    both = threading.Barrier(2, timeout=60)

    class Meeting(_Runs):
        def run(self, one: Combination, plan: CommandPlan, *_: object) -> Combination:
            both.wait()
            return super().run(one, plan)

    runs = Meeting(_config())
    predicted = base_predicted(runs.config)
    base = predicted.prediction.traced
    assert isinstance(base, Traced)
    one_size = replace(base, done=replace(base.done, only_at=1))
    predicted = replace(predicted, prediction=replace(predicted.prediction, traced=one_size))
    keys = ("checkpointing", "autocast", "adafactor", "chunked-loss")
    changes = [Combination((change(key, runs.config),), 1) for key in keys]
    *_, last = Planner(CommandPlan(runs.config, 1, predicted), runs, changes, Control()).run()
    assert [one.changes for one in last.plan.what_ifs] == [one.changes for one in changes]
    assert all(isinstance(one.traced, Traced) for one in last.plan.what_ifs)


def test_what_fits_as_it_is_has_no_sets() -> None:
    runs = _Runs(_config())
    _planned(runs, 1, "sgd")
    assert runs.made == ["sgd"]


def test_what_fits_runs_the_changes_that_mostly_save_most_and_those_that_are_asked_for() -> None:
    keys = ("checkpointing", "autocast", "adafactor", "sgd", "chunked-loss", "fused")
    worth, others = ["checkpointing", "autocast", "adafactor", "chunked-loss"], ["sgd", "fused"]
    fits = _Runs(_config())
    steps = _planned(fits, 1, *keys)
    plan = steps[-1].plan
    assert fits.made == worth
    assert [step.to_go for step in steps if step.running is not None] == [3, 2, 1, 0], "those that are spared aside"
    spared = {one.changes[0].key: one.traced for one in plan.what_ifs if isinstance(one.traced, Unknown)}
    assert spared == {key: Unknown(f"skipped, already fits; --what-if {key} runs it") for key in others}
    by_passes = _Runs(_config())
    _planned(by_passes, 16, *keys)
    assert by_passes.made == ["2 passes of 8", *worth]
    asked = _Runs(_config(), wanted=keys)
    _planned(asked, 1, *keys)
    assert tuple(asked.made) == keys


def test_what_was_spared_can_be_run_after_all() -> None:
    runs = _Runs(_config())
    plan = _planned(runs, 1, "checkpointing", "autocast", "adafactor", "chunked-loss", "sharded", "fused")[-1].plan
    assert [one.changes[0].key for one in plan.spared] == ["fused", "sharded"]
    runs.made.clear()
    rest = replace(plan, tried=tuple(one for one in plan.tried if not one.is_spared))
    *_, last = Planner(rest, runs, plan.spared, Control(), every=True).run()
    assert runs.made == ["fused", "sharded"]
    assert not last.plan.spared


def test_after_a_change_that_fits_only_cheaper_ones_are_run_beyond_the_first() -> None:
    """There are no smaller passes without a batch in its line."""
    keys = ("checkpointing", "autocast", "adafactor", "chunked-loss", "sgd", "fused", "no-foreach")
    runs = _Runs(_config(("python", "train.py")), fitting=("checkpointing",))
    _planned(runs, 14, *keys)
    prices = {key: change(key, runs.config).price for key in keys}
    cheaper = [key for key in keys[MOST_WHERE_IT_FITS:] if prices[key] < prices["checkpointing"]]
    assert 0 < len(cheaper) < len(keys) - MOST_WHERE_IT_FITS
    assert runs.made[: MOST_WHERE_IT_FITS + len(cheaper)] == [*keys[:MOST_WHERE_IT_FITS], *cheaper]


# Frameworks' own words


@pytest.mark.parametrize(
    ("words", "script", "line"),
    [
        (
            ("python", "sft.py", "--per_device_train_batch_size", "16", "--max_length", "2048"),
            "parser = TrlParser((SFTConfig, ModelConfig))",
            "python sft.py --per_device_train_batch_size 8 --max_length 1024 --gradient_checkpointing True "
            "--use_peft True --load_in_4bit True --gradient_accumulation_steps 2",
        ),
        (
            ("llamafactory-cli", "train", "sft.yaml", "per_device_train_batch_size=16", "cutoff_len=2048"),
            "",
            "llamafactory-cli train sft.yaml per_device_train_batch_size=8 cutoff_len=1024 "
            "disable_gradient_checkpointing=false finetuning_type=lora quantization_bit=4 "
            "gradient_accumulation_steps=2",
        ),
        (
            ("axolotl", "train", "x.yml", "--micro-batch-size=16", "--sequence-len=2048"),
            "",
            "axolotl train x.yml --micro-batch-size=8 --sequence-len=1024 --gradient-checkpointing=true "
            "--adapter=qlora --load-in-4bit --lora-r=16 --lora-alpha=16 --lora-target-linear "
            "--gradient-accumulation-steps=2",
        ),
    ],
)
def test_a_frameworks_line_says_every_change(tmp_path: Path, words: tuple[str, ...], script: str, line: str) -> None:
    (tmp_path / "sft.py").write_text(script)
    config = _config(words, str(tmp_path))
    typed = {one.key: one for one in typed_changes(config)}
    changes = (typed["half-length"], change("checkpointing", config), typed["qlora"])
    found, written = command_of(_plan(16, config), Combination(changes, 8, 2))
    assert found == line
    assert not written


@pytest.mark.parametrize(
    ("words", "script", "line", "written"),
    [
        (
            ("accelerate", "launch", "train.py", "--batch-size", "16"),
            "Accelerator()",
            "accelerate launch --gradient_accumulation_steps 2 --mixed_precision bf16 train.py --batch-size 8",
            (),
        ),
        (
            ("python", "train.py", "fit", "--data.batch_size", "16"),
            "cli = LightningCLI(Model)",
            "python train.py fit --data.batch_size 8 --trainer.precision bf16-mixed "
            "--trainer.accumulate_grad_batches 2",
            (),
        ),
        (
            ("python", "train.py", "--batch-size", "16"),
            "import lightning as L",
            "python train.py --batch-size 8",
            ("Trainer(precision='bf16-mixed')", "accumulate_grad_batches × 2"),
        ),
    ],
)
def test_launchers_and_lightning_are_told_in_their_words(
    tmp_path: Path, words: tuple[str, ...], script: str, line: str, written: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(script)
    config = _config(words, str(tmp_path))
    assert command_of(_plan(16, config), Combination((change("autocast", config),), 8, 2)) == (line, written)


@pytest.mark.parametrize(
    ("words", "script", "line"),
    [
        (
            "python -u -m train.py --batch-size 16",
            "HfArgumentParser",
            "torchrun --nproc-per-node 8 -m train.py --batch-size 2 --bf16 True --fsdp 'full_shard auto_wrap'",
        ),
        (
            "torchrun --nproc-per-node 4 train.py --batch-size 16",
            "HfArgumentParser",
            "torchrun --nproc-per-node 4 train.py --batch-size 2 --bf16 True --fsdp 'full_shard auto_wrap'",
        ),
        (
            "torchrun train.py --batch-size 16",
            "TrlParser",
            "torchrun --nproc-per-node 8 train.py --batch-size 2 --bf16 True --fsdp 'full_shard auto_wrap'",
        ),
        (
            "trl sft --batch-size 16",
            "",
            "trl sft --batch-size 2 --bf16 True --fsdp 'full_shard auto_wrap' --num_processes 8",
        ),
        (
            "/opt/ml/bin/python train.py --batch-size 16",
            "TrainingArguments(bf16=True)",
            "/opt/ml/bin/python -m accelerate.commands.launch --num_processes 8 --use_fsdp --fsdp_version 2 "
            "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP train.py --batch-size 2",
        ),
        (
            "accelerate launch train.py --batch-size 16",
            "Accelerator(",
            "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy "
            "TRANSFORMER_BASED_WRAP --mixed_precision bf16 train.py --batch-size 2",
        ),
        (
            "python train.py fit --data.batch_size 16",
            "LightningCLI",
            "python train.py fit --data.batch_size 2 --trainer.precision bf16-mixed --trainer.strategy fsdp "
            "--trainer.devices 8",
        ),
        (
            "llamafactory-cli train sft.yaml per_device_train_batch_size=16",
            "",
            "env FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train sft.yaml per_device_train_batch_size=2 "
            "bf16=true 'fsdp=[full_shard,auto_wrap]'",
        ),
        (
            "axolotl train x.yml --micro-batch-size=16",
            "",
            "axolotl train x.yml --micro-batch-size=2 --bf16=true --fsdp-version=2 "
            "--fsdp-config.auto-wrap-policy=TRANSFORMER_BASED_WRAP --launcher torchrun -- --nproc_per_node=8",
        ),
        (
            "python train.py --batch-size 16",
            "model(x).mean().backward()",
            "torchrun --nproc-per-node 8 train.py --batch-size 2",
        ),
        (
            "/opt/ml/bin/python train.py --batch_size=16 --gradient_accumulation_steps=4",
            "exec(open('configurator.py').read())",
            "/opt/ml/bin/python -m torch.distributed.run --nproc-per-node 8 train.py --batch_size=2 "
            "--gradient_accumulation_steps=32",
        ),
        ("python -c 'import train' --batch-size 16", "", "python -c 'import train' --batch-size 2"),
        ("python train.py --batch-size 16", "import lightning as L", "python train.py --batch-size 2"),
    ],
)
def test_ranks_that_hold_parts_are_started_in_the_frameworks_words(
    tmp_path: Path, words: str, script: str, line: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    config = _config(tuple(shlex.split(words)), str(tmp_path))
    changes = (change("sharded", config), change("autocast", config))
    found, written = command_of(_plan(16, config), Combination(changes, 2, 1))
    assert found == line
    assert config.workload.command is not None
    assert any("fully_shard" in one for one in written) == (sharded_line(config.workload.command, 8) is None)


def test_ranks_that_there_are_are_started_by_the_line_to_copy(tmp_path: Path) -> None:
    """The plan of a command that names no launcher, with --gpus."""
    (tmp_path / "train.py").write_text("HfArgumentParser")
    config = _config(("python", "train.py", "--batch-size", "16"), str(tmp_path), ranks=4)
    line, _ = command_of(_plan(16, config), Combination((change("autocast", config),), 8, 2))
    assert line.startswith("torchrun --nproc-per-node 4 train.py --batch-size 8 --bf16 True")


def test_passes_that_a_configuration_gives_are_multiplied(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("gradient_accumulation_steps: 8\n")
    config = _config(("llamafactory-cli", "train", "sft.yaml", "per_device_train_batch_size=16"), str(tmp_path))
    line, written = command_of(_plan(16, config), Combination((), 8, 2))
    assert line == "llamafactory-cli train sft.yaml per_device_train_batch_size=8 gradient_accumulation_steps=16"
    assert not written


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ((), "--gradient_accumulation_steps=80"),
        (("config.py",), "config.py --gradient_accumulation_steps=12"),
        (("--gradient_accumulation_steps=4",), "--gradient_accumulation_steps=8"),
        (("config.py", "--gradient_accumulation_steps=4"), "config.py --gradient_accumulation_steps=8"),
    ],
)
def test_nanogpts_own_passes_are_typed_as_many_times(tmp_path: Path, given: tuple[str, ...], typed: str) -> None:
    """Its defaults are names that it assigns to, which a file of the line and then the line itself assign anew."""
    (tmp_path / "train.py").write_text(
        "gradient_accumulation_steps = 5 * 8 # a comment\nexec(open('configurator.py').read())"
    )
    (tmp_path / "config.py").write_text("batch_size = 64\ngradient_accumulation_steps = 2 * 3\n")
    config = _config(("python", "train.py", "--batch_size=16", *given), str(tmp_path))
    line, written = command_of(_plan(16, config), Combination((), 8, 2))
    assert line == f"python train.py --batch_size=8 {typed}"
    assert not written


def test_only_a_line_that_gives_the_length_can_give_half_of_it() -> None:
    assert half_length(Command(("python", "train.py", "--block_size=1024"), "/")) == 512
    assert half_length(Command(("python", "train.py", "--seq-len", "128"), "/")) is None
    assert half_length(Command(("python", "train.py"), "/")) is None


def test_an_old_gpu_has_no_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("HfArgumentParser")
    config = replace(command_config(gpu="t4-16gb"))
    config = replace(config, workload=replace(config.workload, command=Command(("python", "train.py"), str(tmp_path))))
    assert dialect_of(Command(("python", "train.py"), str(tmp_path))).title == "transformers' Trainer"
    assert typed_command(config, (change("autocast", config),)).command.words[-2:] == ("--fp16", "True")
    axolotl = replace(config.workload, command=Command(("axolotl", "train", "a.yaml"), str(tmp_path)))
    config = replace(config, workload=axolotl)
    assert typed_command(config, (change("autocast", config),)).command.words[-1] == "--fp16", "which takes no value"


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_change_that_the_line_can_say_is_run_as_typed_and_from_outside_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """A fused loss takes far less than the same loss in pieces: sets are chosen by what each would really save."""
    (tmp_path / "train.py").write_text("HfArgumentParser")
    config = _config(("python", "train.py", "--batch-size", "{batch}"), str(tmp_path))
    made: list[tuple[str, str]] = []

    def predict(asked: SearchConfig, *_: object) -> Predicted:
        command = asked.workload.command
        assert command is not None
        made.append((asked.change, " ".join(command.words[4:])))
        if not (is_installed or asked.change):
            raise Unusable(Failed("workload", "train.py: ImportError: no liger_kernel"))
        return base_predicted(asked)

    monkeypatch.setattr("gpumem_tui.plan.command.predicting.predict", predict)
    runs = CommandRuns(config, 16)
    plan = CommandPlan(config, 16, base_predicted(config))
    found = runs.run(Combination((change("chunked-loss", config),), 16), plan, None, lambda _: None)
    typed, outside = ("", "--use_liger_kernel True"), ("chunked-loss", "")
    assert made == ([typed] if is_installed else [typed, outside])
    assert not isinstance(found.traced, Unknown)
