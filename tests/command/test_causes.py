"""Causes that have a name: what takes the memory, where, and the sentence that shows what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command.running import Project

MIB = 1 << 20


def causes(project: Project, name: str, *words: str, options: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The causes that are found in a script of the project, by name."""
    found = project.predict("python", name, *words, options=options).json["traced"]
    assert [cause["sentence"] for cause in found["causes"]] == [
        note for note in found["notes"] if note in {cause["sentence"] for cause in found["causes"]}
    ]
    return {cause["cause"]: cause for cause in found["causes"]}


# Memory that grows

LOOP = """\
    import torch
    from collections import deque
    from torch import nn
    {before}
    net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(9):
        out = net(torch.randn(1024, 256, device="cuda"))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph={retain})
        optimizer.step()
        {after}
"""

CLASS = """
    class Log:
        def __init__(self):
            self.by_name = {"loss": []}

        def put(self, value):
            self.by_name["loss"].append(value)

    log = Log()
"""


@pytest.mark.parametrize(
    ("before", "after", "name", "keeps"),
    [
        ("total = 0.0", "total += loss", "total", "total += loss"),
        ("total = 0.0", "total = total + loss", "total", "total = total + loss"),
        ("losses = []", "losses.append(loss)", "losses", "losses.append(loss)"),
        ("losses = deque(maxlen=100)", "losses.append({'a': loss})", "losses", "losses.append({'a': loss})"),
        ("losses = {}", "losses[step] = loss", "losses", "losses[step] = loss"),
        (CLASS, "log.put(loss)", "self.by_name", 'self.by_name["loss"].append(value)'),
    ],
    ids=["sum", "sum anew", "list", "deque of dicts", "dict", "attribute"],
)
def test_the_statement_that_keeps_graphs_is_named(
    project: Project, before: str, after: str, name: str, keeps: str
) -> None:
    path = project.write("train.py", LOOP.format(before=before, after=after, retain=True))
    leak = causes(project, "train.py")["leak"]
    lines = path.read_text().splitlines()
    assert lines[int(leak["kept_line"].removeprefix("train.py:")) - 1].strip() == keeps
    assert lines[int(leak["line"].removeprefix("train.py:")) - 1].strip().startswith("out = net(")
    assert leak["bytes"] == pytest.approx(1024 * (2048 + 2048 + 256 + 256) * 4, rel=0.5)
    assert f"`{name}` ({leak['kept_line']}) keeps what {leak['line']}" in leak["sentence"]
    assert leak["sentence"].endswith("by its graph; keep a number (`.item()`) or what has no graph (`.detach()`)")


def test_what_keeps_tensors_themselves_is_told_from_what_keeps_their_graph(project: Project) -> None:
    project.write("train.py", LOOP.format(before="outputs = []", after="outputs.append(out.detach())", retain=False))
    leak = causes(project, "train.py")["leak"]
    assert leak["bytes"] == MIB
    assert leak["sentence"].endswith("; keep a copy on the host (`.cpu()`), or drop it")


@pytest.mark.parametrize("after", ["pass", "losses.append(loss)", "losses.append(loss.item())"])
def test_no_leak_where_backward_releases_the_graph(project: Project, after: str) -> None:
    project.write("train.py", LOOP.format(before="losses = []", after=after, retain=False))
    assert "leak" not in causes(project, "train.py")


def test_the_first_line_says_for_how_many_steps_it_fits(project: Project) -> None:
    project.write("train.py", LOOP.format(before="total = 0.0", after="total += loss", retain=True))
    leak = causes(project, "train.py")["leak"]
    done = project.run("predict", "--gpu", "sim:a100-80gb", "--", project.python, "train.py")
    first, *_, last, _ = done.stdout.splitlines()
    assert f" fits for about {leak['steps_left']:,} steps" in first
    assert last == leak["sentence"]
    assert leak["steps_left"] * leak["bytes"] == pytest.approx(79 << 30, rel=0.02)


# Checkpoints that save nothing, and what gets no gradient

