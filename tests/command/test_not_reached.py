"""Evaluation, saving and resuming that a run has not come to: named, and followed where asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.run.later import Later, NotReached
from gpumem_tui.search.assumed import not_reached_line
from gpumem_tui.simulator.allocator.replay import AffineTrace
from tests.command.running import Finished, Project, needs
from tests.command.test_transformers import LLAMA
from tests.search.traces import traced as trace_of
from tests.search.traces import training

PLAIN = """
    import sys, torch
    from torch import nn

    net = nn.Linear(2000, 2000).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(1, int(sys.argv[1]) + 1):
        net(torch.randn(8, 2000, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("made", step)
        if step % 10 == 0:
            kept = [*net.state_dict().values(), *(one for state in optimizer.state.values() for one in state.values())]
            state = [one.clone() for one in kept]
            torch.save(state, "kept.pt")
            del state
"""
WEIGHTS_BYTES = 2000 * 2000 * 4


def line_of_steps(project: Project, *words: str, options: tuple[str, ...] = ()) -> str:
    done = project.run("predict", "--gpu", "sim:a100-80gb", *options, "--", project.python, *words)
    assert done.code == 0, done.stderr[-2000:]
    return next(line for line in done.stdout.splitlines() if " steps followed" in line)


def phases(traced: dict[str, Any]) -> list[str]:
    return [one["phase"] for one in traced["not_reached"]]


def trained(project: Project, *words: str, options: tuple[str, ...] = ()) -> Finished:
    line = ("train.py", "--output_dir", "out", "--per_device_train_batch_size", "2", "--report_to", "none", *words)
    return project.predict("python", *line, options=options)


def test_what_is_awaited_ends_the_wait_once_all_came() -> None:
    later = Later("all")
    later.came("saving", 0)
    assert later.begin(3)
    assert later.awaits("saving"), "a save before the first step is of less than is trained"
    later.came("evaluation", 3)
    later.came("saving", 5)
    assert later.is_over
    assert later.lines(5) == [
        "--through all: the evaluation after step 3 is part of this",
        "--through all: the save after step 5 is part of this",
    ]


def test_a_save_among_the_steps_needs_no_wait() -> None:
    later = Later("save")
    later.came("saving", 2)
    assert not later.begin(3)
    assert later.lines(3) == ["--through save: the save after step 2 is part of this"]


def test_a_program_that_declares_nothing_may_have_both_until_it_ends() -> None:
    later = Later()
    assert [one.phase for one in later.not_reached(has_ended=False)] == ["evaluation", "saving"]
    later.seemed("evaluation", 2)
    assert later.not_reached(has_ended=False) == (NotReached("saving", None, "--steps N"),)
    assert later.not_reached(has_ended=True) == ()


def test_the_words() -> None:
    step = trace_of(AffineTrace.constant(training({Bucket.PARAMETERS: MIB}, layers=1)), find_gpu("t4-16gb"))
    declared = (
        NotReached("evaluation", "eval_strategy every 1,000 steps", "--through eval"),
        NotReached("saving", "save_strategy every 50 steps", "--through save"),
        NotReached("resuming", "from a checkpoint", "--resume"),
    )
    unknown = NotReached("evaluation", None, "--steps N"), NotReached("saving", None, "--steps N")

    def words(*missing: NotReached, steps: int = 3) -> str:
        return not_reached_line(replace(step, done=replace(step.done, steps=steps, not_reached=missing)))

    assert words(*declared) == (
        "3 steps followed; not included: evaluation (eval_strategy every 1,000 steps), saving (every 50), resuming; "
        "--through all --resume follows them"
    )
    assert words(declared[1], steps=1) == (
        "1 step followed; not included: saving (save_strategy every 50 steps); --through save follows it"
    )
    assert words(*declared[1:]).endswith("; --through save --resume follows them")
    more = "such as evaluation or saving; --steps N follows more"
    assert words(*unknown) == f"3 steps followed; not included: anything after step 3, {more}"
    assert "such as saving;" in words(unknown[1])
    assert not words()
    assert not not_reached_line(step), "of a model of the catalog"


FSDP = """
    import os, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    linears = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(12)])
    net = FSDP(linears, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.cuda.current_device())
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(1, 13):
        net(torch.zeros(8, 1000).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 6:
            gathered = FullStateDictConfig(offload_to_cpu="host" in sys.argv, rank0_only="host" in sys.argv)
            with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT, gathered):
                state = net.state_dict()
            if rank == 0:
                torch.save(state, "whole.pt")
            del state
