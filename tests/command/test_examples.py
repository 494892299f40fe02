"""Ways to train that examples and tutorials show: threads, closures, copies, captured graphs, hooks."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts


def test_a_prefetcher_in_a_thread_of_the_program(project: Project) -> None:
    project.write(
        "train.py",
        """
    import queue
    import threading
    import torch
    from torch import nn

    class Prefetcher:
        def __init__(self, batches):
            self.ready, self.stream = queue.Queue(2), torch.cuda.Stream()
            threading.Thread(target=self.load, args=(batches,), daemon=True).start()

        def load(self, batches):
            for _ in range(batches):
                with torch.cuda.stream(self.stream):
                    self.ready.put(torch.randn(64, 1024).pin_memory().to("cuda", non_blocking=True).half())

        def next(self):
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.ready.get(timeout=60)
            batch.record_stream(torch.cuda.current_stream())
            return batch

    model = nn.DataParallel(nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batches = Prefetcher(9)
    for _ in range(9):
        batch = batches.next()
        assert batch.is_cuda and batch.device == torch.device("cuda:0")
        model(batch.float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    assert buckets["optimizer"] == 2 * 4 * (1024 * 1024 + 1024)


def test_gradient_penalty_averaged_copies_functions_and_a_closure(project: Project) -> None:
    project.write(
        "train.py",
        """
    import copy
    import torch
    from torch import nn
    from torch.func import functional_call
    from torch.optim.swa_utils import AveragedModel

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).cuda()
    average, frozen = AveragedModel(model), copy.deepcopy(model).requires_grad_(False)
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)

    def closure():
        optimizer.zero_grad()
        x = torch.randn(64, 1024, device="cuda", requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = ((slope.norm(2, dim=1) - 1) ** 2).mean() + Square.apply(model(x)).mean() + frozen(x).mean()
        loss = loss + functional_call(model, dict(model.named_parameters()), (x,)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return loss

    for _ in range(3):
        assert optimizer.step(closure).item() < 1e-5
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            shadow[name].mul_(0.9).add_(value, alpha=0.1)
""",
    )
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    one = 4 * (1024 * 1024 + 1024 + 1024 + 1)
    assert 3 * one <= buckets["parameters"] < 3 * one + 4096  # the model, its average and the frozen copy
    assert buckets["optimizer"] >= 4 * one  # LBFGS: the direction, the last gradient and a pair of its history


def test_an_optimizer_for_each_parameter_within_backward(project: Project) -> None:
    project.write(
        "train.py",
        """
    import torch
    from torch import nn

    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)]).cuda()
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(9):
        model(torch.randn(32, 1024, device="cuda")).sum().backward()
""",
    )
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    assert buckets["optimizer"] == 2 * 6 * 4 * 1024 * 1024
    assert buckets["gradients"] <= 2 * 4 * 1024 * 1024  # never those of all


@pytest.mark.parametrize("captured", ["step", "model"])
def test_a_captured_graph_is_traced_once_and_its_replays_count(project: Project, captured: str) -> None:
    project.write(
        "train.py",
        f"""
    import torch
    from torch import nn

    model, batch = nn.Linear(1024, 1024).cuda(), torch.randn(8, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if "{captured}" == "model":
        model = torch.cuda.make_graphed_callables(model, (batch,))
        for _ in range(9):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(batch).sum().backward()
        optimizer.step()
    for _ in range(9):
        batch.copy_(torch.randn(8, 1024))
        graph.replay()
""",
    )
    traced = project.predict("python", "train.py").json["traced"]
    assert traced["buckets"]["parameters"] == 4 * (1024 * 1024 + 1024)
    assert "CUDA graphs" in " ".join(traced["notes"])
    graphs = {"step": "a CUDA graph", "model": "2 CUDA graphs"}[captured]  # a forward and a backward
    assert f"; {graphs} of 24 to 60 MiB" in traced["context_source"]


@pytest.mark.parametrize(
    ("network", "least_mib"), [("nn.Linear(64, 64)", 130), ("nn.Conv2d(64, 64, 1)", 16), ("nn.LSTM(64, 64)", 16)]
)
def test_what_a_program_loads_of_cuda_tells_the_least_of_its_context(
    project: Project, network: str, least_mib: int
) -> None:
    """By an H200's driver: 610 MiB before a kernel, cuBLAS 130 more, cuDNN 16."""
    project.write(
        "train.py",
        f"""
    import torch
    from torch import nn

    model = {network}.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(9):
        found = model(torch.randn(64, 64, 64).cuda())
        (found[0] if isinstance(found, tuple) else found).sum().backward()
        optimizer.step()
""",
    )
    traced = project.predict("python", "train.py", gpu="h200-141gb").json["traced"]
    (context,) = (one for one in traced["unknowns"] if one["name"] == "CUDA context")
    assert context["low_bytes"] == (610 + least_mib - 15) * (1 << 20)


def test_what_programs_ask_of_tensors_and_of_cuda(project: Project) -> None:
    project.write(
        "train.py",
        """
    import copy
    import io
    import pickle
    import numpy
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    cuda = torch.device("cuda", 0)
    x = torch.arange(6.0).view(2, 3).to(0)
    assert torch.device(0) == cuda == x.device == x.untyped_storage().device == x.storage().device
    assert str(x.device) == "cuda:0" and x.get_device() == 0 and torch.get_device(x) == 0
    assert torch.tensor([1, 2], device=0).is_cuda and x.type() == "torch.cuda.FloatTensor"
    for other in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert other.device == cuda and other.tolist() == x.tolist()
    file = io.BytesIO()
    torch.save({"x": x, "host": torch.ones(3)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cuda")
    assert loaded["x"].tolist() == x.tolist() and loaded["host"].is_cuda
    try:
        numpy.asarray(x)
    except TypeError as error:
        assert "Tensor.cpu()" in str(error)
    else:
        raise AssertionError("a GPU's tensor is no array")
    assert torch.zeros(3, pin_memory=True).is_pinned() and not torch.zeros(3).is_pinned()
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.zeros(2).device == cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.zeros(2).device.type == "cpu"
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device == cuda and torch.randperm(4, generator=generator, device="cuda").is_cuda
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed_all(1)
    properties = torch.cuda.get_device_properties(x.device)
    assert properties.shared_memory_per_multiprocessor == 164 << 10 and properties.major == 8
    torch.cuda.memory._record_memory_history()
    assert torch.cuda.memory._snapshot()["segments"] == []
    assert torch.cuda.get_allocator_backend() == "native" and torch.cuda.nccl.version() > (2,)
    newest = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    assert torch.version.cuda.startswith("13." if newest else "12.")
    assert sorted(x.sum(1)) == [x[0].sum(), x[1].sum()] and [4, 5, 6][torch.tensor(1, device=cuda)] == 5
    assert float(torch.quantile(x, 0.5)) == 2.5 and repr(x.sum()) == "tensor(15., device='cuda:0')"

    model = torch.nn.Linear(3, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = DataLoader(
        TensorDataset(torch.randn(64, 3)), 8, shuffle=True, generator=torch.Generator(), pin_memory=True,
        num_workers=2, persistent_workers=True,
    )
    for (batch,) in data:
        assert batch.is_pinned()
        model(batch.to(cuda, non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_a_module_of_a_package_configured_by_a_file(project: Project) -> None:
    project.write("training/__init__.py", "")
    project.write("training/config.yaml", "batch: 16\nhidden: 1024\n")
    project.write(
        "training/run.py",
        """
    from pathlib import Path
    import torch
    import yaml

    def main():
        config = yaml.safe_load((Path(__file__).parent / "config.yaml").read_text())
        model = torch.nn.Linear(config["hidden"], config["hidden"]).to(torch.accelerator.current_accelerator())
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            model(torch.randn(config["batch"], config["hidden"], device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if __name__ == "__main__":
        main()
""",
    )
    project.write("train.sh", 'exec "$1" -m training.run')
    done = project.predict("sh", "train.sh", project.python)
    assert done.json["traced"]["buckets"]["optimizer"] == 2 * 4 * (1024 * 1024 + 1024)


def test_a_program_that_ends_by_itself_is_measured_up_to_there(project: Project) -> None:
    project.write(
        "train.py",
        """
    import torch

    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
""",
    )
    traced = project.predict("python", "train.py").json["traced"]
    assert traced["buckets"]["optimizer"] == 2 * 4 * (1024 * 1024 + 1024)
    assert "after 1 of 3" in " ".join(traced["notes"])
