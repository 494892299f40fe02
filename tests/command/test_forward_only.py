"""Commands without an optimizer step: inference and embedding are answered, and what fails names its own error."""

from __future__ import annotations

import pytest

from gpumem_tui.text import OutputLines
from tests.command.running import Project

MIB = 1 << 20
INFERENCE = """
    import os, signal, sys, warnings, torch
    from torch import nn

    net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda().half().eval()
    kept = []
    for _ in range(3):
        with torch.inference_mode():
            kept.append(net(torch.randn(8192, 1024, device="cuda", dtype=torch.half)).cpu())
    warnings.warn("this has nothing to do with it")
    exec(sys.argv[1])
"""
WEIGHTS_BYTES = 2 * (2 * 1024 * 4096 + 4096 + 1024)
FORWARD_BYTES = 2 * 8192 * (1024 + 2 * 4096)
"""The batch, and what the first layer and the activation give."""

TRAINED_AND_EVALUATED = """
    import os, sys, torch
    from torch import nn

    net = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        net(torch.randn(8, 1024).cuda()).sum().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(8, 1024).cuda())
    exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        pytest.param("sys.exit(0)", marks=pytest.mark.slow),
        "os._exit(0)",
    ],
)
def test_inference_has_the_peak_of_forward(project: Project, end: str) -> None:
    project.write("infer.py", INFERENCE)
    found = project.predict("python", "infer.py", end).json["traced"]
    assert found["peak"]["phase"] == "forward only"
    in_forward = [one["peak_allocated_bytes"] for one in found["phases"] if one["phase"] == "forward only"]
    workspace_bytes = 9 * MIB
    assert 0 <= max(in_forward) - WEIGHTS_BYTES - FORWARD_BYTES < workspace_bytes
    note = "the command ended by itself without an optimizer step: forward only, as for inference or evaluation"
    assert note in found["notes"]


def test_lines_name_the_phase(project: Project) -> None:
    project.write("infer.py", INFERENCE)
    done = project.run("predict", "--gpu", "sim:a100-80gb", "--", project.python, "infer.py", "pass")
    assert done.code == 0
    assert "Most in forward" in done.stdout
    assert "traced peak: in forward only, at aten.relu (infer.py:9)" in done.stdout


@pytest.mark.slow
def test_the_largest_batch_of_inference_is_searched(project: Project) -> None:
    project.write("infer.py", INFERENCE.replace("8192", "int(sys.argv[2])"))
    done = project.search("python", "infer.py", "pass", "{batch}", gpu="t4-16gb")
    assert done.code == 0
    fits = done.lines[-1]["max_batch_size"]
    outcomes = {line["batch_size"]: line["outcome"] for line in done.lines[:-1] if "outcome" in line}
    assert outcomes == {fits: "fit", fits + 1: "oom"}
    assert done.stderr.count("| torch.OutOfMemoryError: CUDA out of memory. ") == 1
    assert "Traceback" not in done.stderr, "that it does not fit is what was asked"


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        ("sys.exit(3)", "the command ended (exit code 3) before its first optimizer step"),
        pytest.param(
            "sys.exit('no index')",
            "the command ended (exit code 1) before its first optimizer step: no index",
            marks=pytest.mark.slow,
        ),
        ("raise KeyError('index')", "infer.py:11: KeyError: 'index'"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "the command ended (killed by signal 9, perhaps as host memory was full) before its first optimizer step",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_inference_that_fails_names_its_own_error(project: Project, end: str, complaint: str) -> None:
    project.write("infer.py", INFERENCE)
    done = project.predict("python", "infer.py", end)
    assert done.code == 2
    assert done.complaint == f"gpumem-tui: {complaint}"


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "the command ended (killed by signal 9, perhaps as host memory was full) after 2 optimizer steps",
        ),
        ("raise ValueError('no metric')", "train.py:13: ValueError: no metric (after 2 optimizer steps)"),
    ],
)
def test_a_run_that_dies_in_evaluation_counts_its_steps(project: Project, end: str, complaint: str) -> None:
    project.write("train.py", TRAINED_AND_EVALUATED)
    done = project.predict("python", "train.py", end)
    assert done.code == 2
    assert done.complaint == f"gpumem-tui: {complaint}"


def test_a_run_that_ends_in_evaluation_is_answered_by_its_steps(project: Project) -> None:
    project.write("train.py", TRAINED_AND_EVALUATED)
    found = project.predict("python", "train.py", "os._exit(0)").json["traced"]
    assert "the command ended by itself after 2 of 3 optimizer steps" in found["notes"]
    assert found["peak"]["phase"] != "forward only"


@pytest.mark.slow
def test_inference_that_takes_long_is_answered_up_to_the_time_limit(project: Project) -> None:
    project.write("infer.py", INFERENCE)
    words = ("python", "infer.py", "import time; time.sleep(600)")
    found = project.predict(*words, options=("--timeout", "8")).json["traced"]
    assert found["fit"] == "may fit"
    assert any("forward only" in note and "--timeout waits longer" in note for note in found["notes"])


@pytest.mark.slow
def test_data_prepared_on_the_gpu_does_not_answer_for_the_training_after_it(project: Project) -> None:
    project.write("prepare.py", INFERENCE)
    project.write("train.py", TRAINED_AND_EVALUATED)
    found = project.predict("sh", "-c", "python prepare.py pass && python train.py pass").json["traced"]
    assert found["peak_allocated_bytes"] < FORWARD_BYTES
    assert not any("without an optimizer step" in note for note in found["notes"])


@pytest.mark.parametrize(
    "warning",
    [
        "/a/b.py:7: UserWarning: unrelated\n  warnings.warn('unrelated')\n",
        "W1128 16:22:04.970000 3887 torch/utils/_pytree.py:630] deprecated\n",
        "[WARNING|trainer.py:7] no eval set\n",
        "2026-01-01 10:00:00 - WARNING - tokenizer: unrelated\n",
    ],
)
def test_a_warning_is_no_last_word(warning: str) -> None:
    lines = OutputLines()
    shown = list(lines.split(b"no such index\n" + warning.encode()))
    assert lines.last == "no such index"
    assert len(shown) == 1 + warning.count("\n")
