"""Which lengths a program's inputs have, and the longest in their place."""

from __future__ import annotations

import gc
import importlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_tui.run.lengths import InputLengths, longest_sample
from tests.command.running import Project, needs

MODEL = nn.Identity()


def tokens(length: int) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length)


def stepped(lengths: InputLengths, *sizes: int) -> int:
    """Train a step on tokens of each length, with a mask and four classes, and return how many were made."""
    for step, size in enumerate(sizes, 1):
        lengths.begin(step - 1)
        ids, mask = lengths.arriving(tokens(size)), lengths.arriving(torch.ones(2, 1, size, size))
        lengths.arriving(torch.zeros(2, 4, dtype=torch.int64))
        assert mask.shape == (2, 1, *ids.shape[1:], *ids.shape[1:])
        lengths.trained_on(MODEL, ((), {"input_ids": ids}), step)
    return len(sizes)


def test_lengths_that_differ_are_said() -> None:
    lengths = InputLengths()
    assert lengths.line(stepped(lengths, 128, 64, 128)) == (
        "inputs differ: sequence length 64 to 128 in 3 steps; longer ones take more"
    )
    assert InputLengths().line(3) == ""


def test_what_arrives_is_filled_up_with_its_last_value() -> None:
    lengths = InputLengths(256, can_lengthen=True)
    steps = stepped(lengths, 128, 64, 512)
    lengths.begin(steps)
    longer = lengths.arriving(tokens(100))
    assert longer.shape == (2, 256)
    assert torch.equal(longer[:, :100], tokens(100))
    assert longer[:, 100:].unique().tolist() == [99, 199]
    assert lengths.arriving(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 4), "the first step had four as well"


@pytest.mark.parametrize("shape", [(1, 3, 100, 200), (1, 100, 200, 3)])
def test_images_keep_their_proportions(shape: tuple[int, ...]) -> None:
    lengths = InputLengths(400, can_lengthen=True)
    for step in (1, 2):
        lengths.begin(step - 1)
        images = lengths.arriving(torch.zeros(shape))
        lengths.trained_on(MODEL, ((images,), {}), step)
    assert lengths.line(2) == "inputs: image size 100 × 200 in 1 step; then image size 200 × 400 (--longest)"


def test_images_may_be_held_by_an_object_of_the_program_s() -> None:
    """As DETR's; what its loss is called with are no images."""
    lengths = InputLengths()
    samples = SimpleNamespace(tensors=torch.zeros(2, 3, 100, 200), mask=torch.zeros(2, 100, 200, dtype=torch.bool))
    lengths.trained_on(MODEL, ((samples,), {}), 1)
    lengths.trained_on(nn.Identity(), (({"logits": torch.zeros(2, 30, 9), "boxes": torch.zeros(2, 30, 4)},), {}), 1)
    assert lengths.line(1).startswith("inputs: image size 100 × 200 in 1 step")


def test_a_length_that_never_came_is_said() -> None:
    lengths = InputLengths(512, can_lengthen=True)
    for step in (1, 2):
        lengths.trained_on(MODEL, ((tokens(128),), {}), step)
    assert "--longest of 512 was not reached" in lengths.line(2)


def test_looking_for_a_limit_keeps_nothing_of_the_program_s() -> None:
    """As the gradients of a step were kept into the next, which had two sets of them then."""
    lengths = InputLengths(can_lengthen=True)
    steps = stepped(lengths, 128, 64)
    gradients = [torch.zeros(4)]
    kept = weakref.ref(gradients[0])
    gc.disable()
    try:
        lengths.wants_another_step(steps)
        gradients.clear()
        assert kept() is None
    finally:
        gc.enable()


def test_a_data_set_is_not_asked_for_what_it_works_out() -> None:
    """As PyTorch Geometric's warns when its `data` is read."""

    class Graphs:
        @property
        def data(self) -> Any:
            raise AssertionError("read")

    assert longest_sample(Graphs()) == 0


