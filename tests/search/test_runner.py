"""Whole searches on simulated GPUs: what they prove, how they end, and what they say when they cannot."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Unknown
from gpumem_tui.run import control
from gpumem_tui.run.control import Control, SideBySide, Unusable
from gpumem_tui.run.events import Failed, Ready, TrialDone
from gpumem_tui.run.interpreters import close_idle
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import Predicted, predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.runner import SearchEvent, TrialFinished, TrialProgress, search
from gpumem_tui.search.strategy import Name
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.workload.spec import WorkloadSpec
from tests.search.trials import config, workload
from tests.waiting import wait_until, wait_until_gone

MLP = WorkloadSpec(Recipe(), shape=find_model("mlp").overridden(hidden=64))


def verdict_of(events: list[SearchEvent]) -> Verdict:
    assert isinstance(events[-1], Verdict)
    return events[-1]


def finished(events: list[SearchEvent]) -> list[TrialFinished]:
    return [event for event in events if isinstance(event, TrialFinished)]


# A search that finds


@pytest.mark.parametrize("gpu", ["rtx-3090-24gb", "a100-80gb"])
def test_a_guided_search_proves_what_was_traced_in_two_trials(gpu: str) -> None:
    events = list(search(SearchConfig(MLP, Device(find_gpu(gpu), simulated=True))))
    verdict = verdict_of(events)
    assert verdict.outcome == "found"
    assert verdict.verified
    assert (verdict.trials, verdict.ooms, verdict.exit_code) == (2, 1, 0)
    assert verdict.first_failing == verdict.max_batch_size + 1
    assert "simulated" in verdict.message
    fit, oom = (trial.result for trial in finished(events))
    assert (fit.batch_size, fit.outcome) == (verdict.max_batch_size, "fit")
    assert (oom.batch_size, oom.outcome) == (verdict.first_failing, "oom")
    assert "out of memory" in oom.detail
    assert "\n" not in oom.detail
    check_the_trace_predicted(fit, events[0], find_gpu(gpu))
    for number in (1, 2):
        check_the_story_of(number, events)


def check_the_trace_predicted(fit: TrialDone, first: SearchEvent, gpu: Gpu) -> None:
    """The traced peak is the trial's peak, and one sample more goes beyond the device."""
    assert isinstance(first, Predicted)
    traced = first.prediction.traced
    assert isinstance(traced, Traced)
    at_largest = traced.at(fit.batch_size)
    assert traced.expected_batch_size == fit.batch_size
    assert traced.max_batch_size <= fit.batch_size <= traced.may_fit_batch_size  # type: ignore[operator]
    assert traced.max_batch_size != traced.may_fit_batch_size
    assert at_largest.peak_allocated_bytes == fit.peak_allocated_bytes
    assert at_largest.breakdown == fit.breakdown
    assert fit.device_used_bytes == fit.peak_reserved_bytes + traced.ready.context_bytes
    assert fit.device_used_bytes <= gpu.cuda_total_bytes
    limited = replay(traced.trace.at(fit.batch_size), traced.capacity_bytes)
    assert limited.peak_reserved_bytes == fit.peak_reserved_bytes
    assert not replay(traced.trace.at(fit.batch_size + 1), traced.capacity_bytes).fits


def check_the_story_of(number: int, events: list[SearchEvent]) -> None:
    """A trial starts, goes through its phases and finishes, its buckets summing to its peak."""
    first, *told, last = [e for e in events if isinstance(e, TrialProgress | TrialFinished) and e.number == number]
    assert isinstance(last, TrialFinished)
    assert first == TrialProgress(number, last.result.batch_size)
    assert next(e.sample.phase for e in told if isinstance(e, TrialProgress) and e.sample is not None) == "batch"
    assert last.result.breakdown is not None
    assert last.result.breakdown.total_bytes == last.result.peak_allocated_bytes


def test_a_limit_is_searched_under() -> None:
    limited = replace(config(MLP), limit_bytes=4 * 2**30)
    events = list(search(limited))
    assert verdict_of(events).verified
    fit, _ = (trial.result for trial in finished(events))
    assert 3.9 * 2**30 < fit.peak_reserved_bytes <= 4 * 2**30


# A search that finds nothing


