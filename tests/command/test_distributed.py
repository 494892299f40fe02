"""Scripts for several GPUs, as rank 0 of their world: what a rank holds, to the byte, and what collectives answer."""

from __future__ import annotations

import textwrap

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

MIB = 1 << 20
WIDTH, LAYERS, RANKS = 1024, 8, 4
MODEL = 4 * LAYERS * WIDTH * WIDTH

START = f"""
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
assert (dist.get_world_size(), dist.get_backend()) == ({RANKS}, "nccl")
"""
TRAIN = f"""
for _ in range(10):
    loss = model(torch.randn(4, {WIDTH}, device=rank)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINEARS = f"nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})])"

REPLICATED = f"""
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel({LINEARS}.to(rank), device_ids=[rank], **OPTIONS)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
SHARDED = f"""
from torch.distributed.fsdp import fully_shard

with torch.device("meta"):
    model = {LINEARS}
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
"""
SHARDED_FLAT = f"""
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

model = FSDP({LINEARS}, auto_wrap_policy=ModuleWrapPolicy({{nn.Linear}}), device_id=torch.cuda.current_device())
optimizer = torch.optim.AdamW(model.parameters())
"""
TENSOR_PARALLEL = f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (dist.get_world_size(),))
plan = {{str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range({LAYERS})}}
model = parallelize_module({LINEARS}.cuda(), mesh, plan)
optimizer = torch.optim.AdamW(model.parameters())
"""


def buckets(project: Project, *parts: str) -> dict[str, int]:
    """The buckets at the peak of a script that is started over `RANKS` GPUs."""
    project.write("train.py", "".join(textwrap.dedent(part) for part in parts))
    done = project.predict(*TORCHRUN, "train.py", options=("--steps", "2"))
    found: dict[str, int] = done.json["traced"]["buckets"]
    return found


TORCHRUN = ("python", "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS))


def test_a_replica_holds_everything_and_its_buckets(project: Project) -> None:
    held = buckets(project, START, REPLICATED.replace("**OPTIONS", ""), TRAIN)
    assert held["parameters"] == held["gradients"] == MODEL
    assert MODEL <= held["temporary"] < MODEL + 100 * MIB  # buckets, two cuBLAS workspaces, what SGD needs


def test_gradients_that_are_views_of_buckets_need_no_more(project: Project) -> None:
    held = buckets(project, START, REPLICATED.replace("**OPTIONS", "gradient_as_bucket_view=True"), TRAIN)
    assert held["parameters"] == held["gradients"] == MODEL
    assert held["temporary"] < 100 * MIB


def test_fully_sharded_holds_its_share(project: Project) -> None:
    held = buckets(project, START, SHARDED, TRAIN)
    assert held["parameters"] == MODEL // RANKS
    assert 0 <= held["optimizer"] - 2 * MODEL // RANKS <= LAYERS * 512  # a step count a layer
    assert held["other"] < MIB


def test_fully_sharded_flat_parameters_from_the_host(project: Project) -> None:
    held = buckets(project, START, SHARDED_FLAT, TRAIN)
    assert held["parameters"] == MODEL // RANKS
    assert held["optimizer"] == 2 * MODEL // RANKS


HYBRID = SHARDED.replace("fully_shard(layer)", "fully_shard(layer, mesh=mesh)").replace(
    "fully_shard(model)", "fully_shard(model, mesh=mesh)"
)


def test_every_group_of_ranks_that_communicates_has_nccls_buffers_on_the_device(project: Project) -> None:
    mesh = """
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    """
    nccl = []
    for parts in ((SHARDED,), (mesh, HYBRID)):
        project.write("train.py", "".join(textwrap.dedent(part) for part in (START, *parts, TRAIN)))
        traced = project.predict(*TORCHRUN, "train.py", options=("--steps", "2")).json["traced"]
        nccl += [one for one in traced["unknowns"] if one["name"] == "NCCL"]
        assert traced["device_used_bytes"] == traced["peak_reserved_bytes"] + traced["context_bytes"]
    one, two = nccl
    assert "buffers of one group," in one["source"]
    assert "buffers of 2 groups," in two["source"]
    kernels, pool = 170 * MIB, 512 * MIB
    connected = one["high_bytes"] - kernels - pool, two["high_bytes"] - kernels - 2 * pool
    assert connected[1] * 3 == connected[0] * 4, "two of two ranks, each without one of a tree's connections"


def test_a_single_rank_has_nccls_kernels_and_its_pool_on_the_device(project: Project) -> None:
    project.write(
        "train.py",
        """
        import os
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29518", RANK="0", WORLD_SIZE="1")
        model = torch.nn.Linear(8, 8).cuda()
        dist.init_process_group("nccl")
        if "alone" not in os.sys.argv:
            model = DistributedDataParallel(model, device_ids=[0])
        for step in range(10):
            model(torch.randn(8, 8).cuda()).mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        """,
    )
    options = ("--steps", "2", "--torch-version", "2.11")
    traced, alone = (
        project.predict("python", "train.py", *words, gpu="h200-141gb", options=options).json["traced"]
        for words in ((), ("alone",))
    )
    (nccl,) = (one for one in traced["unknowns"] if one["name"] == "NCCL")
    assert (nccl["low_bytes"], nccl["high_bytes"]) == (170 * MIB, 556 * MIB)
    assert "a single rank" in nccl["source"]
    assert not [one for one in alone["unknowns"] if one["name"] == "NCCL"], "none communicates"


def test_tensor_parallel_layers_hold_their_share(project: Project) -> None:
    held = buckets(project, START, TENSOR_PARALLEL, TRAIN)
    assert held["parameters"] == MODEL // RANKS
    assert held["optimizer"] == 2 * MODEL // RANKS


SEQUENCE_PARALLEL = f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm({WIDTH})
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in (({WIDTH}, 4096), (4096, {WIDTH})))
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

mesh = init_device_mesh("cuda", SHAPE, mesh_dim_names=("data", "tensor")[-len(SHAPE):])
cut = dict(norm=SequenceParallel(), up=ColwiseParallel(input_layouts=Shard(1)))
cut.update(down=RowwiseParallel(output_layouts=Shard(1)))
blocks = nn.ModuleList(Block() for _ in range(3)).cuda()
for block in blocks:
    parallelize_module(block, mesh["tensor"], cut)
    block.compile(fullgraph=True)
    if len(SHAPE) == 2:
        fully_shard(block, mesh=mesh["data"])
model = nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 512, {WIDTH}, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("shape", [f"({RANKS},)", f"(2, {RANKS // 2})"])
def test_sequence_parallel_blocks_are_compiled_in_one_graph(project: Project, shape: str) -> None:
    """With FSDP2 over the other half of the ranks as well: each rank holds its share of the matrices."""
    project.write("train.py", START + SEQUENCE_PARALLEL.replace("SHAPE", shape))
    traced = project.predict(*TORCHRUN, "train.py").json["traced"]
    matrices, norms = 3 * 2 * 4 * WIDTH * 4096 // RANKS, 3 * 2 * 4 * WIDTH
    assert matrices <= traced["buckets"]["parameters"] <= matrices + norms
    assert 2 * matrices <= traced["buckets"]["optimizer"] <= 2 * (matrices + norms) + MIB
    assert any("compiled, traced by" in note and "no frame ran eager" in note for note in traced["notes"])


COLLECTIVES = f"""
for device in ("cpu", "cuda"):
    given = torch.tensor([5.0, 7.0], device=device)
    parts = [torch.empty_like(given) for _ in range({RANKS})]
    dist.all_gather(parts, given)
    assert [part.tolist() for part in parts] == [[5, 7]] * {RANKS}
    whole = torch.empty({2 * RANKS}, device=device)
    dist.all_gather_into_tensor(whole, given)
    assert whole.tolist() == [5, 7] * {RANKS}
    share = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(share, whole)
    assert share.tolist() == [5 * {RANKS}, 7 * {RANKS}]
    dist.broadcast(given, 0)
    work = dist.all_reduce(given, async_op=True)
    assert work.get_future().wait()[0].tolist() == given.tolist() == [5 * {RANKS}, 7 * {RANKS}]
    dist.all_reduce(given, op=dist.ReduceOp.MAX)
    assert given.tolist() == [5 * {RANKS}, 7 * {RANKS}]