@needs("datasets")
def test_the_longest_sample_of_a_data_set_is_read_from_its_columns() -> None:
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": [1] * length} for length in (3, 9, 5)])
    assert longest_sample(rows) == 9
    assert longest_sample(rows.select([0, 2])) == 5
    assert longest_sample(rows.select([0, 2]).shuffle(seed=0)) == 5
    assert longest_sample([1, 2]) == 0


@pytest.mark.scripts
def test_where_lengths_differ_a_step_on_the_longest_follows(project: Project) -> None:
    project.write(
        "train.py",
        """
        import argparse, torch
        from torch import nn

        options = argparse.ArgumentParser()
        options.add_argument("--max-length", type=int, default=1000)
        options = options.parse_args()
        net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for length in (20, 30, 40, 50, 50):
            ids = torch.zeros(4, length, dtype=torch.int64).cuda()
            nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    traced = project.predict("python", "train.py").json["traced"]
    assert traced["notes"][-1] == (
        "inputs differ: sequence length 20 to 40 in 3 steps; "
        "then sequence length 1,000 (the longest by max_length of its options)"
    )
    assert traced["peak_allocated_bytes"] > 2 * 4 * 1000 * 100 * 4
    named = project.predict("python", "train.py", options=("--longest", "2000")).json["traced"]
    assert named["peak_allocated_bytes"] > 2 * 4 * 2000 * 100 * 4


@pytest.mark.scripts
@needs("transformers")
def test_a_tokenizer_that_was_not_asked_to_cut_names_no_limit(project: Project) -> None:
    """As trl's GRPO tokenizes prompts: 32,768 tokens that the model could take are no length of its data."""
    project.write(
        "train.py",
        """
        import sys, torch
        from torch import nn
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", model_max_length=512)
        net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for length in (20, 30, 40, 50, 50):
            ids = tokenizer(["a " * length] * 2, truncation=len(sys.argv) > 1, return_tensors="pt")["input_ids"].cuda()
            nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    seen = "inputs differ: sequence length 20 to 40 in 3 steps; "
    known = "model_max_length of TokenizersBackend is 512: --longest 512 tries it"
    assert project.predict("python", "train.py").json["traced"]["notes"][-1] == seen + known
    cut = "then sequence length 512 (the longest by what TokenizersBackend cuts to)"
    assert project.predict("python", "train.py", "cut").json["traced"]["notes"][-1] == seen + cut


@pytest.mark.scripts
def test_what_a_model_is_tried_out_with_on_the_host_is_no_input(project: Project) -> None:
    """As ultralytics finds its strides, on an image of zeros, before the model goes to the GPU."""
    project.write(
        "train.py",
        """
        import torch

        net = torch.nn.Conv2d(3, 4, 3)
        net(torch.zeros(1, 3, 256, 256))
        net.cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.zeros(2, 3, 64, 64).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    notes = project.predict("python", "train.py").json["traced"]["notes"]
    assert notes[-1].startswith("inputs: image size 64 × 64 in 3 steps"), notes


@pytest.mark.scripts
def test_a_program_that_cannot_take_the_longest_is_answered_by_its_own_steps(project: Project) -> None:
    """As litgpt, whose model is cut to the longest of its data, although its configuration could take more."""
    project.write(
        "train.py",
        """
        import torch
        from torch import nn

        block_size = 512
        net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for length in (20, 30, 40, 50):
            ids = torch.zeros(4, length, dtype=torch.int64).cuda()
            if ids.shape[1] > 50:
                raise ValueError(f"cannot forward {ids.shape[1]}")
            nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        """,
    )
    notes = project.predict("python", "train.py").json["traced"]["notes"]
    assert notes[-1].startswith("the program ends at that length, so what it took until then counts alone: ")
    assert notes[-1].endswith("ValueError: cannot forward 512")