def test_nothing_fits_where_one_sample_is_too_much(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            return torch.randn(batch_size, 2**32, 8, device=device)
        """,
    )
    events = list(search(config(spec)))
    verdict = verdict_of(events)
    assert verdict.outcome == "nothing_fits"
    assert (verdict.max_batch_size, verdict.exit_code, verdict.verified) == (0, 3, False)
    assert [trial.result.batch_size for trial in finished(events)] == [1]


def test_a_step_that_ignores_the_batch_size_is_told_after_one_trial(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            return torch.randn(4, 8, device=device)
        """,
    )
    events = list(search(config(spec)))
    verdict = verdict_of(events)
    assert verdict.outcome == "failed"
    assert "is batch_size used?" in verdict.message
    assert verdict.trials == 1
    assert verdict.exit_code == 4


def test_a_data_set_smaller_than_the_batch_ends_the_search(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            return torch.randn(min(batch_size, 50), 1024, 8, device=device)
        """,
    )
    events = list(search(config(spec)))
    verdict = verdict_of(events)
    assert (verdict.outcome, verdict.verified, verdict.first_failing) == ("found", False, None)
    assert verdict.trials <= 4
    assert re.search(
        r"; batches above (5\d|60) take no more memory, as if the data had no more samples;", verdict.message
    )
    assert verdict.exit_code == 5


def test_a_step_that_keeps_its_activations_is_not_verified(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        losses = []

        def train_step(model, optimizer, batch):
            loss = model(batch).pow(2).sum()
            losses.append(loss)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    verdict = verdict_of(list(search(replace(config(spec), limit_bytes=256 * MIB))))
    assert (verdict.outcome, verdict.verified) == ("found", False)
    assert re.search(
        r"memory grows by [\d.]+ MiB a step: `\w+` \(workload\.py:\d+\) keeps what workload\.py:\d+", verdict.message
    )


def test_a_process_that_dies_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "has_room_for_two", lambda: False)  # what fails next to another is done again unsaid
    spec = workload(
        tmp_path,
        f"""
        def make_batch(batch_size, device):
            if batch_size > 5 and not os.path.exists("{tmp_path}/died"):
                open("{tmp_path}/died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.randn(batch_size, 1024, 8, device=device)
        """,
    )
    events = list(search(config(spec)))
    outcomes = [trial.result.outcome for trial in finished(events)]
    assert outcomes == ["error", "fit", "oom"]
    first, second, _ = (trial.result for trial in finished(events))
    assert first.batch_size == second.batch_size
    assert first.detail.startswith("killed by signal 9")
    assert first.breakdown is None
    assert first.buckets_unknown
    assert verdict_of(events).verified


# Impossible searches


@pytest.mark.parametrize(
    "fault",
    [
        "def build(device): raise ValueError('no\\nweights')",
        "def make_batch(batch_size, device): raise ValueError('no\\nweights')",
        "def train_step(model, optimizer, batch): raise ValueError('no\\nweights')",
    ],
    ids=["build", "make_batch", "train_step"],
)
def test_an_exception_in_the_users_code_is_one_line_with_its_place(tmp_path: Path, fault: str) -> None:
    spec = workload(tmp_path, fault)
    with pytest.raises(Unusable, match=r"workload\.py:\d+: ValueError: no weights") as caught:
        predict(config(spec))
    assert caught.value.kind == "workload"
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_step_that_cannot_be_traced_leaves_the_formula(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            samples = torch.randn(batch_size, 1 << 20, device=device)  # too many for their values to be kept
            return samples.repeat_interleave(samples[:, 0].long(), dim=0)
        """,
    )
    prediction = predict(config(spec)).prediction
    assert isinstance(prediction.traced, Unknown)
    assert prediction.traced.reason.startswith("aten.repeat_interleave")
    assert "workload.py:" in prediction.traced.reason
    assert prediction.best_max_batch_size is None


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


SQUARED = """
def make_batch(batch_size, device):
    return torch.ones(batch_size * batch_size, 1024, 8, device=device)
"""


def test_where_memory_is_not_affine_the_size_asked_for_is_traced_alone(tmp_path: Path) -> None:
    searched = config(workload(tmp_path, SQUARED))
    found, spared = (predict(searched, None, 7, known).prediction.traced for known in ("", "as was found out before"))
    assert isinstance(found, Traced)
    assert isinstance(spared, Traced)
    assert found.done.only_at == spared.done.only_at == 7
    assert "is not what smaller ones predict" in found.done.not_affine
    assert spared.max_batch_size == Unknown("as was found out before")
    assert found.at(7).breakdown == spared.at(7).breakdown


ALONE = """
def make_batch(batch_size, device):
    return torch.ones(batch_size + 63 * (batch_size == 1), 1024, 8, device=device)
"""


def test_a_batch_of_one_is_traced_and_not_extrapolated(tmp_path: Path) -> None:
    searched = config(workload(tmp_path, ALONE))
    one, four = (predict(searched, None, size).prediction.traced for size in (1, 4))
    assert isinstance(one, Traced)
    assert isinstance(four, Traced)
    assert one.max_batch_size == four.max_batch_size
    assert one.at(1).peak_allocated_bytes > four.at(4).peak_allocated_bytes


IN_PARTS = """
def make_batch(batch_size, device):
    return torch.ones(batch_size, 1 << 20, 8, device=device)


def train_step(net, optimizer, batch):
    for {parts}:
        net(part).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "parts",
    [
        "part in batch.split(16)",
        "part in (batch[start : start + 16] for start in range(0, len(batch), 16))",
    ],
)
def test_a_step_in_parts_is_told_and_tried_near_where_it_stops_to_fit(parts: str, tmp_path: Path) -> None:
    searched = config(workload(tmp_path, IN_PARTS.format(parts=parts)))
    predicted = predict(searched)
    assert isinstance(predicted.prediction.traced, Unknown)
    assert predicted.prediction.traced.reason.startswith("the step works on 16 samples at a time")
    capacity = searched.device.gpu.cuda_total_bytes - predicted.ready.context_bytes
    largest = (capacity - 16 * 2 * (32 * MIB)) // (32 * MIB)  # a sample has 32 MiB, and so has what is made of it
    assert predicted.guess == pytest.approx(largest, abs=17)
    at_40 = predict(searched, batch_size=40).prediction.traced
    assert isinstance(at_40, Traced)
    assert at_40.done.only_at == 40


OTHERWISE_WHERE_SMALL = """
def make_batch(batch_size, device):
    rows = batch_size * batch_size if batch_size < 8 else 64 * batch_size
    return torch.ones(rows, 1024, 8, device=device)
"""


def test_what_only_large_batches_have_in_common_is_found_by_traces_of_these(tmp_path: Path) -> None:
    """Small ones grow by a tenth of what large ones do: trials alone would have to come from far above."""
    events = list(search(config(workload(tmp_path, OTHERWISE_WHERE_SMALL))))
    (predicted,) = (event for event in events if isinstance(event, Predicted))
    largest = verdict_of(events).max_batch_size
    assert predicted.guess is not None
    assert predicted.guess > 5 * largest > 0
    assert [trial.result.batch_size for trial in finished(events)] == [largest, largest + 1]


def test_a_step_that_asks_for_no_more_than_it_has_is_not_traced_again(tmp_path: Path) -> None:
    whole = predict(config(workload(tmp_path, IN_PARTS.format(parts="part in (batch[:len(batch)],)"))))
    assert isinstance(whole.prediction.best_max_batch_size, int)


def test_an_interpreter_without_torch_is_named(bare_python: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot import torch") as caught:
        next(search(config(MLP, python=bare_python)))
    assert caught.value.kind == "torch"
    assert caught.value.exit_code == 2
    assert bare_python in str(caught.value)
    assert "--python" in str(caught.value)


def test_a_torch_too_old_to_simulate_trains_on_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Ready("2.5.1", "torch 2.5 sm_80", 0, "")
    told = [ready, Failed("torch", "torch 2.5.1 is too old to simulate a GPU: 2.6 or newer is needed")]
    monkeypatch.setattr(SideBySide, "converse", lambda *_: iter(told))
    with pytest.raises(Unusable, match="too old to simulate a GPU"):
        predict(config(MLP))
    real = replace(config(MLP), device=replace(config(MLP).device, simulated=False))
    traced = predict(real).prediction.traced
    assert isinstance(traced, Unknown)
    assert "2.6 or newer is needed" in traced.reason


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    with pytest.raises(Unusable, match="No such file or directory") as caught:
        predict(config(MLP, python=missing))
    assert caught.value.kind == "python"
    assert str(caught.value).startswith(missing)
    assert "give --python" in str(caught.value)
    Path(missing).write_text("")
    with pytest.raises(Unusable, match="Permission denied"):
        predict(config(MLP, python=missing))


def test_a_program_that_is_no_python_is_told(tmp_path: Path) -> None:
    for program, end in (("/bin/true", "exit code 0"), ("/bin/false", "exit code 1")):
        ended = f"{program}: is no Python with torch ({end}); give --python the interpreter that you train in"
        with pytest.raises(Unusable, match=f"^{re.escape(ended)}$") as caught:
            list(search(config(MLP, python=program)))
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["double", "guided"])
def test_a_step_that_needs_more_than_one_sample_is_searched_from_two(tmp_path: Path, name: Name) -> None:
    """As batch normalization does; one sample that fails is no matter of memory."""
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            return torch.randn(batch_size, 1 << 20, 8, device=device)

        def train_step(model, optimizer, batch):
            if len(batch) == 1:
                raise ValueError("Expected more than 1 value per channel when training")
            model(batch).sum().backward()
        """,
    )
    limited = replace(config(spec), strategy=name, limit_bytes=256 * MIB)
    events = list(search(limited))
    verdict = verdict_of(events)
    assert (verdict.outcome, verdict.verified) == ("found", True)
    assert verdict.max_batch_size >= 2
    assert all(t.result.outcome == "error" for t in finished(events) if t.result.batch_size == 1)
    nothing = verdict_of(list(search(replace(limited, limit_bytes=64 * MIB, strategy="double"))))
    assert nothing.outcome == "nothing_fits"
    assert nothing.message.startswith("nothing fits: two samples are out of memory on simulated NVIDIA A100")
    assert re.search(r"and one fails: .*workload\.py:\d+: ValueError: Expected more than 1 value", nothing.message)