"""
RANKS = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py")


@pytest.mark.scripts
@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_whole_state_dict_is_gathered_on_every_rank(project: Project, rank: str) -> None:
    project.write("train.py", FSDP)
    options = ("--rank", rank, "--through", "save")
    saved = project.predict(*RANKS, options=options).json["traced"]
    assert (saved["steps"], phases(saved)) == (6, ["evaluation"])
    assert (saved["peak"]["operator"], saved["peak"]["source"]) == ("aten.clone", "train.py:21")
    assert saved["buckets"]["temporary"] > 12 * 1001 * 1000 * 4
    on_host = project.predict(*RANKS, "host", options=options).json["traced"]
    assert on_host["peak_allocated_bytes"] < 0.8 * saved["peak_allocated_bytes"]


@pytest.mark.scripts
def test_a_plain_script_gets_the_sentence_without_numbers(project: Project) -> None:
    project.write("train.py", PLAIN)
    assert line_of_steps(project, "train.py", "30") == (
        "3 steps followed; not included: anything after step 3, such as evaluation or saving; --steps N follows more"
    )
    ended = project.predict("python", "train.py", "2").json["traced"]
    assert (ended["steps"], ended["not_reached"]) == (2, []), "its own end is in the trace"


@pytest.mark.scripts
def test_a_run_goes_on_through_a_save(project: Project) -> None:
    """The state is copied on the GPU before it is written, as many programs gather it."""
    project.write("train.py", PLAIN)
    steps = project.predict("python", "train.py", "30").json["traced"]
    done = project.predict("python", "train.py", "30", options=("--through", "save"))
    saved = done.json["traced"]
    assert "made 10" in done.stderr
    assert "made 11" not in done.stderr
    assert saved["steps"] == 10
    assert phases(saved) == ["evaluation"]
    assert "--through save: the save after step 10 is part of this" in saved["notes"]
    assert saved["peak"]["source"] == "train.py:14"
    assert saved["peak_allocated_bytes"] > steps["peak_allocated_bytes"] + WEIGHTS_BYTES
    assert not (project.folder / "kept.pt").exists()


def test_a_model_of_the_catalog_has_no_such_phases(project: Project) -> None:
    done = project.run("predict", "--json", "--model", "mlp", "--batch-size", "2", "--gpu", "sim:t4-16gb")
    assert done.json["traced"].keys().isdisjoint(("steps", "not_reached"))


@pytest.mark.scripts
@needs("transformers", "accelerate")
def test_transformers_trainer_says_when_and_comes_to_it_sooner(project: Project) -> None:
    project.write("train.py", LLAMA)
    settings = (
        "--max_steps", "1000", "--eval_strategy", "steps", "--eval_steps", "500", "--save_strategy", "steps",
        "--save_steps", "50", "--per_device_eval_batch_size", "64", "--save_total_limit", "1",
    )  # fmt: skip
    older = project.write("out/checkpoint-40/optimizer.pt", "an earlier run's")
    traced = trained(project, *settings).json["traced"]
    assert traced["not_reached"] == [
        {"phase": "evaluation", "when": "eval_strategy every 500 steps", "reach": "--through eval"},
        {"phase": "saving", "when": "save_strategy every 50 steps", "reach": "--through save"},
        {"phase": "resuming", "when": "from a checkpoint", "reach": "--resume"},
    ]
    through = trained(project, *settings, options=("--through", "all")).json["traced"]
    assert (through["steps"], phases(through)) == (3, ["resuming"])
    assert (through["peak"]["phase"], through["peak"]["step"]) == ("evaluation", 4)
    assert through["peak_allocated_bytes"] > traced["peak_allocated_bytes"]
    assert [path.name for path in (project.folder / "out").iterdir()] == ["checkpoint-40"]
    assert older.exists(), "save_total_limit removes none"
    line = ("train.py", "--output_dir", "out", "--report_to", "none", *settings)
    assert line_of_steps(project, *line) == (
        "3 steps followed; not included: evaluation (eval_strategy every 500 steps), saving (every 50), resuming; "
        "--through all --resume follows them"
    )


PUSHING = """
    class Pushing(Trainer):
        def init_hf_repo(self, *_, **__):
            self.hub_model_id = "someone/net"

        def _push_from_checkpoint(self, folder):
            print("uploaded", folder)

