"""Commands that run out of memory on the card: those that catch it and continue, and those that die of it."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

_HEAD = """
    import gc, sys, torch
    from torch import nn
    net = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024)).cuda()
    opt = torch.optim.AdamW(net.parameters())

    def step(samples):
        net(torch.randn(samples, 1024, device="cuda")).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
"""
HALVES = (
    _HEAD
    + """
    size = int(sys.argv[1])
    while True:
        try:
            step(size)
            step(size)
            break
        except torch.OutOfMemoryError as error:
            print(error)
        opt.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        size //= 2
        if size < int(sys.argv[2]):
            raise SystemExit("no batch is small enough")
    statistics = torch.cuda.memory_stats()
    print("settled", size, statistics["num_ooms"], statistics["num_alloc_retries"])
    while True:
        step(size)
"""
)
PLAIN = _HEAD + "    for _ in range(9):\n        step(int(sys.argv[1]))\n"
SKIPS = (
    _HEAD
    + """
    for size in (2048, 1 << 20, 2048, 4096, 2048, 2048, 2048, 2048):
        try:
            step(size)
        except torch.cuda.OutOfMemoryError:
            opt.zero_grad()
"""
)
DOUBLES = (
    _HEAD
    + """
    size = int(sys.argv[1])
    try:
        while True:
            step(size)
            size *= 2
    except RuntimeError as error:
        assert "CUDA out of memory. " in str(error), error
        size //= 2
        opt.zero_grad(); gc.collect(); torch.cuda.empty_cache()
    for _ in range(9):
        step(size)
"""
)
FREE = (
    _HEAD
    + """
    free, total = torch.cuda.mem_get_info()
    assert free < total == torch.cuda.get_device_properties(0).total_memory, (free, total)
    for _ in range(9):
        step(free // (4 * 8192 * 8))
"""
)


def test_a_program_that_halves_its_batch_is_followed_to_what_fits(project: Project) -> None:
    project.write("halves.py", HALVES)
    found = project.predict("python", "halves.py", "1048576", "1", gpu="t4-16gb")
    traced = found.json["traced"]
    assert traced["fit"] == "fits"
    tried, settled = traced["out_of_memory"]["tried"], traced["out_of_memory"]["settled"]
    assert tried == [(1 << 20) >> halved for halved in range(len(tried))]
    assert settled == tried[-1] // 2
    assert traced["out_of_memory"]["times"] == len(tried)
    assert f"settled {settled} {len(tried)} " in found.stderr
    assert "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 14.75 GiB" in found.stderr
    alone = project.predict("python", "halves.py", str(settled), "1", gpu="t4-16gb").json["traced"]
    assert alone["out_of_memory"] is None
    assert alone["peak_allocated_bytes"] == traced["peak_allocated_bytes"]
    larger = project.predict("python", "halves.py", str(2 * settled), "1", gpu="t4-16gb").json["traced"]
    assert larger["out_of_memory"]["tried"] == [2 * settled]


def test_what_was_settled_at_is_the_first_line(project: Project) -> None:
    project.write("halves.py", HALVES)
    said = project.run("predict", "--gpu", "sim:t4-16gb", "--", project.python, "halves.py", "1048576", "1").stdout
    assert said.startswith("Tried 1,048,576, settled at 65,536, which fits on NVIDIA T4: "), said


def test_a_program_that_dies_at_its_smallest_batch_is_answered_with_what_that_needs(project: Project) -> None:
    project.write("halves.py", HALVES)
    project.write("plain.py", PLAIN)
    found = project.predict("python", "halves.py", "1048576", "131072", gpu="t4-16gb").json["traced"]
    assert found["fit"] == "does not fit"
    assert found["out_of_memory"]["settled"] == 131072
    dies = project.predict("python", "plain.py", "131072", gpu="t4-16gb")
    assert dies.json["traced"]["fit"] == "does not fit"
    assert dies.json["traced"]["out_of_memory"] is None
    assert "Traceback" not in dies.stderr, "it is run once more, without an end"
    assert dies.json["traced"]["peak_allocated_bytes"] == found["peak_allocated_bytes"]


def test_a_program_that_skips_what_is_too_large_fits_and_says_how_often(project: Project) -> None:
    project.write("skips.py", SKIPS)
    said = project.run("predict", "--gpu", "sim:t4-16gb", "--", project.python, "skips.py").stdout
    assert said.startswith("Ran out of memory once at skips.py:8 and went on; the rest fits on NVIDIA T4: "), said
    traced = project.predict("python", "skips.py", gpu="t4-16gb").json["traced"]
    assert (traced["out_of_memory"]["times"], traced["out_of_memory"]["settled"]) == (1, None)
    assert traced["peak_allocated_bytes"] < 1 << 30 < traced["out_of_memory"]["reserved_bytes"]


EVALUATES = (
    _HEAD
    + """
    step(64); step(64); step(64)
    kept = []
    with torch.no_grad():
        for _ in range(9):
            try:
                kept.append(net(torch.randn(1 << 18, 1024, device="cuda")).repeat(1, 2))
            except torch.OutOfMemoryError:
                if sys.argv[1] == "dies":
                    raise
                kept.clear()
    step(64)
"""
)


def test_an_evaluation_that_runs_out_of_memory_is_followed_to_its_end(project: Project) -> None:
    """It is not over as memory runs out: the program may continue with it, and dies of it where it does not."""
    project.write("evaluates.py", EVALUATES)
    dies, goes_on = (
        project.predict("python", "evaluates.py", what, gpu="t4-16gb", options=("--through", "eval")).json["traced"]
        for what in ("dies", "continues")
    )
    assert dies["fit"] == "does not fit"
    assert dies["peak_allocated_bytes"] > 9 * (2 << 30) > goes_on["peak_allocated_bytes"]
    assert goes_on["fit"] == "fits"
    assert goes_on["out_of_memory"]["times"] > 0


def test_a_program_that_doubles_its_batch_is_followed_to_its_end_of_that(project: Project) -> None:
    project.write("doubles.py", DOUBLES)
    told = project.predict("python", "doubles.py", "512", gpu="t4-16gb").json["traced"]["out_of_memory"]
    assert told["settled"] == told["tried"][0] // 2 > 512


def test_free_memory_is_the_cards(project: Project) -> None:
    project.write("free.py", FREE)
    traced = project.predict("python", "free.py", gpu="t4-16gb").json["traced"]
    assert (traced["fit"], traced["out_of_memory"]) == ("fits", None)
    assert traced["peak_allocated_bytes"] > 1 << 30


@pytest.mark.scripts
@needs("accelerate")
def test_accelerates_finder_settles(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from accelerate.utils import find_executable_batch_size
        from torch import nn

        @find_executable_batch_size(starting_batch_size=1 << 18)
        def train(batch_size):
            net = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024)).cuda()
            opt = torch.optim.AdamW(net.parameters())
            for _ in range(9):
                net(torch.randn(batch_size, 1024, device="cuda")).pow(2).mean().backward()
                opt.step(); opt.zero_grad()

        train()
        """,
    )
    traced = project.predict("python", "train.py", gpu="t4-16gb").json["traced"]
    tried = traced["out_of_memory"]["tried"]
    assert tried[:2] == [1 << 18, int(0.9 * (1 << 18))]
    assert traced["out_of_memory"]["settled"] == int(0.9 * tried[-1])
    assert traced["fit"] == "fits"
    assert traced["buckets"]["parameters"] == pytest.approx(4 * (2 * 1024 * 8192 + 9216), rel=0.01)


