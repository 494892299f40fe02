"""A step next to an inference engine in the same GPU."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from math import ceil

import pytest

from gpumem_tui.catalog.loader import find_gpu, is_named
from gpumem_tui.catalog.shapes import InferenceEngine
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, MIB, Bucket, Unknown
from gpumem_tui.options.configuration import asked_by, configure, options_of
from gpumem_tui.plan.answers import largest_by_gpu
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.printed import PlanObject
from gpumem_tui.report.objects import encoded
from gpumem_tui.run.events import TraceRequest, decode_request, encode
from gpumem_tui.search.beside import as_beside, beside, context_bytes, largest_share, share_line
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.prediction import Formula, Prediction
from gpumem_tui.search.printed import PredictObject
from gpumem_tui.search.report import prediction_lines
from gpumem_tui.search.words import ENGINE
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.workload.spec import WorkloadSpec
from tests.plan.plans import GPT2
from tests.search.traces import NO_SETTING, traced, training

A100 = find_gpu("a100-80gb")


NONE = Unknown("no torch")


def timeline(batch_size: int) -> Timeline:
    return training({Bucket.PARAMETERS: 512 * MIB, Bucket.ACTIVATIONS: 1200 * MIB * batch_size}, layers=12)


TRACED = replace(traced(AffineTrace.fit((2, timeline(2)), (3, timeline(3))), A100), settings=NO_SETTING)


def test_a_share_is_of_what_cuda_reports_and_has_a_context_of_its_own() -> None:
    found = beside(A100, "0.45")
    assert found.engine_bytes == ceil(0.45 * A100.cuda_total_bytes) + context_bytes(A100)
    assert found.cuda_total_bytes == A100.cuda_total_bytes - found.engine_bytes
    assert found.reserve_bytes == A100.reserve_bytes
    assert beside(A100, "30GiB").engine_bytes == 30 * GIB
    assert beside(A100, "0").cuda_total_bytes == A100.cuda_total_bytes
    for one in (found, beside(A100, "30GiB"), beside(A100, "0")):
        assert one.whole == A100
        assert is_named(one)
        assert one.engine is not None
        assert beside(A100, one.engine.typed) == one


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("all", "not a size such as 20GiB or 512MiB; write a share of the GPU below 1, such as 0.45"),
        ("1.5", "write the unit, as in 1.5GiB"),
        ("90GiB", "takes 90.00 GiB and the GPU has 79.15 GiB; give less"),
        ("0.999", "give less"),
    ],
)
def test_what_is_no_share_or_more_than_there_is_gets_one_line(typed: str, said: str) -> None:
    with pytest.raises(OptionError, match=said.replace(".", r"\.")):
        beside(A100, typed)


@pytest.mark.parametrize("batch_size", [4, 20, 40, 60])
def test_the_largest_share_fits_and_a_hundredth_more_does_not(batch_size: int) -> None:
    share = largest_share(TRACED, batch_size)
    assert isinstance(share, float)
    assert TRACED.on(beside(A100, f"{share:g}")).fit(batch_size) == "fits"
    assert TRACED.on(beside(A100, f"{share + 0.01:g}")).fit(batch_size) != "fits"
    for typed in ("0.1", "0.7", "20GiB"):
        assert largest_share(TRACED.on(beside(A100, typed)), batch_size) == share


def test_a_step_that_needs_the_whole_gpu_leaves_no_share() -> None:
    assert isinstance(largest_share(TRACED, 68), Unknown)
    assert share_line(TRACED.on(beside(A100, "0.1")), 68).startswith("no share is left for vLLM: the step alone needs")
    assert share_line(TRACED, 8) == ""


def test_a_prediction_says_so_in_its_first_lines_its_ledger_and_its_json() -> None:
    gpu = beside(A100, "0.45")
    config = SearchConfig(WorkloadSpec(GPT2.recipe, shape=GPT2.shape), Device(gpu, simulated=True))
    prediction = Prediction(Formula(config.workload, gpu.total_bytes, 0.1), TRACED.on(gpu))
    answer, share, *lines = prediction_lines(config, prediction, TRACED.ready, 40, None, explain=False)
    assert answer.startswith("Batch 40 does not fit on NVIDIA A100 80 GB next to an inference engine of 36.")
    found = largest_share(TRACED, 40)
    assert share == f"vLLM gets at most gpu_memory_utilization={found:g}"
    row = next(line for line in lines if line.startswith(ENGINE))
    assert row.split()[3:5] == row.split()[5:7] == [f"{gpu.engine_bytes / GIB:.2f}", "GiB"]
    printed = json.loads(encoded(PredictObject.of(config, prediction, 40)))
    assert printed["device"]["beside"] == {"size_bytes": gpu.engine_bytes, "share": 0.45}
    assert printed["device"]["total_bytes"] == A100.total_bytes
    assert printed["device"]["name"] == A100.title
    assert printed["traced"]["largest_share"] == found


def test_other_gpus_of_a_plan_have_the_engine_in_them_too() -> None:
    plan = replace(GPT2, gpu=beside(A100, "0.45"))
    rows = {row.gpu.name: row for row in largest_by_gpu(plan, None)}
    t4 = find_gpu("t4-16gb")
    assert rows["t4-16gb"].gpu == as_beside(t4, plan.gpu)
    assert rows["t4-16gb"].gpu.cuda_total_bytes < 0.55 * t4.cuda_total_bytes
    small = as_beside(t4, beside(A100, "30GiB"))
    assert 0 < small.cuda_total_range.low_bytes < 2 * MIB
    printed = json.loads(encoded(PlanObject.of(plan, NONE)))
    printed = json.loads(encoded(PlanObject.of(plan, NONE)))
    assert all(row["title"] == find_gpu(row["name"]).title for row in printed["gpus"])


def test_a_plan_is_opened_again_with_its_engine() -> None:
    for typed in ("0.45", "30GiB"):
        plan = replace(GPT2, gpu=beside(A100, typed))
        line = command_line(plan)
        assert isinstance(line, str)
        words = shlex.split(line)
        assert words[words.index("--beside") + 1] == typed
        assert configure(options_of(plan)).device.gpu == plan.gpu


def test_a_process_that_traces_is_told_of_the_engine() -> None:
    request = TraceRequest(WorkloadSpec(GPT2.recipe, shape=GPT2.shape), beside(A100, "0.45"), 3, 8)
    assert decode_request(encode(request)).gpu == request.gpu


def test_a_real_gpu_is_searched_within_what_the_engine_will_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumem_tui.monitor.devices import RealGpu
    from gpumem_tui.options import configuration

    real = RealGpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 * GIB, GIB, 0, (9, 0), ())
    monkeypatch.setattr(configuration, "list_gpus", lambda: (real,))
    config = configure(asked_by({"gpu": "0", "beside": "0.4", "model": "gpt2"}))
    assert config.limit_bytes is not None
    engine = config.device.gpu.engine
    assert engine == InferenceEngine(config.device.gpu.engine_bytes, 0.4)
    assert config.limit_bytes == 79 * GIB - config.device.gpu.engine_bytes - GIB