"""


@pytest.mark.scripts
@needs("transformers", "accelerate")
def test_a_checkpoint_that_is_followed_is_not_uploaded(project: Project) -> None:
    project.write("train.py", LLAMA.replace("trainer = Trainer(", f"{PUSHING.strip()}\n\n    trainer = Pushing("))
    settings = ("--max_steps", "20", "--save_strategy", "steps", "--save_steps", "2", "--push_to_hub")
    done = trained(project, *settings)
    assert phases(done.json["traced"]) == ["resuming"], "it has saved"
    assert "uploaded" not in done.stderr


LIGHTNING = """
    import sys, torch
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(500, 2000), nn.ReLU(), nn.Linear(2000, 500))

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    batches = [DataLoader(TensorDataset(torch.zeros(rows, 500)), size) for rows, size in ((6400, 64), (8192, 8192))]
    saves = ModelCheckpoint(dirpath="kept", every_n_train_steps=int(sys.argv[1]), save_top_k=-1)
    lightning.Trainer(
        accelerator="gpu", devices=1, logger=False, callbacks=[saves], max_epochs=2, val_check_interval=40,
        num_sanity_val_steps=0,
    ).fit(Net(), *batches)
"""


@pytest.mark.scripts
@needs("lightning")
def test_lightnings_trainer_says_when_and_comes_to_it_sooner(project: Project) -> None:
    project.write("train.py", LIGHTNING)
    traced = project.predict("python", "train.py", "50").json["traced"]
    assert [(one["phase"], one["when"]) for one in traced["not_reached"]] == [
        ("evaluation", "val_check_interval every 40 batches"),
        ("saving", "ModelCheckpoint every 50 steps"),
        ("resuming", "from a checkpoint"),
    ]
    through = project.predict("python", "train.py", "50", options=("--through", "all")).json["traced"]
    assert (through["steps"], phases(through)) == (3, ["resuming"])
    assert (through["peak"]["phase"], through["peak"]["step"]) == ("evaluation", 4)
    assert "--through all: the save after step 3 is part of this" in through["notes"]
    among = project.predict("python", "train.py", "2").json["traced"]
    assert phases(among) == ["evaluation", "resuming"], "it has saved after its second step"
    assert not list(project.folder.glob("kept/*")), "a file without data is gone at the end"


@pytest.mark.scripts
@needs("accelerate")
def test_accelerates_numbered_checkpoints_are_neither_made_nor_removed(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        kept = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(project_config=kept)
        net = torch.nn.Linear(500, 500)
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        for step in range(1, 20):
            accelerator.backward(net(torch.zeros(4, 500, device=accelerator.device)).sum())
            optimizer.step()
            if step % 5 == 0:
                accelerator.save_state()
        """,
    )
    older = project.write("project/checkpoints/checkpoint_3/model.safetensors", "an earlier run's")
    assert phases(project.predict("python", "train.py").json["traced"]) == ["evaluation", "saving"]
    saved = project.predict("python", "train.py", options=("--through", "save")).json["traced"]
    assert (saved["steps"], phases(saved)) == (5, ["evaluation"])
    assert not [note for note in saved["notes"] if "not followed" in note]
    assert [path.name for path in older.parents[1].iterdir()] == ["checkpoint_3"]