def test_failures_have_the_exit_code_of_their_kind() -> None:
    codes = {kind: Unusable(Failed(kind, "")).exit_code for kind in ("workload", "torch", "trace", "device")}
    assert codes == {"workload": 2, "torch": 2, "trace": 4, "device": 4}


# Pause and cancel


@pytest.fixture
def endless(tmp_path: Path) -> SearchConfig:
    """A search whose trials never end."""
    return config(
        workload(
            tmp_path,
            f"""
            def train_step(model, optimizer, batch):
                open("{tmp_path}/training", "w").close()
                time.sleep(600)
            """,
        )
    )


def test_a_cancelled_search_ends_at_once_and_leaves_no_process(endless: SearchConfig, tmp_path: Path) -> None:
    control = Control()
    events: list[SearchEvent] = []
    thread = threading.Thread(target=lambda: events.extend(search(endless, control)))
    thread.start()
    wait_until((tmp_path / "training").exists)
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    assert children
    control.cancel()
    thread.join(timeout=30)
    assert not thread.is_alive(), "it waited for the step, which takes ten minutes"
    close_idle()
    wait_until_gone(children)
    verdict = verdict_of(events)
    assert (verdict.outcome, verdict.exit_code) == ("cancelled", 130)
    assert verdict.message == "cancelled before any batch ran"