dist.barrier()
names = [None] * {RANKS}
dist.all_gather_object(names, "rank")
assert names == ["rank"] * {RANKS}
assert dist.get_world_size(dist.new_group([0, 1])) == 2
given = torch.empty(1 << 20, device="cuda")
parts = [torch.empty_like(given) for _ in range({RANKS})]
before = torch.cuda.memory_allocated()
work = dist.all_gather(parts, given, async_op=True)
assert torch.cuda.memory_allocated() - before == {RANKS} * given.nbytes, "in a row, as NCCL has them"
work.wait()
assert torch.cuda.memory_allocated() == before
torch.cuda.reset_peak_memory_stats()
dist.reduce_scatter(given, parts)
assert torch.cuda.max_memory_allocated() - before == {RANKS} * given.nbytes
assert torch.cuda.memory_allocated() == before
del given, parts
large = [torch.empty(9 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
with dist._coalescing_manager():
    for gradients in large:
        dist.all_reduce(gradients)
del large
model = {LINEARS}.cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


def test_collectives_answer_as_among_equals(project: Project) -> None:
    assert buckets(project, START, COLLECTIVES, TRAIN)["parameters"] == MODEL


REDUCED = f"""
model = {LINEARS}.cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
for _ in range(4):
    model(torch.randn(4, {WIDTH}, device="cuda")).sum().backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.WAIT()
    del works, work
    optimizer.step()
    optimizer.zero_grad()
    END
"""


@pytest.mark.parametrize(
    ("wait", "end", "gradients"),
    [
        ("wait", "", MODEL),
        ("get_future().wait", "torch.cuda.synchronize()", 2 * MODEL),
        ("get_future().wait", "", 3 * MODEL),
    ],
)
def test_what_a_collective_s_work_keeps_is_let_go_by_its_wait(
    project: Project, wait: str, end: str, gradients: int
) -> None:
    """Waiting for the future leaves it to the next collective, a step later: the gradients are there twice.

    A program that never waits for the GPU runs ahead of it, and those of all three short steps are there.
    """
    project.write("train.py", START + REDUCED.replace("WAIT", wait).replace("END", end))
    done = project.predict(*TORCHRUN, "train.py", options=("--steps", "3"))
    assert done.json["traced"]["highest"]["gradients"]["bytes"] == gradients


PIPELINE = f"""
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, wide = dist.get_rank(), 50_000
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
model = nn.Linear({WIDTH}, wide if rank == {RANKS - 1} else {WIDTH}, bias=False, device=device)
given = torch.empty(512, {WIDTH}, device=device, requires_grad=rank > 0)
stage = PipelineStage(model, rank, {RANKS}, device, input_args=given, output_args=model(given))
schedule = Schedule1F1B(stage, {2 * RANKS}, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(model.parameters())
batch = (torch.randn({2 * RANKS} * 512, {WIDTH}, device=device),) if rank == 0 else ()
target = torch.randint(wide, ({2 * RANKS} * 512,), device=device) if rank == {RANKS - 1} else None
for _ in range(3):
    schedule.step(*batch, target=target)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("rank", "width"), [(0, WIDTH), (RANKS - 1, 50_000)])
def test_any_rank_of_a_pipeline_is_followed(project: Project, rank: int, width: int) -> None:
    project.write("train.py", START.replace("torch.cuda.set_device(rank)", "") + PIPELINE)
    done = project.predict(*TORCHRUN, "train.py", options=("--rank", str(rank)))
    held = done.json["traced"]["buckets"]
    assert held["parameters"] == 4 * WIDTH * width
    assert held["optimizer"] == 2 * held["parameters"]
    assert any(note.startswith(f"rank {rank} alone is traced") for note in done.json["traced"]["notes"])


def test_a_rank_that_is_not_there(project: Project) -> None:
    project.write("train.py", START + TRAIN)
    done = project.predict(*TORCHRUN, "train.py", options=("--rank", "4", "--quiet"))
    assert done.code != 0
    assert done.stderr.splitlines()[-1].endswith("--rank 4: the command has 4 ranks, 0 to 3")


def test_a_rank_of_a_command_that_is_one_process(project: Project) -> None:
    alone = f"""
import torch
from torch import nn

rank = "cuda"
model = {LINEARS}.to(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    project.write("train.py", alone + TRAIN)
    done = project.predict("python", "train.py", options=("--rank", "1", "--quiet"))
    assert done.code == 2
    assert done.complaint.endswith("--rank 1: the command is one process; start it by its launcher")


def test_a_script_for_ranks_that_no_launcher_started(project: Project) -> None:
    project.write("train.py", START + TRAIN)
    done = project.predict("python", "train.py", options=("--quiet",))
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: train.py:7: ")
    assert "torchrun --nproc-per-node N` or give --gpus N" in done.complaint


def test_a_gpu_that_is_not_this_rank_s(project: Project) -> None:
    project.write("train.py", "import torch\ntorch.zeros(8, device='cuda:1')\n")
    alone = project.predict("python", "train.py", options=("--quiet",))
    assert "train.py:2: " in alone.complaint
    assert "cuda:1 of 1 GPU; several GPUs in one process are not simulated: write cuda:0 for each" in alone.complaint
    several = project.predict("python", "train.py", options=("--quiet", "--gpus", "2"))
    assert "several GPUs in one process are not simulated: write cuda:0 for each" in several.complaint


HALVES = """import torch
from torch import nn

front = nn.Linear(2048, 2048).to("cuda:0")
back = nn.Linear(2048, 2048).to("cuda:1")
optimizer = torch.optim.SGD([*front.parameters(), *back.parameters()])
for _ in range(3):
    back(front(torch.randn(4, 2048, device="cuda:0")).to("cuda:1")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_network_by_hand_over_two_gpus_of_a_process_is_refused_with_a_remedy_that_works(project: Project) -> None:
    project.write("train.py", HALVES)
    refused = project.predict("python", "train.py", options=("--quiet",))
    assert refused.code == 2
    assert refused.complaint.startswith("gpumem-tui: train.py:5: AcceleratorError: CUDA error: invalid device ordinal")
    assert "write cuda:0 for each" in refused.complaint
    assert "--gpus" not in refused.complaint
    project.write("train.py", HALVES.replace("cuda:1", "cuda:0"))
    assert project.predict("python", "train.py", options=("--quiet",)).code == 0


def test_synchronized_batch_norm(project: Project) -> None:
    project.write(
        "train.py",
        """
        import os
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)).cuda()
        model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10):
            model(torch.randn(8, 3, 32, 32).cuda()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py")
    assert done.code == 0, done.stderr
    convolved = 8 * 64 * 30 * 30 * 4
    assert done.json["traced"]["buckets"]["activations"] >= 2 * convolved  # what batch norm and ReLU keep


def test_fsdp_with_original_parameters_and_a_distributed_checkpoint(project: Project) -> None:
    project.write(
        "train.py",
        """
        import os
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as checkpoint
        from torch import nn
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)),
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(10):
            model(torch.randn(8, 1024).cuda()).mean().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            weights, states = get_state_dict(model, optimizer)
            assert sorted(states["state"]) == sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
            assert all(sorted(state) == ["exp_avg", "exp_avg_sq", "step"] for state in states["state"].values())
            checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id="saved")
        """,
    )
    done = project.predict("python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py")
    assert done.code == 0, done.stderr
    shard = 4 * (2 * 1024 * 4096 + 4096 + 1024) // 4
    assert done.json["traced"]["buckets"]["optimizer"] == pytest.approx(2 * shard, rel=0.01)
    assert not (project.folder / "saved").exists()


def test_fsdp_of_adapters_with_original_parameters_and_checkpointing(project: Project) -> None:
    project.write(
        "train.py",
        """
        import os
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.down = nn.Linear(1024, 8, bias=False)
                self.up = nn.Linear(8, 1024, bias=False)
                self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)

            def forward(self, x):
                return x + torch.relu(self.base(x) + self.up(self.down(x)))

        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = FullyShardedDataParallel(
            nn.Sequential(*[Adapted() for _ in range(4)]),
            auto_wrap_policy=ModuleWrapPolicy({Adapted}),
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
        )
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Adapted))
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        for step in range(10):
            model(torch.randn(8, 1024, device="cuda")).mean().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert done.code == 0, done.stderr
    held = done.json["traced"]["buckets"]
    adapters = 4 * 2 * 8 * 1024
    assert held["parameters"] == 4 * (4 * 1024 * 1024 + adapters) // 2
    assert held["optimizer"] == 4 * 2 * adapters  # all of them are in the first half of their layer, which is rank 0's


RATE_LIMITER = f"""
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def gathered(limited):
    model = FSDP(nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range({LAYERS})]).cuda(),
                 auto_wrap_policy=ModuleWrapPolicy({{nn.Linear}}), limit_all_gathers=limited)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model(torch.randn(1, 4096, device="cuda"))
    return torch.cuda.memory_reserved() - before

with torch.no_grad():
    limited, unlimited = gathered(limited=True), gathered(limited=False)
layer = 4 * 4096 * 4096
assert unlimited - limited == ({LAYERS} - 2) * layer, (limited, unlimited)
assert limited < 4 * layer, limited
"""


def test_fsdp_gathers_ahead_as_far_as_its_rate_limiter_lets_it(project: Project) -> None:
    held = buckets(project, START, RATE_LIMITER, REPLICATED.replace("**OPTIONS", ""), TRAIN)
    assert held["parameters"] >= LAYERS * 4 * 4096 * 4096 // RANKS
