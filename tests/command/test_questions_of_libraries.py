"""Questions of transformers, accelerate, diffusers, PEFT, torchvision and torch about tensors: answered as by a GPU's.

One script asks them all, of real tensors on the host and of the simulated GPU's; the answers must agree. Another
test looks through the libraries' source for questions about fake tensors that the script does not ask.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command.running import Project, needs

LIBRARIES = ("transformers", "accelerate", "diffusers", "peft")
pytestmark = [pytest.mark.scripts, needs(*LIBRARIES)]

ABOUT_FAKES = frozenset(("FakeTensor", "is_fake", "is_fake_tensor", "maybe_get_fake_mode", "detect_fake_mode"))
ASKED = {
    ("transformers/utils/import_utils.py", "is_fake_tensor"),
    ("transformers/utils/import_utils.py", "is_tracing"),
}
"""By file and function where the libraries say one of `ABOUT_FAKES`; the script below calls each."""

SCRIPT = """
    import copy, json, sys
    import torch
    from torch import nn

    place, answers = sys.argv[1], {}
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, 1024, device=place)
    scores = model(batch)
    scores.sum().backward()
    weight = model[0].weight
    tensors = {
        "parameter": weight, "gradient": weight.grad, "batch": batch, "activation": scores, "view": weight[:5],
        "mask": batch == 1, "on the host": torch.zeros(1024, 1024), "host parameter": nn.Linear(1024, 1024).weight,
    }

    def kinds(*found):  # a tensor's class by what programs can tell of it
        return [
            "P" if type(one) is nn.Parameter else "T" if type(one) is torch.Tensor else "?" for one in found
        ]

    def of_torch(x):
        import torch._subclasses.fake_tensor as fake_tensor
        from torch._subclasses import FakeTensor
        from torch.nn.parameter import is_lazy
        from torch.overrides import is_tensor_like
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        made = type(x)(x.detach(), requires_grad=False) if isinstance(x, nn.Parameter) else x
        return [
            isinstance(x, fake_tensor.FakeTensor), isinstance(x, FakeTensor), fake_tensor.is_fake(x),
            is_traceable_wrapper_subclass(x), is_tensor_like(x), torch.is_tensor(x), is_lazy(x),
            torch._is_functional_tensor(x), torch._C._functorch.is_functorch_wrapped_tensor(x),
            torch.compiler.is_compiling(), torch._dynamo.is_compiling(), torch.jit.is_tracing(),
            x.is_meta, x.is_sparse, x.is_nested, x.is_leaf, x.is_inference(), x.layout == torch.strided,
            x.untyped_storage().nbytes(), x.data_ptr() != 0, isinstance(x, nn.Buffer), isinstance(x, nn.Parameter),
            kinds(x, made, copy.copy(x.detach()), copy.deepcopy(x.detach()), torch.utils.data.default_collate([x])),
        ]

    def of_transformers(x):
        from transformers.pytorch_utils import id_tensor_storage
        from transformers.utils import generic, import_utils

        return [
            import_utils.is_fake_tensor(x), import_utils.is_tracing(x), import_utils.is_tracing(),
            import_utils.is_torchdynamo_compiling(), import_utils.is_torchdynamo_exporting(),
            import_utils.is_jit_tracing(), import_utils.is_torch_fx_proxy(x), import_utils.is_cuda_stream_capturing(),
            generic.is_tensor(x), id_tensor_storage(x)[2],
        ]

    def of_accelerate(x):
        from accelerate import init_empty_weights
        from accelerate.utils import modeling, operations, set_module_tensor_to_device

        module = nn.Module()
        module.p = nn.Parameter(x.detach().float(), requires_grad=False)
        there = []
        for device in ("meta", "cpu", place):
            set_module_tensor_to_device(module, "p", device, value=torch.zeros(x.shape))
            there += [kinds(module.p), module.p.device.type == device, module.p.requires_grad]
        with init_empty_weights():
            empty = nn.Linear(512, 512).weight
        return [
            there, kinds(empty), empty.device.type, operations.is_torch_tensor(x), operations.find_batch_size(x),
            kinds(operations.recursively_apply(lambda one: one, {"x": x})["x"]), modeling.id_tensor_storage(x)[2],
        ]

    def of_diffusers(x):
        from diffusers import UNet2DModel
        from diffusers.training_utils import EMAModel
        from diffusers.utils.torch_utils import is_compiled_module

        loaded = UNet2DModel.from_pretrained("unet")
        average = EMAModel([nn.Parameter(x.detach().float())])
        average.step([nn.Parameter(x.detach().float())])
        return [
            sorted(set(map(str, kinds(*loaded.parameters())))), loaded.device.type, str(loaded.dtype),
            is_compiled_module(model), kinds(*average.shadow_params), average.shadow_params[0].requires_grad,
        ]

    def of_peft(x):
        from peft import LoraConfig, get_peft_model
        from peft.utils.integrations import dequantize_module_weight, get_bnb_param_type, init_empty_weights

        layer = nn.Sequential(nn.Linear(8, 8)).to(place)
        if x.dim() == 2:
            layer[0].weight = nn.Parameter(x.detach().float())
        adapted = get_peft_model(layer, LoraConfig(r=2, target_modules=["0"], init_lora_weights="olora"))
        with init_empty_weights():
            empty = nn.Linear(512, 512).weight
        return [
            get_bnb_param_type(nn.Parameter(x.detach().float())), kinds(dequantize_module_weight(layer[0])),
            kinds(*adapted.parameters()), kinds(empty), empty.device.type,
        ]

    def of_classes(x):
        class Image(torch.Tensor):
            pass

        class Weight(nn.Parameter):
            pass

        image, weight = x.detach().as_subclass(Image), Weight(x.detach().float())
        return [
            [type(one).__name__ for one in (image, image + 1, image.to(place), image.cpu(), weight)],
            isinstance(image, Image), kinds(image.as_subclass(torch.Tensor)), isinstance(weight, nn.Parameter),
            type(torch.Tensor._make_subclass(Image, x.detach())).__name__,
        ]

    for ask in (of_torch, of_transformers, of_accelerate, of_diffusers, of_peft, of_classes):
        for name, tensor in tensors.items():
            answers[f"{ask.__name__} {name}"] = ask(tensor)
    with open(f"{place}.json", "w") as file:
        json.dump(answers, file)
    for _ in range(3):
        optimizer.step()
