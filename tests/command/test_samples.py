"""Searches whose data ends before memory does: by the loaders' samplers, by memory that grows no further, by errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command.running import Finished, Project, needs

_HEAD = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
    size, rows = int(sys.argv[1]), torch.randn(90, 16)
    net = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16)).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch):
        loss = net(batch.cuda()).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()
        return loss.item()

    def train(loader):
        for epoch in range(9):
            total = sum(step(batch) for [batch] in loader)
            print(total / len(loader))
"""
LOADERS = {
    "drop_last": "train(DataLoader(TensorDataset(rows), size, shuffle=True, drop_last=True))",
    "a subset": "train(DataLoader(torch.utils.data.Subset(TensorDataset(torch.randn(500, 16)), range(90)), size))",
    "draws": """
    draws = torch.utils.data.WeightedRandomSampler([1.0] * 500, num_samples=90)
    train(DataLoader(TensorDataset(torch.randn(500, 16)), size, sampler=draws))
""",
    "batches of another": """
    class Repeats:
        def __init__(self, sampler):
            self.sampler = sampler

        def __len__(self):
            return len(self.sampler)

        def __iter__(self):
            while True:
                yield from self.sampler

    inner = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(rows), size, drop_last=False)
    train(DataLoader(TensorDataset(rows), batch_sampler=Repeats(inner)))
""",
    "by a rate": """
    class Draws:
        def __init__(self):
            self.num_samples, self.sample_rate = 90, 1 / len(DataLoader(rows, size))

        def __len__(self):
            return int(1 / self.sample_rate)

        def __iter__(self):
            for _ in range(len(self)):
                yield list(range(round(self.num_samples * self.sample_rate)))

    train(DataLoader(TensorDataset(rows), batch_sampler=Draws()))
""",
    "after smaller validation": """
    few = DataLoader(TensorDataset(torch.randn(60, 16)), size)
    loader = DataLoader(TensorDataset(rows), size, drop_last=True)
    for epoch in range(9):
        with torch.no_grad():
            net(next(iter(few))[0].cuda())
        total = sum(step(batch) for [batch] in loader) / len(loader)
""",
    "next to a second set": """
    other = iter(DataLoader(TensorDataset(torch.randn(40, 16)), 4, sampler=torch.arange(4).repeat(900)))
    for epoch in range(9):
        for [batch] in DataLoader(TensorDataset(rows), size):
            step(torch.cat([batch, next(other)[0]]))
""",
    "by workers": "train(DataLoader(TensorDataset(rows), size, num_workers=1, persistent_workers=True))",
}
WITHOUT_LENGTH = """
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(rows)

    for epoch in range(9):
        for batch in DataLoader(Rows(), size):
            step(batch)
"""
BY_HAND = """
    for epoch in range(9):
        total = sum(step(rows[at * size : (at + 1) * size]) for at in range(len(rows) // size))
        print(total / (len(rows) // size))
"""


def searched(project: Project, body: str, *options: str) -> tuple[Finished, dict[str, Any], list[dict[str, Any]]]:
    project.write("train.py", f"{_HEAD}\n    {body.strip()}\n")
    found = project.search("python", "train.py", "{batch}", options=options)
    assert found.lines, found.stderr
    *trials, result = found.lines
    return found, result, trials