@pytest.mark.scripts
@pytest.mark.slow
@needs("lightning")
def test_lightnings_finder_settles(project: Project) -> None:
    project.write(
        "train.py",
        """
        import lightning as L
        import torch
        from lightning.pytorch.callbacks import BatchSizeFinder
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        class Net(L.LightningModule):
            batch_size = 2

            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(256, 393216), nn.GELU(), nn.Linear(393216, 256))

            def training_step(self, batch, _):
                return self.net(batch[0]).pow(2).mean()

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

            def train_dataloader(self):
                return DataLoader(TensorDataset(torch.randn(1 << 16, 256)), batch_size=self.batch_size)

        finder = BatchSizeFinder(init_val=1024)
        L.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[finder]
        ).fit(Net())
        """,
    )
    traced = project.predict("python", "train.py", gpu="t4-16gb").json["traced"]
    told = traced["out_of_memory"]
    assert told["tried"] == [4096]
    assert told["settled"] == 2048
    assert traced["fit"] == "fits"


def test_lightnings_finder_is_known_by_the_name_it_had_before_its_second_version(project: Project) -> None:
    """In 1.9 the function has no underscore, and its absence would end the import."""
    project.write("pytorch_lightning/__init__.py", "")
    project.write("pytorch_lightning/tuner/__init__.py", "")
    project.write(
        "pytorch_lightning/tuner/batch_size_scaling.py",
        """
        import torch

        def scale_batch_size(fit, size):
            try:
                while True:
                    for _ in range(5):
                        fit(size)
                    size *= 2
            except torch.OutOfMemoryError:
                return size // 2
        """,
    )
    project.write(
        "train.py",
        _HEAD
        + """
    from pytorch_lightning.tuner.batch_size_scaling import scale_batch_size
    size = scale_batch_size(step, 4096)
    opt.zero_grad()
    gc.collect()
    for _ in range(9):
        step(size)
""",
    )
    told = project.predict("python", "train.py", gpu="t4-16gb").json["traced"]["out_of_memory"]
    assert told["settled"] == told["tried"][0] // 2 > 4096


