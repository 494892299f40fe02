"""A plan for a command answers from its traces: every GPU, every batch size, every change, without running again."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, gpus
from gpumem_tui.memory import GIB, MIB, Bucket, Range, Unknown
from gpumem_tui.plan.combination import Combination, Techniques
from gpumem_tui.plan.command import (
    SHARDING_NOT_RUN,
    CommandPlan,
    batch_note,
    on_every_gpu,
    ranks_line,
    techniques_of_command,
)
from gpumem_tui.plan.report import command_plan_markdown
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.simulator.allocator.profile import CUBLAS_WORKSPACE, profile_for
from gpumem_tui.simulator.allocator.replay import AffineTrace, replay
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from gpumem_tui.step import Phase, Site
from tests.plan.commands import affine, base_predicted, change, changed, command_config
from tests.plan.printing import command_plan_json


def _plan(*what_ifs: Combination, batch_size: int = 8, gpu: str = "a100-80gb") -> CommandPlan:
    config = command_config(gpu=gpu)
    return CommandPlan(config, batch_size, base_predicted(config), what_ifs)


def _judged(plan: CommandPlan) -> Techniques:
    return techniques_of_command(plan, plan.answer())


def _with(plan: CommandPlan, **values: object) -> CommandPlan:
    traced = replace(plan.base, done=replace(plan.base.done, **values), _runs={})  # type: ignore[arg-type]
    return replace(
        plan, predicted=replace(plan.predicted, prediction=Prediction(plan.predicted.prediction.formula, traced))
    )


def test_every_gpu_of_the_catalog_is_answered_by_replay() -> None:
    plan = _plan()
    rows = on_every_gpu(plan)
    assert {there.gpu.name for there, _ in rows} == set(gpus())
    for there, row in rows:
        capacity = there.gpu.cuda_total_range - profile_for("2.13.0", there.gpu).context_range
        if there.gpu == plan.config.device.gpu:  # the scene's trace gives nothing of ranges
            capacity = Range(plan.base.capacity_bytes, plan.base.capacity_bytes)
        fits = row.fit == "fits", row.fit != "does not fit"
        largest = row.full_batch_size, row.may_fit_batch_size
        for capacity_bytes, is_fit, most in zip((capacity.low_bytes, capacity.high_bytes), fits, largest, strict=True):
            assert is_fit == replay(affine().at(8), capacity_bytes).fits
            assert isinstance(most, int)
            assert (most >= 8) == is_fit
            if most:
                assert replay(affine().at(most), capacity_bytes).fits
            assert not replay(affine().at(most + 1), capacity_bytes).fits


def test_the_report_lists_the_few_gpus_that_matter_and_names_where_the_others_are() -> None:
    plan = _plan(batch_size=40)
    _, _, listed = command_plan_markdown(plan).partition("## GPUs\n")
    rows = re.findall(r"^\| (?!GPU|---)(.+?) \| ([\d.]+) GiB \| (\w+)", listed, re.M)
    every = on_every_gpu(plan)
    fitting = [there.gpu for there, found in every if found.fit == "fits"]
    assert plan.gpu.title in (titles := [title for title, _, _ in rows])
    assert titles[0] == fitting[0].title
    assert len(rows) <= 6 < len(every)
    assert [float(size) for _, size, _ in rows] == sorted({float(size) for _, size, _ in rows})
    assert all(fits == "yes" for title, _, fits in rows if title != plan.gpu.title)
    assert f"{len(every) - len(rows)} more GPUs: `gpumem-tui plan --json --batch-size 40 " in listed


def test_the_report_has_its_cautions_in_one_line() -> None:
    text = command_plan_markdown(_plan())
    assert re.search(
        r"^- \d more lines? \(.*CUDA context.*\): `gpumem-tui predict --explain --batch-size 8", text, re.M
    )
    assert "measured on" not in text


def test_changes_that_were_skipped_for_one_reason_are_one_line() -> None:
    config = command_config()
    skipped = [
        Combination((change(key, config),), 8, traced=Unknown(f"skipped, already fits; --what-if {key} runs it"))
        for key in ("sgd", "adafactor")
    ]
    text = command_plan_markdown(_plan(*skipped))
    assert "- Skipped, already fits: SGD, Adafactor; `--what-if sgd` runs one, `--what-if all` every one\n" in text


def test_only_gpus_of_the_same_kind_are_called_exact() -> None:
    exact = {there.gpu.name for there, _ in on_every_gpu(_plan()) if there.is_exact}
    assert {"a100-80gb", "a100-40gb"} <= exact
    assert not exact & {"h100-80gb", "t4-16gb", "a30-24gb"}


def test_another_gpus_cublas_workspace_takes_the_place_of_the_traced_one() -> None:
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    h100 = find_gpu("h100-80gb")
    workspace = profile_for("2.13.0", h100).cublas_workspace_bytes
    recorder.allocate(10 * MIB, site=Site(), bucket=Bucket.PARAMETERS)
    recorder.allocate(workspace, site=Site(CUBLAS_WORKSPACE), bucket=Bucket.TEMPORARY)
    trace = AffineTrace.constant(recorder.finish())
    plan = _with(_plan(batch_size=1, gpu="h100-80gb"), trace=trace, only_at=1, not_affine="one run")
    a100 = find_gpu("a100-80gb")
    expected = 10 * MIB + profile_for("2.13.0", a100).cublas_workspace_bytes
    assert plan.answer().traced.at(1).peak_allocated_bytes == 10 * MIB + workspace
    assert replace(plan, elsewhere=a100).answer().traced.at(1).peak_allocated_bytes == expected


def test_batch_sizes_go_up_to_the_first_that_does_not_fit() -> None:
    answers = _plan(batch_size=12).answer()
    rows = {row.plan.batch_size: row for row in answers.batches()}
    assert {1, 2, 4, 8, 12, 16, 32} <= rows.keys()
    assert isinstance(answers.full_batch_size, int)
    assert [size for size, row in rows.items() if row.fit != "fits"] == [answers.full_batch_size + 1]
    assert rows[12].peak_allocated_bytes == replay(affine().at(12)).peak_allocated_bytes


def test_changes_are_ordered_by_what_they_make_fit_then_by_what_they_save() -> None:
    config = command_config()
    plan = _plan(changed(config, "sgd", 8, optimizer=1), changed(config, "checkpointing", 8, activations=300))
    traced = [row for row in _judged(plan).helping if row.by == "traced"]
    assert [row.change.key for row in traced] == ["checkpointing", "sgd"]
    assert traced[1].saved_bytes == 949 * MIB
    assert traced[0].largest == _with(plan, trace=affine(activations=300)).answer().full_batch_size


def test_a_change_is_judged_on_the_chosen_gpu() -> None:
    config = command_config()
    plan = _plan(changed(config, "checkpointing", 8, activations=300))
    plan = replace(plan, elsewhere=find_gpu("rtx-4070-12gb"))
    small = plan.answer()
    row = next(row for row in _judged(plan).helping if row.by == "traced")
    assert small.fit != "fits"
    assert row.fits
    assert small.spare_bytes < 0


def test_state_that_leaves_the_gpu_is_worked_out_by_phase() -> None:
    rows = {row.change.key: row for row in _judged(_plan()).helping}
    assert rows["offload-optimizer"].by == "formula"
    assert rows["offload-optimizer"].saved_bytes == 950 * MIB
    assert rows["zero1"].saved_bytes == 950 * MIB - 950 * MIB // 8
    assert rows["zero3"].saved_bytes == 7 * (950 + 475 + 475) * MIB // 8


def test_one_that_cannot_be_made_says_why() -> None:
    config = command_config()
    plan = _plan(Combination((change("autocast", config),), 8, traced=Unknown("the command uses autocast already")))
    assert [(row.key, row.reason) for row in _judged(plan).not_applicable] == [
        ("autocast", "the command uses autocast already")
    ]
    assert "autocast bfloat16: the command uses autocast already" in command_plan_markdown(plan)


def test_one_run_knows_one_batch_size_and_says_how_to_know_more() -> None:
    config = command_config("python", "train.py", "--batch-size", "8")
    plan = _with(CommandPlan(config, 8, base_predicted(config)), only_at=8, not_affine="no {batch}")
    body = command_plan_json(plan)
    assert [row["batch_size"] for row in body["batch_sizes"]] == [8]
    assert all(row["max_batch_size"] is None for row in body["gpus"])
    line = "`gpumem-tui plan --batch-size 8 -- python train.py --batch-size {batch}`"
    assert batch_note(plan) == f"other batch sizes: {line}"


def test_a_batch_size_that_the_line_does_not_say_is_not_made_up() -> None:
    config = command_config("python", "train.py")
    plan = _with(CommandPlan(config, 1, base_predicted(config)), only_at=1, not_affine="no {batch}")
    assert command_plan_json(plan)["accumulation"] is None
    assert "The command's own batch fits on NVIDIA A100 80 GB" in command_plan_markdown(plan)
    assert "| its own |" in command_plan_markdown(plan)


@pytest.mark.parametrize(("ranks", "over", "further"), [(1, 8, 7), (4, 4, 0)])
def test_sharding_is_over_the_gpus_there_are_and_said_not_to_be_run(ranks: int, over: int, further: int) -> None:
    config = command_config(ranks=ranks)
    plan = CommandPlan(config, 8, base_predicted(config))
    rows = {row.change.key: row for row in _judged(plan).helping}
    assert rows["zero3"].change.name == f"ZeRO-3 over {over} GPUs"
    assert (rows["zero3"].by, rows["zero3"].change.price.gpus) == ("formula", further)
    assert f"- {SHARDING_NOT_RUN}" in command_plan_markdown(plan)


@pytest.mark.parametrize(
    ("ranks", "sharded", "said"),
    [
        (1, False, "DistributedDataParallel"),
        (4, False, "each rank holds this much"),
        (4, True, "another run (--gpus)"),
    ],
)
def test_what_is_known_of_ranks(ranks: int, sharded: bool, said: str) -> None:
    config = command_config(ranks=ranks)
    plan = _with(CommandPlan(config, 8, base_predicted(config)), is_sharded=sharded)
    assert said in ranks_line(plan)


def test_the_json_is_that_of_a_prediction_with_more() -> None:
    body = command_plan_json(_plan())
    assert body["traced"]["peak_allocated_bytes"] > 10 * GIB
    assert body["accumulation"] == {"steps": 1, "global_batch_size": 8, "target_batch": 8}
    a100 = next(row for row in body["gpus"] if row["name"] == "a100-80gb")
    assert a100["max_batch_size"] == body["traced"]["max_batch_size"]
    assert a100["exact"]
    assert isinstance(_plan().base, Traced)