@pytest.mark.parametrize("body", LOADERS.values(), ids=LOADERS)
def test_no_batch_is_run_that_is_larger_than_the_data(project: Project, body: str) -> None:
    found, result, trials = searched(project, body)
    assert found.code == 5
    assert [(trial["batch_size"], trial["outcome"]) for trial in trials] == [(90, "fit")]
    largest = result["traced"]["max_batch_size"]
    assert largest > 10_000
    assert (result["outcome"], result["max_batch_size"], result["safe_batch_size"]) == ("found", 90, 90)
    assert (result["samples"], result["verified"]) == (90, False)
    assert f"by trace safe batch {largest:,}" in result["message"]
    assert "the data has 90 samples: larger ones were not run" in result["message"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("how", ["batch_sampler=Draws()", "batch_size=size, sampler=draws"])
def test_epochs_of_so_many_batches_have_as_many_samples_as_are_asked_for(
    project: Project, how: str, count: int
) -> None:
    body = f"""
    count = {count}
    class Draws(torch.utils.data.Sampler):
        batch_size = size

        def __iter__(self):
            return (torch.randint(0, 90, (size,)).tolist() for _ in range(len(self)))

        def __len__(self):
            return count

    draws = torch.utils.data.RandomSampler(rows, replacement=True, num_samples=count * size)
    """
    _, result, _ = searched(project, f"{body}train(DataLoader(TensorDataset(rows), {how}))", "--limit", "256MiB")
    assert result["samples"] is None
    assert result["max_batch_size"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("body", [WITHOUT_LENGTH, BY_HAND.replace("len(rows) // size", "-(-len(rows) // size)")])
def test_data_of_no_known_length_ends_where_memory_grows_no_further(project: Project, body: str) -> None:
    found, result, trials = searched(project, body)
    assert found.code == 5
    assert (result["max_batch_size"], result["samples"], result["trials"]) == (90, None, len(trials))
    assert trials[-1]["batch_size"] == 90
    assert trials[-1]["peak_allocated_bytes"] == trials[0]["peak_allocated_bytes"]
    assert "batches above 90 take no more memory, as if the data had no more samples" in result["message"]


@pytest.mark.slow
def test_a_program_that_fails_without_a_batch_is_searched_below_that(project: Project) -> None:
    found, result, trials = searched(project, BY_HAND)
    assert found.code == 5
    assert (result["max_batch_size"], result["first_failing"], result["samples"]) == (90, 91, None)
    assert "batch 90 ran; batch 91 failed for another reason than memory: train.py:" in result["message"]
    assert "by trace safe batch" in result["message"]
    assert len(trials) < 16
    failed = [trial for trial in trials if trial["outcome"] == "error"]
    assert failed
    assert all(trial["seconds"] > 0 for trial in trials), "a failed trial took no time"


@pytest.mark.slow
@pytest.mark.scripts
def test_of_several_ranks_each_has_its_share_of_the_data(project: Project) -> None:
    body = """
    torch.distributed.init_process_group("nccl")
    net = nn.parallel.DistributedDataParallel(net)
    shares = torch.utils.data.distributed.DistributedSampler(rows)
    train(DataLoader(TensorDataset(rows), size, sampler=shares))
    """
    project.write("train.py", f"{_HEAD}\n    {body.strip()}\n")
    found = project.search("torchrun", "--nproc-per-node", "3", "train.py", "{batch}")
    assert (found.code, found.lines[-1]["max_batch_size"]) == (5, 30)
    assert "the data has 30 samples a rank: larger ones were not run" in found.lines[-1]["message"]


@pytest.mark.slow
def test_a_batch_of_several_passes_is_larger_than_the_data(project: Project) -> None:
    body = """
    passes = 0
    for epoch in range(40):
        for [batch] in DataLoader(TensorDataset(rows), size // 4):
            net(batch.cuda()).pow(2).mean().backward()
            passes += 1
            if passes % 4 == 0:
                opt.step(); opt.zero_grad()
    """
    found, result, _ = searched(project, body)
    assert (found.code, result["max_batch_size"]) == (5, 360)
    assert "the data fills no batch above 360: larger ones were not run" in result["message"]


def test_memory_that_ends_before_the_data_is_as_ever(project: Project) -> None:
    found, result, _ = searched(project, LOADERS["drop_last"], "--limit", "24MiB")
    assert found.code == 0
    assert result["verified"]
    assert result["max_batch_size"] < 90
    assert result["samples"] is None
    assert "samples" not in result["message"]


def test_a_prediction_above_the_data_is_made_from_smaller_batches(project: Project) -> None:
    project.write("train.py", f"{_HEAD}\n    {LOADERS['drop_last']}\n")
    body = project.predict("python", "train.py", "{batch}", options=("--batch-size", "200")).json
    assert body["traced"]["fits"]
    assert "the data has 90 samples: larger ones were not run" in body["answer"]


def test_a_command_whose_data_has_no_batch_says_how_many_samples_there_are(project: Project) -> None:
    project.write("train.py", f"{_HEAD}\n    {LOADERS['drop_last']}\n")
    found = project.predict("python", "train.py", "200")
    assert found.code == 2
    said = "the data has 90 samples: with drop_last=True an epoch has no batch of 200 (train.py:"
    assert said in found.complaint
    assert "ZeroDivisionError" in found.complaint
    quiet = LOADERS["drop_last"].replace("train(", "[step(batch) for [batch] in ").replace("True))", "True)]")
    project.write("train.py", f"{_HEAD}\n    {quiet}\n")
    found = project.predict("python", "train.py", "200")
    assert "the data has 90 samples: with drop_last=True an epoch has no batch of 200" in found.complaint


@needs("transformers", "accelerate")
@pytest.mark.scripts
def test_the_data_of_a_trainer_ends(project: Project) -> None:
    project.write(
        "train.py",
        """
        import sys, torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(90)]
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=128))
        args = TrainingArguments("out", per_device_train_batch_size=int(sys.argv[1]), report_to=[], max_steps=9)
        Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8]).train()
        """,
    )
    found = project.search("python", "train.py", "{batch}")
    assert (found.code, found.lines[-1]["samples"], found.lines[-1]["max_batch_size"]) == (5, 90, 90)