@pytest.mark.scripts
@pytest.mark.slow
@needs("transformers", "accelerate")
def test_transformers_trainer_finds_its_batch(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        shape = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape))
        data = [{"input_ids": torch.arange(512), "labels": torch.arange(512)} for _ in range(4096)]
        how = dict(per_device_train_batch_size=256, auto_find_batch_size=True, max_steps=9, save_strategy="no")
        Trainer(model=model, args=TrainingArguments("out", report_to=[], **how), train_dataset=data).train()
        """,
    )
    traced = project.predict("python", "train.py", gpu="rtx-4070-12gb").json["traced"]
    told = traced["out_of_memory"]
    assert told["tried"][:2] == [256, 230]
    assert told["settled"] == int(0.9 * told["tried"][-1])
    assert traced["fit"] == "fits"


@pytest.mark.slow
def test_a_search_finds_the_largest_batch_that_never_runs_out(project: Project) -> None:
    project.write("halves.py", HALVES)
    project.write("plain.py", PLAIN)
    finds, plain = (
        project.search("python", script, "{batch}", *more, gpu="t4-16gb").lines[-1]
        for script, more in (("halves.py", ("1",)), ("plain.py", ()))
    )
    assert finds["max_batch_size"] == plain["max_batch_size"]
    assert finds["safe_batch_size"] == plain["safe_batch_size"]


def test_a_batch_that_is_too_large_for_a_finder_is_said_with_what_it_settles_at(project: Project) -> None:
    project.write("halves.py", HALVES)
    found = project.predict("python", "halves.py", "{batch}", "1", gpu="t4-16gb", options=("--batch-size", "300000"))
    told = found.json["traced"]["out_of_memory"]
    assert (told["tried"], told["settled"]) == ([300000, 150000], 75000)


@pytest.mark.slow
def test_a_plan_says_what_was_settled_at_with_each_change(project: Project) -> None:
    project.write("halves.py", HALVES)
    words = "plan", "--gpu", "sim:t4-16gb", "--what-if", "fused", "--", project.python, "halves.py", "1048576", "1"
    said = project.run(*words).stdout
    assert "Tried 1,048,576, settled at 65,536, which fits on NVIDIA T4" in said.splitlines()[0]
    assert "on another GPU it may settle at another batch" in said
    assert "| 65,536 |" in next(line for line in said.splitlines() if line.startswith("| fused optimizer step"))


@pytest.mark.slow
def test_tries_that_take_longer_together_than_a_step_may_are_waited_for(project: Project) -> None:
    project.write("halves.py", HALVES.replace("size //= 2", "size //= 2\n        import time; time.sleep(4)"))
    waits = ("--timeout", "6")
    traced = project.predict("python", "halves.py", "1048576", "1", gpu="t4-16gb", options=waits).json["traced"]
    assert traced["out_of_memory"]["settled"] == 65536


@pytest.mark.slow
def test_a_rank_of_several_settles_too(project: Project) -> None:
    wraps = 'torch.distributed.init_process_group("nccl"); net = nn.parallel.DistributedDataParallel(net)'
    project.write("halves.py", HALVES.replace("def step", f"{wraps}\n\n    def step", 1))
    words = "torchrun", "--nproc-per-node", "2", "halves.py", "1048576", "1"
    traced = project.predict(*words, gpu="t4-16gb").json["traced"]
    assert traced["out_of_memory"]["tried"][0] == 1048576
    assert traced["out_of_memory"]["settled"] in (32768, 65536)
    assert traced["fit"] == "fits"


def test_a_search_of_a_command_that_looks_for_its_batch_says_what_that_finds(project: Project) -> None:
    project.write("train.py", DOUBLES)
    found = project.search("python", "train.py", "{batch}", gpu="t4-16gb")
    *trials, result = found.lines
    assert (found.code, result["outcome"], result["verified"]) == (0, "found", False)
    size = result["max_batch_size"]
    assert result["safe_batch_size"] == size > 1 << 16
    assert [(trial["batch_size"], trial["outcome"]) for trial in trials] == [(size, "fit")]
    assert f"it tried {2 * size:,}, settled at {size:,}; {{batch}} is only where it begins" in result["message"]
