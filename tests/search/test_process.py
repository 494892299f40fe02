"""A trial's process, with any code in it: one outcome or one line, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.events import Failed, Ready, Sample
from gpumem_tui.search.verdict import concluded
from tests.search.trials import Trial, workload
from tests.waiting import wait_until, wait_until_gone

ENDS = """
def make_batch(batch_size, device):
    print("last\\x1b words", flush=True)
    {how}
"""

PAUSE_POLLS = 60
"""The parent polls ten times a second: a pause of 6 s."""


def test_a_trial_reports_readiness_phases_and_its_outcome(tmp_path: Path) -> None:
    trial = Trial(workload(tmp_path)).run()
    first, *samples, _ = trial.events
    assert isinstance(first, Ready)
    assert first.profile.endswith("sm_80")
    phases = [s.phase for s in samples if isinstance(s, Sample)]
    assert (phases[0], phases[-1]) == ("batch", "batch")
    assert set(phases) <= {"batch", "forward", "backward", "optimizer"}
    assert all(sum(s.buckets.values()) == s.allocated_bytes for s in samples if isinstance(s, Sample))
    assert trial.result.outcome == "fit"
    assert trial.result.steps == 2
    assert trial.result.buckets is not None
    assert sum(trial.result.buckets.values()) == trial.result.peak_allocated_bytes


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"^killed by signal 9 \(host memory full\?\): last words$"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"^killed by signal 11: last words$"),
    ],
    ids=["SIGKILL", "SIGSEGV"],
)
def test_how_a_process_died_is_one_line(tmp_path: Path, fault: str, line: str) -> None:
    spec = workload(tmp_path, ENDS.format(how=fault))
    with pytest.raises(ChildDied, match=line):
        Trial(spec).run()


def test_an_end_without_a_word_is_one_line(tmp_path: Path) -> None:
    spec = workload(tmp_path, ENDS.format(how="os._exit(7)"))
    ended = "the workload file ended (exit code 7) before its first optimizer step: last words"
    assert Trial(spec).run().failure.detail == ended


def test_a_process_that_hangs_is_given_up(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def train_step(model, optimizer, batch):
            time.sleep(60)
        """,
    )
    trial = Trial(spec, timeout_s=1.0)
    assert re.search("no optimizer step within 1 s", trial.run().failure.detail)
    wait_until_gone([trial.pid])


def test_an_exit_is_the_outcome_of_the_step(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def train_step(model, optimizer, batch):
            sys.exit("no data here")
        """,
    )
    detail = Trial(spec).run().failure.detail
    assert detail.startswith("the step ends the program: SystemExit: no data here (")
    assert "workload.py:" in detail


def test_a_file_that_shows_errors_itself_does_not_hide_them(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        sys.excepthook = lambda kind, error, trace: print("something went wrong")

        def train_step(model, optimizer, batch):
            raise ValueError("no data here")
        """,
    )
    assert Trial(spec).run().failure.detail.endswith("ValueError: no data here")


def test_a_file_finds_no_options_but_its_own(tmp_path: Path) -> None:
    spec = workload(tmp_path, "assert sys.argv[1:] == [], sys.argv")
    assert Trial(spec).run().result.outcome == "fit"


def test_a_process_that_it_spawns_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("def double(number): return 2 * number")
    spec = workload(
        tmp_path,
        """
        import neighbour, multiprocessing

        def make_batch(batch_size, device):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.apply_async(neighbour.double, (2,)).get(30) == 4
            return torch.randn(batch_size, 8, device=device)
        """,
    )
    assert Trial(spec, steps=1).run().result.outcome == "fit"


def test_the_place_of_who_asks_is_not_the_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of several has RANK and WORLD_SIZE, and so has a shell that srun has started."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    done = Trial(workload(tmp_path)).run().result
    assert (done.outcome, done.notes) == ("fit", ())


def test_what_the_user_prints_is_kept_apart(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            for _ in range(100):
                print("{" * 50_000)
                print('{"event": "trial"}', file=sys.stderr)
            return torch.randn(batch_size, 8, device=device)
        """,
    )
    assert Trial(spec).run().result.outcome == "fit"


def test_what_the_user_starts_shares_neither_pipe(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        f"""
        def make_batch(batch_size, device):
            subprocess.run("ls -l /proc/self/fd > {tmp_path}/files", shell=True, close_fds=False)
            try:
                input()
            except EOFError:
                print("nothing to read", file=open("{tmp_path}/stdin", "w"))
            return torch.randn(batch_size, 8, device=device)
        """,
    )
    assert Trial(spec).run().result.outcome == "fit"
    assert "socket:" not in (tmp_path / "files").read_text()
    assert (tmp_path / "stdin").read_text() == "nothing to read\n"


def test_a_thread_that_never_ends_does_not_hold_the_trial_up(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        import threading

        def build(device):
            threading.Thread(target=time.sleep, args=(600,)).start()
            return nn.Linear(8, 8, device=device), None

        def train_step(model, optimizer, batch):
            model(batch).sum().backward()
        """,
    )
    assert Trial(spec, timeout_s=20).run().result.outcome == "fit"


