"""A running process as a plan."""

from __future__ import annotations

from msgspec.structs import replace

from gpumem_tui.catalog.loader import DEFAULT_GPU
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.running import plan_of
from gpumem_tui.watch.records import ProbeSample
from tests.monitor.snapshots import gpu
from tests.scenes.watch import EXPECTED, GPT2, on_cpu, record, watched


def test_its_model_on_its_gpu_with_the_batch_that_its_activations_hold() -> None:
    sample = ProbeSample(record())
    plan = plan_of(watched(4100, (record(), "")), sample, gpu())
    assert isinstance(plan, Plan)
    assert (plan.shape, plan.recipe) == (GPT2, EXPECTED.recipe)
    assert (plan.gpu.title, plan.gpu.total_bytes, plan.gpu.sm) == ("NVIDIA A100-SXM4-80GB", 80 * GIB, "sm_80")
    predicted = EXPECTED.at(plan.batch_size).peak_bytes
    assert abs(predicted - record().peak_allocated_bytes) < EXPECTED.at(1).activation_bytes_per_sample


def test_in_host_memory_it_is_planned_for_the_usual_gpu_and_one_sample() -> None:
    plan = plan_of(watched(4100, (on_cpu(), "")), ProbeSample(on_cpu()), None)
    assert isinstance(plan, Plan)
    assert (plan.gpu.name, plan.batch_size) == (DEFAULT_GPU, 1)


def test_what_is_not_known_has_no_plan() -> None:
    one = watched(4100, (record(), ""))
    assert plan_of(replace(one, expected=Unknown("no family")), None, gpu()) == Unknown("no family")
    blind = gpu(compute_capability=Unknown("not supported"))
    assert plan_of(one, None, blind) == Unknown("not supported")