def test_a_search_that_is_abandoned_ends_its_trial() -> None:
    events = search(config(MLP))
    for event in events:
        if isinstance(event, TrialProgress) and event.sample is not None:
            break
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    events.close()  # type: ignore[attr-defined]
    close_idle()
    assert children
    wait_until_gone(children)


@pytest.mark.slow
def test_a_search_paused_before_it_starts_waits_for_resume(tmp_path: Path) -> None:
    control = Control()
    control.pause()
    assert control.paused
    events: list[SearchEvent] = []

    def until_a_trial_ends() -> None:
        for event in search(config(workload(tmp_path)), control):
            events.append(event)
            if finished(events):
                control.cancel()

    thread = threading.Thread(target=until_a_trial_ends)
    thread.start()
    wait_until(lambda: psutil.Process().children(recursive=True))
    time.sleep(1)
    assert not any(isinstance(event, TrialProgress) for event in events)
    control.resume()
    thread.join(timeout=60)
    assert finished(events)[0].result.outcome == "fit"
    assert verdict_of(events).outcome == "cancelled"


def test_a_cancelled_search_does_not_start() -> None:
    control = Control()
    control.cancel()
    assert [type(event) for event in search(config(MLP), control)] == [Verdict]


@pytest.mark.slow
def test_a_real_gpu_is_asked_even_though_the_trace_sees_none(tmp_path: Path) -> None:
    """The tracing child is kept from all GPUs; only a trial can tell whether its torch has CUDA."""
    device = Device(find_gpu("a100-80gb"), simulated=False, uuid="GPU-0")
    events: list[object] = []
    with pytest.raises(Unusable, match="finds no CUDA device") as caught:
        events.extend(search(SearchConfig(workload(tmp_path), device)))
    assert caught.value.exit_code == 4


def test_what_cannot_be_followed_in_backward_names_its_operator_and_line(tmp_path: Path) -> None:
    faults = """
    class Picks(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            picked = gradient.repeat_interleave(x.flatten()[: len(x)].long(), dim=0)
            return gradient

    def train_step(model, optimizer, batch):
        Picks.apply(model(batch)).sum().backward()
    """
    traced = predict(config(workload(tmp_path, faults))).prediction.traced
    assert isinstance(traced, Unknown)
    assert "aten.repeat_interleave" in traced.reason
    assert "workload.py:" in traced.reason
