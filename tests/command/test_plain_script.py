"""A script as people write it: no change to it, no GPU, and every byte in its bucket."""

from __future__ import annotations

import textwrap

import pytest

from tests.command.running import Project

SCRIPT = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    assert torch.cuda.is_available()
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1000):
        images, wanted = (torch.randn(arguments.batch_size, 1024).to(device) for _ in range(2))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(images), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f} on {loss.device}")
"""
PARAMETERS = 4 * (2 * 1024 * 4096 + 4096 + 1024)


def test_every_bucket_of_a_plain_script(project: Project) -> None:
    project.write("train.py", SCRIPT)
    done = project.predict("python", "train.py", "--batch-size", "256", options=("--by", "source"))
    traced = done.json["traced"]
    buckets = traced["buckets"]
    assert buckets["parameters"] == PARAMETERS
    assert buckets["optimizer"] == 2 * PARAMETERS
    assert buckets["batch_data"] == 2 * 256 * 1024 * 4
    assert buckets["activations"] > 0
    assert sum(buckets.values()) == traced["peak_allocated_bytes"]
    assert any(held["source"].startswith("train.py:") for held in traced["composition"])
    assert done.json["workload"]["batch_size"] == 256
    assert "| step 0: loss 0.000 on cuda:0" in done.stderr


@pytest.mark.slow
def test_what_a_program_tells_the_allocator_itself_holds(project: Project) -> None:
    """As modded-nanogpt, nanochat and torchtune do: torch reads the variable as it first allocates."""
    script = textwrap.dedent(SCRIPT)
    project.write("plain.py", script)
    said = '\nimport os\nos.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"\n'
    project.write("train.py", script.replace("\n", said, 3).replace(said, "\n", 2))
    kinds = (("plain.py", ""), ("train.py", ""), ("plain.py", "expandable_segments:True"))
    reserved = []
    for name, settings in kinds:
        command = ("predict", "--json", "--gpu", "sim:a100-80gb", "--", project.python, name, "--batch-size", "4096")
        done = project.run(*command, environment={"PYTORCH_ALLOC_CONF": settings})
        reserved.append(done.json["traced"]["peak_reserved_bytes"])
    assert reserved[0] != reserved[1] == reserved[2]


def test_a_model_may_name_its_attributes_as_torch_names_its_methods(project: Project) -> None:
    wrapper = """
    class Wrapper(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.buffers, self.modules, self.parameters = [], (), {}

    parser"""
    script = textwrap.dedent(SCRIPT).replace("\nparser", textwrap.dedent(wrapper), 1)
    script = script.replace("nn.Sequential(nn", "Wrapper(nn").replace(
        "model.parameters()", "nn.Module.parameters(model)"
    )
    project.write("train.py", script)
    buckets = project.predict("python", "train.py", "--batch-size", "256").json["traced"]["buckets"]
    assert buckets["parameters"] == PARAMETERS
    assert buckets["optimizer"] == 2 * PARAMETERS


@pytest.mark.scripts
def test_a_backward_that_starts_at_autograd_s_engine(project: Project) -> None:
    """As Megatron-LM's of a pipeline, whose outputs have given their memory back."""
    begun_at_engine = """torch.autograd.Variable._execution_engine.run_backward(
            tensors=(loss,), grad_tensors=(torch.ones_like(loss),), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True)"""
    found = {}
    for name, backward in (("plain", "loss.backward()"), ("engine", begun_at_engine)):
        project.write("train.py", SCRIPT.replace("loss.backward()", backward))
        found[name] = project.predict("python", "train.py", "--batch-size", "16384").json["traced"]
    assert found["engine"]["highest"]["temporary"]["phase"] == found["plain"]["highest"]["temporary"]["phase"]
    activations = {name: traced["buckets"]["activations"] for name, traced in found.items()}
    assert 0 <= activations["engine"] - activations["plain"] <= 512  # the gradient of the loss, made in forward
    assert activations["plain"] > 100 << 20


@pytest.mark.slow
def test_one_sample_that_takes_another_way_is_told_by_its_own_trace(project: Project) -> None:
    other_way = "spare = torch.empty(1 << 20, device=device) if arguments.batch_size == 1 else None; loss.backward()"
    project.write("train.py", SCRIPT.replace("loss.backward()", other_way))
    sizes = {
        size: project.predict("python", "train.py", "--batch-size={batch}", options=("--batch-size", str(size))).json
        for size in (1, 4)
    }
    peaks = {size: found["traced"]["peak_allocated_bytes"] for size, found in sizes.items()}
    assert peaks[1] > peaks[4]
    assert sizes[1]["traced"]["max_batch_size"] == sizes[4]["traced"]["max_batch_size"] > 4


@pytest.mark.slow
def test_the_largest_batch_is_run_and_the_next_one_too(project: Project) -> None:
    project.write("train.py", SCRIPT)
    done = project.search("python", "train.py", "--batch-size={batch}", options=("--limit", "1GiB", "--quiet"))
    assert done.code == 0
    assert done.stderr == ""
    *trials, result = done.lines
    assert result["verified"]
    assert result["max_batch_size"] == result["traced"]["max_batch_size"] == trials[0]["batch_size"]
    assert [trial["outcome"] for trial in trials] == ["fit", "oom"]


@pytest.mark.slow
def test_batches_that_must_divide_something_are_the_ones_that_are_tried(project: Project) -> None:
    check = "    assert (1 << 20) % arguments.batch_size == 0, 'must be divisible'\n    for"
    project.write("train.py", SCRIPT.replace("    for", check, 1))
    done = project.search("python", "train.py", "--batch-size={batch}", options=("--limit", "1GiB", "--quiet"))
    *trials, result = done.lines
    assert result["verified"]
    assert result["first_failing"] == 2 * result["max_batch_size"]
    assert result["max_batch_size"].bit_count() == 1
    assert {trial["outcome"] for trial in trials if trial["batch_size"].bit_count() == 1} == {"fit", "oom"}
    assert "only: " in result["message"]
    assert "fails with train.py:" in result["message"]


@pytest.mark.slow
def test_what_a_program_asks_of_the_compiler_loads_it(project: Project) -> None:
    asking = """
    import torch._dynamo
    from torch._dynamo.utils import counters
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.reset()
    print("graphs:", len(counters), sys.modules["torch._dynamo"] is torch._dynamo)
    """
    project.write("train.py", "    import sys\n" + SCRIPT.replace("\n    parser =", asking + "\n    parser =", 1))
    done = project.predict("python", "train.py", "--batch-size", "256")
    assert done.json["traced"]["buckets"]["parameters"] == PARAMETERS
    assert "| graphs: 0 True" in done.stderr


def test_the_compiler_is_not_loaded_for_nothing(project: Project) -> None:
    saying = """
    import atexit
    import sys
    atexit.register(lambda: print("loaded:", sorted(name for name in sys.modules if name.startswith("torch._dynamo"))))
    """
    project.write("train.py", saying + SCRIPT)
    done = project.predict("python", "train.py")
    assert "| loaded: ['torch._dynamo', 'torch._dynamo.config']" in done.stderr