"""


def test_libraries_get_the_answers_that_a_gpu_gives(project: Project) -> None:
    script = project.write("ask.py", SCRIPT)
    project.write(
        "save.py",
        "import diffusers; diffusers.UNet2DModel(block_out_channels=(32, 64, 96, 128)).save_pretrained('unet')",
    )
    for line in (["save.py"], [script.name, "cpu"]):
        subprocess.run([sys.executable, *line], cwd=project.folder, check=True, capture_output=True)
    assert project.predict("python", script.name, "cuda").code == 0

    def answers(place: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((project.folder / f"{place}.json").read_text())
        return found

    real, simulated = answers("cpu"), answers("cuda")
    assert real
    assert {name: (answer, simulated[name]) for name, answer in real.items() if simulated[name] != answer} == {}


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_library_asks_about_fake_tensors_in_another_place(library: str) -> None:
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    assert {(str(path.relative_to(folder.parent)), name) for path, name in _asking(folder)} <= ASKED


def _asking(folder: Path) -> set[tuple[Path, str]]:
    """Return the files and functions of a library that name one of `ABOUT_FAKES`."""
    found = set()
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in ABOUT_FAKES):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef) and any(map(_is_about_fakes, ast.walk(function))):
                found.add((path, function.name))
    return found


def _is_about_fakes(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ABOUT_FAKES