@pytest.mark.scripts
@needs("transformers", "trl", "datasets", "tokenizers")
def test_trls_trainer_comes_to_a_save_and_writes_no_card_over_the_users(project: Project) -> None:
    project.write(
        "train.py",
        """
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "<eos>": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "[UNK]"}
        SFTTrainer(
            GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100)),
            args=SFTConfig("out", max_steps=400, save_steps=100, report_to=[], max_length=32),
            train_dataset=Dataset.from_dict({"text": ["a a a a a a a a"] * 64}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
        ).train()
        """,
    )
    card = project.write("out/README.md", "of the model that was trained before")
    saved = project.predict("python", "train.py", options=("--through", "save")).json["traced"]
    assert (saved["steps"], phases(saved)) == (3, ["resuming"])
    assert card.read_text() == "of the model that was trained before"
    assert [path.name for path in card.parent.iterdir()] == ["README.md"]


def state_in_first_forward(traced: dict[str, Any]) -> int:
    """Bytes of optimizer state in the first step's forward, which only a run that was resumed has."""
    first = next(one for one in traced["phases"] if (one["step"], one["phase"]) == (1, "forward"))
    return int(first["buckets"]["optimizer"])


@pytest.mark.scripts
@needs("transformers", "accelerate", "lightning")
@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate", "none"])
def test_a_run_begins_from_a_checkpoint(project: Project, library: str) -> None:
    words: tuple[str, ...] = ("5",)
    if library == "transformers":
        words = ("--output_dir", "out", "--report_to", "none")
    accelerated = PLAIN.replace("net = nn", "import accelerate\n    net = nn").replace(
        "for step", "net, optimizer = accelerate.Accelerator().prepare(net, optimizer)\n    for step"
    )
    scripts = {"transformers": LLAMA, "lightning": LIGHTNING, "accelerate": accelerated, "none": PLAIN}
    project.write("train.py", scripts[library])
    new = project.predict("python", "train.py", *words).json["traced"]
    resumed = project.predict("python", "train.py", *words, options=("--resume",)).json["traced"]
    assert not state_in_first_forward(new)
    said = [note for note in resumed["notes"] if note.startswith("--resume")]
    if library == "none":
        assert said == ["--resume: this program was not resumed: give it its own option for a checkpoint that exists"]
        return
    assert not said
    assert state_in_first_forward(resumed) == pytest.approx(resumed["buckets"]["optimizer"], rel=0.01)
    assert "resuming" not in phases(resumed)
    assert ("resuming" in phases(new)) == (library != "accelerate"), "which declares nothing"


@pytest.mark.scripts
@needs("transformers", "accelerate")
@pytest.mark.parametrize(
    ("settings", "when"),
    [
        (("--save_strategy", "no"), {}),
        (("--save_strategy", "no", "--do_eval"), {"evaluation": "do_eval after training"}),
        (("--eval_strategy", "epoch", "--save_strategy", "epoch", "--num_train_epochs", "2"),
         {"evaluation": "eval_strategy every epoch", "saving": "save_strategy every epoch"}),
        (("--max_steps", "20"), {"saving": "save_strategy at the end, step 20"}),
        (("--max_steps", "20", "--save_steps", "0.25", "--save_only_model"), {"saving": "save_strategy every 5 steps"}),
    ],
    ids=["none", "after", "epochs", "end", "share"],
)  # fmt: skip
def test_what_trainers_settings_come_to(project: Project, settings: tuple[str, ...], when: dict[str, str]) -> None:
    project.write("train.py", LLAMA)
    found = {one["phase"]: one["when"] for one in trained(project, *settings).json["traced"]["not_reached"]}
    found.pop("resuming", None)
    assert found == when
