"""Parts of libraries that scripts cannot run without a GPU: operators of their own, compilation, saved files."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = pytest.mark.scripts

CUSTOM_OPERATOR = """
    import torch
    from torch import nn

    library = torch.library.Library("mine", "DEF")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.impl("scale", lambda x, by: x * by, "CUDA")
    %s

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.ops.mine.scale(x, 2.0)

        @staticmethod
        def backward(ctx, gradient):
            assert gradient.is_cuda
            return gradient * torch.tensor(2.0, device=gradient.device)

    layer = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(10):
        Scale.apply(layer(torch.randn(64, 512, device="cuda"))).sum().backward()
        optimizer.step()
"""
LIKE_ITS_INPUT = 'torch.library.register_fake("mine::scale")(lambda x, by: torch.empty_like(x))'

SAVING = """
    import threading

    import torch
    from torch import nn

    layer = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    torch.save({"names": ["a", "b"], "means": torch.ones(3)}, "data.pt")
    print("read", torch.load("data.pt")["means"].sum().item())
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1000).to("cuda", non_blocking=True)))
    thread.start()
    thread.join()
    print("thread", found[0].is_cuda, found[0].device)
    for step in range(10):
        layer(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.pt")
"""

COMPILED = """
    import torch
    from torch import nn

    @torch.compile
    def never_called(x):
        return x

    @torch.compile(dynamic=False)
    def loss_of(found):
        return found.square().mean()

    layer = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(10):
        found = layer(torch.randn(8, 64, device="cuda"))
        (%s(found)).sum().backward()
        optimizer.step()
"""


def test_an_operator_with_a_fake_implementation_is_followed(project: Project) -> None:
    project.write("train.py", CUSTOM_OPERATOR % LIKE_ITS_INPUT)
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    assert buckets["parameters"] == 4 * (512 * 512 + 512)


def test_an_operator_without_one_is_one_line(project: Project) -> None:
    project.write("train.py", CUSTOM_OPERATOR % "")
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "mine.scale" in done.complaint
    assert "train.py:13" in done.complaint


OWN_BODY = """
    import torch

    @torch.library.custom_op("mine::widened", mutates_args=())
    def widened(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (wide + %s).float()

    widened.register_fake(torch.empty_like)
    widened.register_autograd(lambda _, gradient: gradient)
    layer = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        widened(layer(torch.randn(1024, 1024, device="cuda"))).sum().backward()
        optimizer.step()
"""


def test_what_an_operator_takes_within_itself_is_traced(project: Project) -> None:
    """At the peak, next to the layer's result: doubles of it, of their sine, of both's sum."""
    project.write("train.py", OWN_BODY % "wide.sin()")
    traced = project.predict("python", "train.py").json["traced"]
    largest = {(one["operator"], one["bytes"]) for one in traced["composition"] if one["source"].startswith("train.py")}
    assert {("aten.sin", 8 * 1024 * 1024), ("aten.add", 8 * 1024 * 1024)} <= largest
    assert not any("widened" in note for note in traced["notes"])


def test_an_operator_that_cannot_be_run_is_taken_for_its_result(project: Project) -> None:
    project.write("train.py", OWN_BODY % 'torch.from_file("missing.bin", size=1)')
    notes = project.predict("python", "train.py").json["traced"]["notes"]
    assert any(note.startswith("train.py:14: what mine.widened.default takes within itself") for note in notes)


def test_an_extension_compiled_for_cuda_is_named(project: Project) -> None:
    project.write("train.py", "import torch\nimport deform_conv_cuda\n")
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "train.py:2" in done.complaint
    assert "deform_conv_cuda" in done.complaint
    assert "compiled for CUDA" in done.complaint


def test_data_is_saved_and_checkpoints_are_not(project: Project) -> None:
    project.write("train.py", SAVING)
    done = project.predict("python", "train.py")
    assert "| read 3.0" in done.stderr
    assert "| thread True cuda:0" in done.stderr
    assert (project.folder / "data.pt").exists()
    assert not (project.folder / "checkpoint.pt").exists()
    assert any("checkpoint" in note and "train.py:19" in note for note in done.json["traced"]["notes"])


def test_what_a_program_does_to_its_checkpoints_goes_on(project: Project) -> None:
    """As timm's saver: write, rename, copy or link, remove the oldest."""
    best = project.write("best.pth", "another run's")
    project.write(
        "train.py",
        """
        import os, shutil, torch
        from pathlib import Path

        layer = torch.nn.Linear(1000, 1000, bias=False).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(3):
            torch.save({"model": layer.state_dict()}, "tmp.pth")
            os.replace("tmp.pth", "last.pth")
            assert os.path.getsize("last.pth") == 4_000_000 and not os.path.exists("tmp.pth")
            os.link("last.pth", f"epoch-{step}.pth")
            shutil.copy2("last.pth", "best.pth")
            shutil.move(f"epoch-{step}.pth", f"kept-{step}.pth")
            Path(f"kept-{step}.pth").rename(f"epoch-{step}.pth")
            if step:
                os.remove(f"epoch-{step - 1}.pth")
            layer(torch.randn(4, 1000).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert sorted(file.name for file in project.folder.iterdir()) == ["best.pth", "train.py"]
    assert best.read_text() == "another run's"


def test_compilation_is_noted_where_it_is_used(project: Project) -> None:
    project.write("train.py", COMPILED % "loss_of")
    project.write("other.py", COMPILED % "torch.square")
    used, unused = (project.predict("python", name).json["traced"]["notes"] for name in ("train.py", "other.py"))
    assert any("torch.compile" in note for note in used)
    assert not any("nothing was compiled" in note for note in used)
    assert any("nothing was compiled" in note for note in unused)


def test_what_another_torch_would_compile_is_an_estimate(project: Project) -> None:
    project.write("train.py", COMPILED % "loss_of")
    project.write("other.py", COMPILED % "torch.square")
    as_another = ("--torch-version", "2.12")
    compiled, eager = (project.predict("python", name, options=as_another) for name in ("train.py", "other.py"))
    assert (compiled.json["traced"]["fit"], eager.json["traced"]["fit"]) == ("may fit", "fits")


QUESTIONS = """
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import set_module_tensor_to_device
    from transformers.utils import import_utils

    layer = torch.nn.Linear(1024, 1024)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(1024, 1024))
    with init_empty_weights():
        assert torch.nn.Linear(1024, 1024).weight.device.type == "meta"
    layer.cuda()
    mask = torch.ones(2, 16, device="cuda")
    for tensor in (layer.weight, mask, layer(torch.zeros(2, 1024, device="cuda"))):
        assert not import_utils.is_fake_tensor(tensor) and not import_utils.is_tracing(tensor)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        layer(torch.zeros(2, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""


@needs("accelerate", "transformers")
def test_libraries_find_nothing_that_is_traced(project: Project) -> None:
    project.write("train.py", QUESTIONS)
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
