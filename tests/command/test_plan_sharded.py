"""A program that no option shards is run sharded, and lists lines to write: written into it, they take equal memory."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

import pytest

from tests.command.running import BLOCK, Project, needs

pytestmark = pytest.mark.scripts

GPUS = 4
BLOCKS = (
    """
    import os
    import sys

    import torch
    from torch import nn
    from torch.nn import functional as F

    replicated = "RANK" in os.environ and "without" not in sys.argv
    WIDTH, CLASSES = 256, 4096


"""
    + BLOCK
    + """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({
                "embed": nn.Embedding(CLASSES, WIDTH), "blocks": nn.ModuleList(Block() for _ in range(4))
            })
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)
            self.head.weight = self.parts.embed.weight

        def forward(self, x):
            x = self.parts.embed(x)
            for block in self.parts.blocks:
                x = block(x)
            return self.head(x)


    def batch(size=256):
        return torch.randint(0, CLASSES, (size,), device="cuda")
"""
)
LOOP = """
    net = Model().to("cuda")
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    while True:
        tokens = batch()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
REPLICATED = """
    if "RANK" in os.environ:
        torch.distributed.init_process_group()
    net = Model().to("cuda")


    def optimizer_of(model):
        wide = [one for one in model.parameters() if one.dim() > 1]
        return torch.optim.AdamW([{"params": wide}, {"params": [one for one in model.parameters() if one.dim() < 2]}])


    net = nn.parallel.DistributedDataParallel(net) if replicated and WRAPPED_FIRST else net
    optimizer = optimizer_of(net)
    net = nn.parallel.DistributedDataParallel(net) if replicated and not WRAPPED_FIRST else net
    while True:
        for last in (False, True):
            if replicated:
                net.require_backward_grad_sync = last
            tokens = batch()
            F.cross_entropy(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """
    class Trainer:
        def __init__(self):
            self.model = Model().to("cuda")
            self.heads = nn.Linear(WIDTH, 2)

        def train(self):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            while True:
                tokens = batch()
                F.cross_entropy(self.model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()


    Trainer().train()
"""
STAGES = """
    def stage(width):
        return nn.Sequential(nn.Conv2d(3 if width == 32 else width // 2, width, 3, 2), *(Unit(width) for _ in range(2)))


    class Unit(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

        def forward(self, x):
            return x + self.norm(self.convolution(x)).relu()


    layers = nn.Sequential(stage(32), stage(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.Adam(layers.parameters())
    while True:
        images = torch.randn(8, 3, 64, 64, device="cuda")
        F.cross_entropy(layers(images), torch.randint(0, 10, (8,), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SHARD_THE_BLOCKS = "for block in net.parts.blocks: fully_shard(block)"


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (LOOP, (SHARD_THE_BLOCKS, "fully_shard(net)")),
        (REPLICATED.replace("WRAPPED_FIRST", "False"), (SHARD_THE_BLOCKS, "fully_shard(net)")),
        (REPLICATED.replace("WRAPPED_FIRST", "True"), (SHARD_THE_BLOCKS, "fully_shard(net)")),
        (TRAINER, ("for block in self.model.parts.blocks: fully_shard(block)", "fully_shard(self.model)")),
        (STAGES, ("for block in (*layers[0][1:3], *layers[1][1:3]): fully_shard(block)", "fully_shard(layers)")),
    ],
    ids=["clipped and scaled", "replicated after", "replicated before", "a trainer", "stages"],
)
def test_what_it_says_to_write_takes_to_the_byte_what_it_was_run_with(
    project: Project, program: str, lines: tuple[str, ...]
) -> None:
    script = textwrap.dedent(BLOCKS) + textwrap.dedent(program)
    project.write("train.py", script)
    options = ("--what-if", "sharded", "--quiet", *(("--gpus", str(GPUS)) if "RANK" in program else ()))
    done = project.plan("python", "train.py", options=options)
    row = next(row for row in done.json["techniques"] if row["key"] == "sharded")
    assert row["source"] == "traced"
    assert not any(row["key"].startswith("zero") for row in done.json["techniques"]), "no formula next to the run"
    place, *written = row["in_the_program"]
    assert set(lines) <= set(written)
    assert ("without DistributedDataParallel" in written) == ("RANK" in program)

    file, number = place.removeprefix("before ").removesuffix(":").split(":")
    before = script.splitlines()[: int(number) - 1]
    after = script.splitlines()[int(number) - 1 :]
    indent = after[0][: len(after[0]) - len(after[0].lstrip())]
    new = [indent + line for line in written if not line.startswith("without")]
    project.write(file, "\n".join((*before, *new, *after)))
    copied = project.predict(*shlex.split(row["command"]), "without", options=("--quiet",)).json
    assert copied["workload"]["gpus"] == (GPUS if "RANK" in program else 8)
    assert _figures(copied["traced"], "peak_allocated_bytes") == _figures(row, "peak_bytes")


def test_of_a_sharded_model_each_block_is_compiled(project: Project) -> None:
    """Whichever of the two was there before: what is sharded may be compiled too, in a set of changes as well."""
    lines = (
        "from torch.distributed.fsdp import fully_shard\n    for block in net.parts.blocks:\n        fully_shard(block)"
    )
    sharded = LOOP.replace("    scaler =", f"    {lines}\n    fully_shard(net)\n    scaler =")
    compiled = sharded.replace("fully_shard(block)", "fully_shard(block).compile()")
    project.write("train.py", textwrap.dedent(BLOCKS) + textwrap.dedent(sharded))
    project.write("compiled.py", textwrap.dedent(BLOCKS) + textwrap.dedent(compiled))
    words = ("torchrun", "--nproc-per-node", str(GPUS))
    planned = project.plan(*words, "train.py", options=("--what-if", "compile", "--quiet")).json
    (row,) = (row for row in planned["techniques"] if row["key"] == "compile")
    by_hand = project.predict(*words, "compiled.py", options=("--quiet",)).json["traced"]
    assert any("torch.compile: 1 graph compiled" in note for note in by_hand["notes"])
    assert _figures(row, "peak_bytes") == _figures(by_hand, "peak_allocated_bytes")


LIGHTNING = """
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))

        def training_step(self, batch, index):
            return self.blocks(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    options = dict(accelerator="gpu", logger=False, enable_checkpointing=False)
    data = DataLoader(TensorDataset(torch.randn(256, 256)), 32)
    L.Trainer(devices=1, **options).fit(Model(), data)
"""


@needs("lightning")
def test_lightnings_trainer_is_told_to_shard_in_its_own_words(project: Project) -> None:
    project.write("train.py", LIGHTNING)
    options = ("--what-if", "sharded", "--quiet", "--gpus", str(GPUS))
    (row,) = (
        row for row in project.plan("python", "train.py", options=options).json["techniques"] if row["key"] == "sharded"
    )
    assert row["source"] == "traced"
    assert row["command"].endswith("/python train.py"), "Lightning starts its ranks itself"
    assert row["in_the_program"] == [f"Trainer(strategy='fsdp', devices={GPUS})"]
    project.write("train.py", LIGHTNING.replace("Trainer(devices=1", row["in_the_program"][0][:-1]))
    copied = project.predict("python", "train.py", options=("--quiet", "--gpus", str(GPUS))).json["traced"]
    assert _figures(copied, "peak_allocated_bytes") == _figures(row, "peak_bytes")
    assert row["buckets"]["optimizer"] == pytest.approx(2 * 4 * 4 * (256 * 256 + 256) / GPUS, rel=0.01)


def _figures(found: dict[str, Any], peak: str) -> tuple[Any, ...]:
    return found[peak], found["peak_reserved_bytes"], found["buckets"]