@pytest.mark.parametrize("start", ["subprocess.Popen(['sleep', '60']).pid", "os.fork() or time.sleep(60)"])
def test_what_the_user_left_running_is_ended_with_the_trial(tmp_path: Path, start: str) -> None:
    spec = workload(
        tmp_path,
        f"""
        def build(device):
            with open("{tmp_path}/pid", "w") as file:
                print({start}, file=file)
            model = nn.Linear(8, 8, device=device)
            return model, None

        def train_step(model, optimizer, batch):
            model(batch).sum().backward()
        """,
    )
    trial = Trial(spec)
    started = time.monotonic()
    assert trial.run().result.outcome == "fit"
    assert time.monotonic() - started < 30, "it waited for what holds the pipe"
    wait_until_gone([trial.pid, int((tmp_path / "pid").read_text())])


@pytest.mark.slow
def test_a_paused_trial_holds_after_its_step_and_is_no_hang(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        """
        def make_batch(batch_size, device):
            time.sleep(0.1)
            return torch.randn(batch_size, 8, device=device)
        """,
    )
    trial = Trial(spec, steps=12, timeout_s=5.0)
    paused_at = polls = 0

    def wait() -> None:
        """Pause in the second step for longer than the time limit, then continue."""
        nonlocal paused_at, polls
        if trial.step == 2 and not paused_at:
            trial.child.pause()
            paused_at = trial.step
        polls += bool(paused_at)
        if polls == PAUSE_POLLS:
            assert trial.step <= paused_at + 1, "it ran on"
            trial.child.resume()

    trial.run(wait, held=lambda: 0 < polls < PAUSE_POLLS)
    assert trial.result.steps == 12


def test_a_killed_search_takes_its_trial_and_what_that_started_along(tmp_path: Path) -> None:
    spec = workload(
        tmp_path,
        f"""
        def train_step(model, optimizer, batch):
            subprocess.Popen(["sleep", "1000"])
            open("{tmp_path}/training", "w").close()
            while True:
                pass
        """,
    )
    script = f"""
from tests.search.trials import Trial, WorkloadSpec, Recipe
Trial(WorkloadSpec(Recipe(), file={spec.file!r})).run()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    wait_until((tmp_path / "training").exists)
    children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert len(children) == 4, "the interpreter, the trial, its guard and what it started"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(children)


def test_a_file_that_cannot_be_loaded_is_the_users_to_mend(tmp_path: Path) -> None:
    spec = workload(tmp_path, "del train_step")
    last = Trial(spec).run().events[-1]
    assert isinstance(last, Failed)
    assert last.kind == "workload"
    assert "has no train_step" in last.detail


class TestFileThatNamesCuda:
    """A workload file speaks to the simulated GPU as it would to a real one."""

    @pytest.mark.parametrize(
        "autocast",
        [
            'torch.autocast("cuda"',
            'torch.amp.autocast("cuda"',
            "torch.cuda.amp.autocast(",
            "torch.autocast(x.device.type",
        ],
    )
    def test_autocast(self, tmp_path: Path, autocast: str) -> None:
        half = "torch." + autocast + (", " if autocast[-1] != "(" else "") + "dtype=torch.bfloat16)"
        dtypes = f"""
        def train_step(model, optimizer, x):
            with {half}:
                assert model(x).dtype == torch.bfloat16
            model(x).sum().backward()
        """
        assert Trial(workload(tmp_path, dtypes)).run().result.outcome == "fit"

    def test_what_it_asks_of_torch_cuda(self, tmp_path: Path) -> None:
        asks = """
        assert torch.cuda.is_available()
        SCALE = torch.ones(1 << 20, device="cuda")

        def train_step(model, optimizer, x):
            model(x * SCALE[:8]).sum().backward()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            assert torch.cuda.max_memory_allocated() > 4 << 20
            assert torch.cuda.get_device_name() == "NVIDIA A100 80 GB" and x.is_cuda and x.device.type == "cuda"
        """
        result = Trial(workload(tmp_path, asks)).run().result
        assert (result.outcome, result.detail) == ("fit", "")
        assert result.peak_allocated_bytes > 4 << 20

    def test_another_gpu(self, tmp_path: Path) -> None:
        result = Trial(workload(tmp_path, "def make_batch(n, device): return torch.zeros(n, device='cuda:1')")).run()
        assert "invalid device ordinal (cuda:1 of 1 GPU" in result.failure.detail

    def test_what_is_compiled_by_another_backend_is_an_estimate(self, tmp_path: Path) -> None:
        compiles = """
        def train_step(model, optimizer, x):
            torch.compile(model, backend="onnxrt")(x).sum().backward()
        """
        result = Trial(workload(tmp_path, compiles)).run().result
        assert result.outcome == "fit"
        assert result.notes == (
            "torch.compile: traced as eager PyTorch, an estimate (compiled runs held 0.48 to 1.05 times their eager "
            "trace, 2.3 times and more where a checkpoint runs inside): backend 'onnxrt' is none that torch has here",
        )
        assert result.is_estimate
        full = replace(result, batch_size=2, outcome="oom", detail="out of memory")
        verdict = concluded([replace(result, batch_size=1), full], "simulated GPU", grows=True)
        assert verdict.message.startswith("batch 1 may fit on simulated GPU, an estimate: ")
