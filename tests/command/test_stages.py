"""Stages of a run: which ones a program has, the peak of each, and the one that decides, in the first line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command.running import Project, needs

REINFORCED = """
    import copy, sys
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
    reference = copy.deepcopy(net).requires_grad_(False)
    actor = copy.deepcopy(net).requires_grad_(False)
    value = nn.Linear(64, 1).cuda()
    optimizer = torch.optim.AdamW([*net.parameters(), *value.parameters()])

    @torch.no_grad()
    def rollout(prompts):
        for _ in range(4):
            prompts = torch.cat([prompts, actor(prompts[-int(sys.argv[1]):])])
        return prompts

    for step in range(9):
        actor.load_state_dict(net.state_dict())
        texts = rollout(torch.randn(512, 64, device="cuda"))
        with torch.no_grad():
            some = texts[:1024]
            before, wanted = net(some), reference(some)
        out = net(texts[:256])
        (out * (before - wanted)[:256] + value(out)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Proximal policy optimization as libraries have it, with nothing of theirs."""

SUPERVISED = """
    import sys
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    resumed = optimizer.state_dict()
    for at, weight in enumerate(net.parameters()):
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        resumed["state"][at] = {"step": torch.tensor(1.0), **moments}
    optimizer.load_state_dict(resumed)

    def gather():  # as engines do, to write one file
        return {name: torch.cat([tensor] * 9) for name, tensor in net.state_dict().items()}

    for step in range(9):
        net(torch.randn(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "evaluates" in sys.argv:
            net.eval()
            with torch.no_grad():
                net(torch.randn(8192, 256, device="cuda"))
            net.train()
        if "saves" in sys.argv:
            torch.save(gather(), "a.pt")
"""


def _predicted(project: Project, script: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stages by name, and the whole object."""
    project.write("train.py", script)
    found = project.predict("python", "train.py", *arguments).json
    stages = {one["stage"]: one for one in found["traced"]["stages"]}
    return stages, found


def test_a_run_that_trains_on_what_it_generates(project: Project) -> None:
    stages, found = _predicted(project, REINFORCED, "100000")
    assert {*stages} == {"load", "rollout", "reference", "warm-up", "train", "weight sync"}
    peaks = {name: one["peak_allocated_bytes"] for name, one in stages.items()}
    assert max(peaks, key=lambda name: peaks[name]) == "rollout"
    assert peaks["rollout"] == found["traced"]["peak_allocated_bytes"]
    assert stages["rollout"]["largest"]["source"] == "train.py:15"
    assert "; the peak is in the rollout. " in found["answer"]
    assert sum(stages["rollout"]["buckets"].values()) == peaks["rollout"]
    assert peaks["weight sync"] < peaks["reference"] < peaks["rollout"]


def test_what_is_trained_on_its_own_text_is_evaluated_as_well(project: Project) -> None:
    """Its evaluation is no reference, though both call models without gradients."""
    evaluates = """
    @torch.no_grad()
    def evaluate():
        return net(torch.randn(65536, 64, device="cuda")).softmax(-1)

    for step in range(9):
        evaluate()
"""
    stages, found = _predicted(project, REINFORCED.replace("\n    for step in range(9):\n", evaluates), "512")
    assert {*stages} == {"load", "rollout", "reference", "warm-up", "train", "evaluate", "weight sync"}
    peaks = {name: one["peak_allocated_bytes"] for name, one in stages.items()}
    assert max(peaks, key=lambda name: peaks[name]) == "evaluate"
    assert peaks["reference"] < peaks["evaluate"] == found["traced"]["peak_allocated_bytes"]
    assert "; the peak is in evaluation. " in found["answer"]


def test_an_evaluation_that_takes_most_is_named(project: Project) -> None:
    stages, found = _predicted(project, SUPERVISED, "evaluates")
    assert {*stages} == {"load", "resume", "warm-up", "train", "evaluate"}
    assert "; the peak is in evaluation. " in found["answer"]
    assert stages["evaluate"]["buckets"]["optimizer"] > 0  # it is after the first step
    report = project.run("predict", "--gpu", "sim:a100-80gb", "--", project.python, "train.py", "evaluates").stdout
    (row,) = (line for line in report.splitlines() if line.startswith("evaluate "))
    assert "████████████████████████" in row
    assert "HIGHEST: " in row


def test_a_run_that_only_trains_has_no_table(project: Project) -> None:
    """Accelerate loads an optimizer's state into itself before any step: nothing is resumed."""
    as_prepared = SUPERVISED.replace("optimizer.load_state_dict(resumed)", "resumed = 0")
    as_prepared = as_prepared.replace(
        "resumed =", "optimizer.load_state_dict(optimizer.state_dict())\n    resumed =", 1
    )
    stages, found = _predicted(project, as_prepared)
    assert [*stages] == ["load", "warm-up", "train"]
    assert "the peak is in" not in found["answer"]


def test_saving_is_a_stage(project: Project) -> None:
    stages, _ = _predicted(project, SUPERVISED, "saves")
    assert {"save"} < {*stages}


@pytest.mark.scripts
@needs("trl", "datasets")
def test_trls_policy_optimization(project: Project) -> None:
    project.write("tokenizer.py", TOKENIZER)
    stages, _ = _predicted(project, POLICY)
    assert {"load", "rollout", "reference", "warm-up", "train", "save"} <= {*stages}


TOKENIZER = """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<pad>": 2, "<eos>": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
"""
POLICY = """
    from datasets import Dataset
    from tokenizer import tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=3, pad_token_id=2,
    )
    GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=GRPOConfig(
            "out", per_device_train_batch_size=4, num_generations=2, max_completion_length=8, max_steps=6,
            report_to=[], save_steps=2,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a b"] * 64}),
        processing_class=tokenizer,
    ).train()
"""
