"""Evaluations of a program: the peak that is in one counts as, and a run continues through one where asked."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpumem_tui.run.later import Later
from gpumem_tui.run.program import Evaluations
from tests.command.running import Project, needs
from tests.command.test_lightning import SCRIPT as LIGHTNING
from tests.command.test_transformers import LLAMA

THROUGH = ("--through", "eval")
SCRIPT = """
    import sys, torch
    from torch import nn

    every, how = int(sys.argv[1]), sys.argv[2]
    net = nn.Sequential(nn.Linear(1000, 4000), nn.ReLU(), nn.Linear(4000, 1000)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())

    def evaluate():
        net.eval()
        with torch.set_grad_enabled(how == "gradients"):
            for batch in torch.randn(2, 8192, 1000):
                seen = batch.cuda()
                nn.MSELoss()(net(seen), seen)
                if how == "error":
                    raise ValueError("no such metric")
        net.train()

    if how == "first":
        evaluate()
    for step in range(1, 31):
        seen = torch.randn(16, 1000).cuda()
        nn.MSELoss()(net(seen), seen).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("made", step)
        if how != "first" and every and step % every == 0:
            evaluate()
"""
EVALUATED_BYTES = 8192 * (1000 + 2 * 4000) * 4
"""The batch, and what the first layer and the activation give."""


def test_which_calls_evaluate() -> None:
    net, reference, loss = nn.Linear(2, 2), nn.Linear(2, 2), nn.MSELoss()
    trained = {id(parameter) for parameter in net.parameters()}
    evaluations = functools.partial(Evaluations().is_one, later=Later())
    with torch.no_grad():
        assert evaluations(net, set(), 0, is_new=True), "before the first step"
    assert not evaluations(net, set(), 0, is_new=False)
    with torch.no_grad():
        assert evaluations(net, trained, 1, is_new=False)
        assert evaluations(reference, trained, 1, is_new=False) is None, "nothing trains it"
        assert evaluations(loss, trained, 1, is_new=False) is None
    assert evaluations(net.eval(), trained, 1, is_new=False), "in evaluation mode, with gradients"


def awaiting(*, in_each_step: bool) -> tuple[Callable[..., bool | None], nn.Module, set[int], Later]:
    """Return what tells evaluations of a run that has made its two steps and awaits one, and what it trains."""
    net, later = nn.Linear(2, 2), Later("eval")
    trained = {id(parameter) for parameter in net.parameters()}
    is_one = functools.partial(Evaluations().is_one, later=later)
    for step in range(2):
        if in_each_step:
            with torch.no_grad():
                is_one(net, trained, step, is_new=False)
        is_one(net, trained, step, is_new=False)
    assert later.begin(2)
    assert later.lines(2) == ["--through eval: no evaluation came after step 2; this is of the steps alone"]
    return is_one, net, trained, later


@pytest.mark.parametrize("kind", ["own", "average"])
def test_an_evaluation_after_the_steps_ends_the_wait(kind: str) -> None:
    is_one, net, trained, later = awaiting(in_each_step=False)
    with torch.no_grad():
        if kind == "own":
            is_one(net, trained, 2, is_new=False)
        else:
            is_one(nn.Linear(2, 2), trained, 2, is_new=True)
    assert later.is_over
    assert later.lines(2) == ["--through eval: the evaluation after step 2 is part of this"]


def test_a_reference_of_every_step_is_not_what_is_awaited() -> None:
    """As DPO's, which is the trained model without its adapter."""
    is_one, net, trained, later = awaiting(in_each_step=True)
    with torch.no_grad():
        is_one(net, trained, 2, is_new=False)
        assert not later.is_over
        is_one(net.eval(), trained, 2, is_new=False)
    assert later.is_over


@pytest.mark.scripts
@pytest.mark.parametrize("how", ["none", "gradients"])
def test_a_run_goes_on_through_an_evaluation(project: Project, how: str) -> None:
    project.write("train.py", SCRIPT)
    words = ("python", "train.py", "7", how)
    assert project.predict(*words).json["traced"]["peak"]["phase"] == "optimizer"
    done = project.predict(*words, options=THROUGH)
    assert "made 7" in done.stderr
    assert "made 8" not in done.stderr
    traced = done.json["traced"]
    assert (traced["peak"]["phase"], traced["peak"]["step"]) == ("evaluation", 8), "the step that would have come"
    assert (traced["peak"]["source"], traced["peak"]["function"]) == ("train.py:14", "evaluate")
    assert "--through eval: the evaluation after step 7 is part of this" in traced["notes"]
    more = traced["peak_allocated_bytes"] - sum(traced["buckets"][name] for name in ("parameters", "optimizer"))
    assert EVALUATED_BYTES < more < 1.5 * EVALUATED_BYTES


@pytest.mark.scripts
@pytest.mark.parametrize(
    ("words", "when"), [(("0", "first"), "before any step"), (("2", "none"), "after step 2")], ids=["first", "between"]
)
def test_an_evaluation_among_the_steps_is_named(project: Project, words: tuple[str, str], when: str) -> None:
    project.write("train.py", SCRIPT)
    done = project.run("predict", "--gpu", "sim:a100-80gb", "--", project.python, "train.py", *words)
    assert f"traced peak: in evaluation or sampling, {when}, at aten.relu (train.py:14)" in done.stdout