BLOCKS = """\
    import sys
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)
            )
            self.head = nn.Linear(512, 8)

        def run(self, x):
            for block in self.blocks:
                x = block(x)
            return x

        def forward(self, x):
            how = sys.argv[1]
            if how == "whole":
                x = checkpoint(self.run, x, use_reentrant=False)
            elif how == "reentrant":
                x = checkpoint(self.run, x, use_reentrant=True)
            elif how == "halves":
                x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
            else:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(16384, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_checkpoint_around_all_blocks_is_named_with_what_it_makes_again(project: Project) -> None:
    path = project.write("train.py", BLOCKS)
    found = project.predict("python", "train.py", "whole", options=("--by", "source")).json["traced"]
    [cause] = found["causes"]
    assert cause["cause"] == "whole_checkpoint"
    assert "is around 8 of 8 blocks at once; checkpoint each block" in cause["sentence"]
    again = 8 * 16384 * (2 * 2048 + 512) * 4
    assert cause["bytes"] == pytest.approx(again, rel=0.1)
    lines = path.read_text().splitlines()
    made = {held["source"]: held["bytes"] for held in found["composition"] if held["bucket"] == "activations"}
    named = [lines[int(source.rpartition(":")[2]) - 1].strip() for source, size in made.items() if size > MIB]
    assert named == ["x = block(x)"]


@pytest.mark.slow
def test_the_bytes_of_a_cause_are_those_of_the_batch_that_is_asked_for(project: Project) -> None:
    project.write("train.py", BLOCKS.replace("16384", "1024 * int(sys.argv[2])"))
    sizes = (4, 32)
    found = [
        causes(project, "train.py", "whole", "{batch}", options=("--batch-size", str(size)))["whole_checkpoint"][
            "bytes"
        ]
        for size in sizes
    ]
    assert found[1] == pytest.approx(8 * found[0], rel=0.01)
    trials = project.search("python", "train.py", "whole", "{batch}", options=("--limit", "4GiB")).lines[:-1]
    for trial in (trial for trial in trials if trial["outcome"] == "fit"):
        [cause] = trial["causes"]
        assert cause["bytes"] == pytest.approx(found[0] / sizes[0] * trial["batch_size"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "is_offered"), [("whole", True), ("reentrant", True), ("halves", True), ("each", False)]
)
def test_checkpointed_blocks_are_offered_unless_they_are_there(project: Project, how: str, is_offered: bool) -> None:
    project.write("train.py", BLOCKS)
    found = project.plan("python", "train.py", how, options=("--what-if", "checkpointing")).json
    [row] = [row for row in (*found["techniques"], *found["not_applicable"]) if row["key"] == "checkpointing"]
    assert ("peak_bytes" in row) is is_offered
    if how in ("whole", "reentrant"):
        each = project.predict("python", "train.py", "each").json["traced"]["peak_allocated_bytes"]
        assert row["peak_bytes"] == pytest.approx(each, rel=0.01)


def test_what_never_gets_a_gradient_within_a_reentrant_checkpoint_is_counted(project: Project) -> None:
    project.write("train.py", BLOCKS)
    cause = causes(project, "train.py", "reentrant")["no_gradient"]
    assert cause["bytes"] == 8 * (2 * 512 * 2048 + 2048 + 512) * 4
    assert "32 of 34, as blocks.0.0.weight; the reentrant checkpoint at train.py:24 gets no input" in cause["sentence"]
    assert "`use_reentrant=False` there, or `model.enable_input_require_grads()`" in cause["sentence"]
    assert "whole_checkpoint" not in causes(project, "train.py", "reentrant"), "backward makes nothing again"


def test_what_nothing_reaches_is_no_matter_of_checkpoints(project: Project) -> None:
    project.write("train.py", BLOCKS.replace("self.head(x)", "self.head(x.detach())"))
    assert causes(project, "train.py", "each")["no_gradient"]["sentence"].endswith(
        "32 of 34, as blocks.0.0.weight; leave them out of the optimizer, or look for what detaches them"
    )


# Evaluation

EVALUATES = """\
    import sys
    import torch
    from torch import nn

    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())])
    net = net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        net.train()
        for _ in range(3):
            net(torch.randn(64, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        for _ in range(2):
            x = torch.randn(65536, 512, device="cuda", requires_grad="attack" in sys.argv)
            with torch.set_grad_enabled("off" not in sys.argv):
                out = net(x)
            if "attack" in sys.argv:
                out.sum().backward()
        del out
"""


def test_an_evaluation_that_keeps_its_graph_is_named_and_mended_first(project: Project) -> None:
    project.write("train.py", EVALUATES)
    through = ("--through", "eval")
    cause = causes(project, "train.py", options=through)["evaluation_with_gradients"]
    assert cause["line"] == "train.py:18"
    assert cause["bytes"] > 12 * 65536 * 512 * 4, "what six blocks keep"
    assert cause["sentence"].endswith("train.py:18 evaluates with gradients; put it under `with torch.no_grad():`")
    found = project.plan("python", "train.py", options=(*through, "--what-if", "no-grad")).json
    [row] = [row for row in found["techniques"] if row["key"] == "no-grad"]
    off = project.predict("python", "train.py", "off", options=through).json["traced"]
    assert row["peak_bytes"] == off["peak_allocated_bytes"] < cause["bytes"]
    assert not off["causes"]


def test_an_evaluation_whose_gradients_are_asked_for_keeps_them(project: Project) -> None:
    project.write("train.py", EVALUATES)
    assert not causes(project, "train.py", "attack", options=("--through", "eval", "--steps", "3"))


# Buffers of engines for several GPUs

RANKS = """\
    import os
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("nccl")
    net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).cuda()
    net = FSDP(net) if "fsdp" in sys.argv else DDP(net, gradient_as_bucket_view="view" in sys.argv)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(32, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WEIGHTS = 8 * 2048 * 2048 * 4


@pytest.mark.parametrize(
    ("how", "expected"),
    [("ddp", ("temporary", "reduce buckets")), ("view", None), ("fsdp", ("temporary", "gathered parameters"))],
)
def test_buckets_and_gathered_weights_have_their_names(
    project: Project, how: str, expected: tuple[str, str] | None
) -> None:
    project.write("train.py", RANKS)
    launched = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", how)
    found = project.predict(*launched).json["traced"]
    parts = {(part["bucket"], part["part"]): part["bytes"] for part in found["parts"]}
    copies = [cause for cause in found["causes"] if cause["cause"] == "reduce_buckets"]
    if expected is None:
        assert not copies
        assert ("temporary", "reduce buckets") not in parts
        return
    assert parts[expected] == WEIGHTS
    assert [copy["bytes"] for copy in copies] == ([WEIGHTS] if how == "ddp" else [])
    assert [copy["line"] for copy in copies] == (["train.py:11"] if how == "ddp" else [])


# A program's requests to torch

CONVOLUTIONS = """\
    import sys
    import torch
    from torch import nn

    torch.backends.cudnn.enabled = "off" not in sys.argv
    kind, options = sys.argv[1], {"padding": 1}
    if kind == "grouped":
        options["groups"] = 4
    if kind == "depthwise":
        options["groups"] = 16
    if kind == "dilated":
        options = {"padding": 2, "dilation": 2}
    made = nn.ConvTranspose2d if kind == "transposed" else nn.Conv3d if kind == "volume" else nn.Conv2d
    size = (16, 64, 64) if kind == "volume" else (256, 256)
    net = made(16, 16, 1 if kind == "pointwise" else 3, **({} if kind == "pointwise" else options)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(4, 16, *size, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PATCHES = 16 * 9 * 256 * 256 * 4
SAMPLES = 4 * 16 * 256 * 256 * 4


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("plain", PATCHES),
        ("dilated", PATCHES),
        ("transposed", PATCHES),
        ("volume", 16 * 27 * 16 * 64 * 64 * 4),
        ("grouped", PATCHES // 4 + 2 * SAMPLES // 4 + SAMPLES),
        ("depthwise", 0),
        ("pointwise", 0),
    ],
)
def test_convolutions_without_cudnn_take_one_sample_s_patches(project: Project, kind: str, columns: int) -> None:
    project.write("train.py", CONVOLUTIONS)
    found = project.predict("python", "train.py", kind, "off", options=("--by", "operator")).json["traced"]
    assert "cuDNN" not in str(found["unknowns"]), "no workspace of cuDNN's"
    taken = [cause["bytes"] for cause in found["causes"] if cause["cause"] == "cudnn_off"]
    assert taken == ([columns] if columns else [])


GRAPHS = """\
    import sys
    import torch
    from torch import nn

    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    inputs = [torch.randn(1024 * rows, 1024, device="cuda") for rows in (16, 8, 4)]
    shared = torch.cuda.graph_pool_handle() if "shared" in sys.argv else None
    graphs = []
    for x in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.no_grad(), torch.cuda.graph(graphs[-1], pool=shared):
            out = net(x).sum()
    torch.cuda.empty_cache()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        net(torch.randn(8, 1024, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_each_graph_keeps_what_it_took_unless_it_shares_a_pool(project: Project) -> None:
    project.write("train.py", GRAPHS)
    own, shared = (project.predict("python", "train.py", *how).json["traced"] for how in ((), ("shared",)))
    more = own["peak_reserved_bytes"] - shared["peak_reserved_bytes"]
    assert more == pytest.approx(2 * (8 + 4) * 1024 * 1024 * 4, rel=0.05), "two results of each of the smaller ones"
    [cause] = own["causes"]
    assert cause["cause"] == "graph_pools"
    assert cause["bytes"] == pytest.approx(2 * (16 + 8 + 4) * 1024 * 1024 * 4, rel=0.1)
    assert "3 pools; capture them with one `pool=torch.cuda.graph_pool_handle()`" in cause["sentence"]
    assert not shared["causes"]


CASTS = """\
    import sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.table = nn.Linear(256, 256), nn.Parameter(torch.randn(1, 4096, 256), requires_grad=False)

        def forward(self, x):
            for _ in range(8):
                x = self.inner(x)
            return self.table.expand(64, -1, -1).bmm(x.unsqueeze(-1)) if "table" in sys.argv else x

    net = Net().cuda()
    optimizer = torch.optim.SGD(net.inner.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled="anew" not in sys.argv):
            loss = net(torch.randn(64, 256, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("how", "size_bytes", "line", "words"),
    [
        ("table", 64 * 4096 * 256 * 2, 13, "expanded to 64 times its memory; cast it before `expand`"),
        ("anew", 8 * 256 * 256 * 2, 12, "casts the same weights in every call; leave autocast's `cache_enabled` on"),
        ("plain", 0, 0, ""),
    ],
)
def test_what_autocast_copies_for_nothing_is_named(
    project: Project, how: str, size_bytes: int, line: int, words: str
) -> None:
    project.write("train.py", CASTS)
    found = causes(project, "train.py", how).get("casts")
    if not size_bytes:
        assert found is None
        return
    assert found is not None
    assert found["line"] == f"train.py:{line}"
    assert found["bytes"] == pytest.approx(size_bytes, rel=0.4), "of those that live at the peak"
    assert found["sentence"].endswith(words)


UPCAST = """\
    import sys
    import torch
    from torch import nn

    class Packed(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            packed = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
            self.weight = nn.Parameter(packed, requires_grad=False)

        def forward(self, x):
            weight = self.weight.repeat(1, 2).to(torch.bfloat16)
            return nn.functional.linear(x.to(torch.bfloat16), weight).to(x.dtype)

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(512))

        def forward(self, x):
            scale = x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            return self.weight * (x.float() * scale).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            make = Packed if "packed" in sys.argv else lambda *sizes: nn.Linear(*sizes, bias=False)
            self.norm = nn.LayerNorm(512) if "layernorm" in sys.argv else Norm()
            self.up, self.down = make(512, 2048), make(2048, 512)
            self.lora_a, self.lora_b = nn.Linear(512, 8, bias=False), nn.Linear(8, 512, bias=False)

        def forward(self, x):
            hidden = self.norm(x)
            return x + self.down(nn.functional.silu(self.up(hidden))) + self.lora_b(self.lora_a(hidden))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(1000, 512)
            self.blocks = nn.Sequential(*[Block() for _ in range(4)])

        def forward(self, ids):
            return self.blocks(self.embedding(ids))

    net = Net().requires_grad_(False).cuda()
    for name, weight in net.named_parameters():
        is_adapter, is_norm = "lora" in name, "norm" in name or "embedding" in name
        if weight.is_floating_point() and "full" not in sys.argv:
            weight.data = weight.data.to(torch.bfloat16)
            if is_adapter or ("cast" in sys.argv and is_norm):
                weight.data = weight.data.float()
        weight.requires_grad_(is_adapter)
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(torch.randint(0, 1000, (4096,), device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("how", "wide", "at"),
    [
        ("packed", 3, "return nn.functional.linear(x.to(torch.bfloat16), weight)"),
        ("plain", 0, "return x + self.down("),
    ],
)
def test_what_is_in_fp32_as_cast_norms_and_embeddings_are_is_counted(
    project: Project, how: str, wide: int, at: str
) -> None:
    path = project.write("train.py", UPCAST)
    cause = causes(project, "train.py", how, "cast")["upcasts"]
    assert cause["bytes"] == 4096 * (3 * 512 + wide * 2048) * 4, "of three blocks: the input, and what silu keeps"
    lines = path.read_text().splitlines()
    cast = lines.index("            weight.data = weight.data.float()") + 1
    assert lines[int(cause["line"].removeprefix("train.py:")) - 1].strip().startswith(at)
    assert f": most are made at {cause['line']}; " in cause["sentence"]
    assert f"5 norms and embeddings are in fp32 (train.py:{cast}), as blocks.0.norm.weight" in cause["sentence"]
    assert cause["sentence"].endswith("`for p in …: p.data = p.data.to(torch.bfloat16)`")


@pytest.mark.parametrize("how", [("packed",), ("plain",), ("full",), ("full", "layernorm")], ids=" ".join)
def test_autocast_s_own_fp32_is_no_cause(project: Project, how: tuple[str, ...]) -> None:
    project.write("train.py", UPCAST)
    assert "upcasts" not in causes(project, "train.py", *how)