@pytest.mark.scripts
@pytest.mark.parametrize(
    ("every", "how", "said"),
    [
        (
            "0",
            "none",
            "--through eval: no evaluation came after step 3, nor within 27 more; this is of the steps alone",
        ),
        ("5", "error", "the program ends after its steps, so what it took until then counts alone: train.py:"),
    ],
)
def test_where_no_evaluation_ends_the_steps_are_told(project: Project, every: str, how: str, said: str) -> None:
    project.write("train.py", SCRIPT)
    traced = project.predict("python", "train.py", every, how, options=THROUGH).json["traced"]
    assert any(note.startswith(said) for note in traced["notes"])
    assert "ended by itself" not in " ".join(traced["notes"])


@pytest.mark.scripts
def test_an_evaluation_that_never_comes_is_awaited_for_the_timeout(project: Project) -> None:
    project.write("train.py", SCRIPT.replace("range(1, 31)", "iter(int, 1)"))
    options = (*THROUGH, "--timeout", "5")
    notes = project.predict("python", "train.py", "0", "none", options=options).json["traced"]["notes"]
    assert any(note.startswith("--through eval: no evaluation came after step 3, nor within") for note in notes)
    assert any("as the time was up; it is at train.py:" in note for note in notes)


@pytest.mark.scripts
def test_a_search_finds_the_batch_that_an_evaluation_takes(project: Project) -> None:
    project.write("train.py", SCRIPT.replace("torch.randn(2, 8192, 1000)", "torch.randn(1, 1).expand(2, every, 1000)"))
    project.write("train.py", (project.folder / "train.py").read_text().replace("step % every == 0", "step == 4"))
    found = project.search(
        "python", "train.py", "{batch}", "none", gpu="t4-16gb", options=(*THROUGH, "--limit", "1GiB")
    )
    largest = found.lines[-1]["max_batch_size"]
    assert found.lines[-1]["verified"]
    assert 0.6 * 2**30 < largest * (1000 + 2 * 4000) * 4 < 2**30


@pytest.mark.scripts
@needs("transformers", "accelerate")
def test_the_evaluation_of_transformers_trainer(project: Project) -> None:
    project.write("train.py", LLAMA)
    words = ("python", "train.py", "--output_dir", "out", "--per_device_train_batch_size", "2", "--report_to", "none")
    evaluating = ("--per_device_eval_batch_size", "64", "--eval_strategy", "steps", "--eval_steps", "5")
    steps = project.predict(*words, *evaluating).json["traced"]
    traced = project.predict(*words, *evaluating, options=THROUGH).json["traced"]
    assert steps["peak"]["phase"] == "backward"
    assert (traced["peak"]["phase"], traced["peak"]["step"]) == ("evaluation", 6)
    logits_bytes = 64 * 32 * 1000 * 4
    assert traced["peak_allocated_bytes"] > steps["peak_allocated_bytes"] + logits_bytes


@pytest.mark.scripts
@needs("transformers")
def test_a_step_trains_on_texts_of_their_limit(project: Project) -> None:
    """With a prompt of 64 and 64 tokens generated an H200 took 4.07 GiB; one of 65 tokens was predicted as 2.73."""
    project.write(
        "train.py",
        """
        import sys
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids, tokens = torch.ones(2, 8, dtype=torch.int64).cuda(), int(sys.argv[1])
        for step in range(5):
            texts = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
            print("generated", tuple(texts.shape))
            model(texts, labels=texts).loss.backward()
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py", "20")
    assert "generated (2, 28)" in done.stderr
    assert "generated (2, 9)" in done.stderr, "at the other end"
    assert "assumes all 20 new tokens a text at train.py:14" in done.json["traced"]["notes"]
    told = project.predict("python", "train.py", "20", options=("--assume-rows", "train.py:14=5"))
    assert "generated (2, 13)" in told.stderr
    longer = project.predict("python", "train.py", "7000")
    assert "generated (2, 7008)" in longer.stderr
    assert longer.json["traced"]["buckets"]["activations"] > 7008 * 2 * 64 * 4


@pytest.mark.scripts
@needs("lightning")
def test_lightnings_sanity_check_is_an_evaluation_and_its_closure_is_followed_by_the_update(project: Project) -> None:
    project.write("train.py", LIGHTNING)
    peak = project.predict("python", "train.py", "bf16-mixed").json["traced"]["peak"]
    assert peak["phase"] == "optimizer"
    project.write("train.py", LIGHTNING.replace("DataLoader(data, 64))", "DataLoader(TensorDataset(\n"
        "        torch.randn(8192, 512), torch.zeros(8192, dtype=int)), 4096))"))  # fmt: skip
    peak = project.predict("python", "train.py", "bf16-mixed").json["traced"]["peak"]
    assert (peak["phase"], peak["step"]) == ("evaluation", 1)
