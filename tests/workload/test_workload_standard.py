"""Training the catalog's models: steps that train, recompute that changes memory only, refusals in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import RECOMPUTES, Precision, Recipe, Recompute
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.models import build_model
from gpumem_tui.workload.standard import CatalogWorkload
from tests.workload.tiny_shapes import BERT, GPT2, LLAMA, MLP, RESNET, TINY, VIT

CPU = torch.device("cpu")
PRECISIONS: tuple[Precision, ...] = ("fp32", "amp-bf16", "bf16")
SHAPES_AND_RECOMPUTES = [
    pytest.param(shape, recompute, id=f"{shape.name} {recompute}")
    for shape, recompute in product(TINY, RECOMPUTES)
    if recompute != "selective" or shape.record.has_attention
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only lose time to threads, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("shape", "recompute"), SHAPES_AND_RECOMPUTES)
def test_two_steps_train_every_parameter(shape: ModelShape, recompute: Recompute, precision: Precision) -> None:
    workload = CatalogWorkload(shape, Recipe(precision=precision, recompute=recompute))
    model, optimizer = workload.build(CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        workload.train_step(model, optimizer, workload.make_batch(3, CPU))
    for name, parameter in model.named_parameters():
        assert parameter in optimizer.state, f"{name} had no gradient"
        assert parameter.grad is None
        assert parameter.isfinite().all(), name
        assert parameter.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        # A pure bf16 weight near 1 moves by 2**-8 or not at all, which is more than one step's learning rate.
        assert precision == "bf16" or not torch.equal(parameter, before[name]), f"{name} did not move"


def test_channels_last_lays_images_and_weights_out_by_pixel_and_trains() -> None:
    workload = CatalogWorkload(RESNET, Recipe(channels_last=True))
    model, optimizer = workload.build(CPU)
    batch = workload.make_batch(3, CPU)
    laid_out = [one for one in (*model.parameters(), batch[0]) if one.dim() == 4]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in laid_out)
    workload.train_step(model, optimizer, batch)
    assert all(parameter in optimizer.state for parameter in model.parameters())


def test_frozen_weights_in_fp16_have_adapters_in_fp32() -> None:
    recipe = Recipe("fp16", adapter="lora", lora_rank=4, adapter_dtype="fp32")
    model, _ = CatalogWorkload(LLAMA, recipe).build(CPU)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {False: torch.float16, True: torch.float32}


def loss_and_gradients(shape: ModelShape, recompute: Recompute) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(1)
    model = build_model(shape, Recipe(recompute=recompute))
    inputs, targets = CatalogWorkload(shape, Recipe()).make_batch(3, CPU)
    logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("shape", "recompute"), [p for p in SHAPES_AND_RECOMPUTES if p.values[1] != "none"])
def test_recompute_changes_neither_loss_nor_gradients(shape: ModelShape, recompute: Recompute) -> None:
    loss, gradients = loss_and_gradients(shape, recompute)
    plain_loss, plain_gradients = loss_and_gradients(shape, "none")
    assert torch.equal(loss, plain_loss)
    torch.testing.assert_close(gradients, plain_gradients)


def saved_bytes(shape: ModelShape, recompute: Recompute) -> int:
    """Distinct storage that the forward pass keeps for backward, parameters aside."""
    model = build_model(shape, Recipe(recompute=recompute, attention="math"))
    inputs, _ = CatalogWorkload(shape, Recipe()).make_batch(3, CPU)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("shape", [GPT2, LLAMA, BERT, VIT, RESNET], ids=lambda shape: shape.name)
def test_full_recompute_keeps_less(shape: ModelShape) -> None:
    assert saved_bytes(shape, "full") < saved_bytes(shape, "none") / 2


def test_full_recompute_gains_nothing_on_an_mlp() -> None:
    assert saved_bytes(MLP, "full") == saved_bytes(MLP, "none")


@pytest.mark.parametrize("shape", [GPT2, LLAMA, BERT, VIT], ids=lambda shape: shape.name)
def test_selective_recompute_drops_the_attention_matrix(shape: ModelShape) -> None:
    probabilities_bytes = shape.layers * 3 * shape.heads * shape.tokens**2 * 4
    assert saved_bytes(shape, "none") - saved_bytes(shape, "selective") >= probabilities_bytes
    assert saved_bytes(shape, "selective") > saved_bytes(shape, "full")


def test_a_step_is_the_optimizers_step_on_the_gradient() -> None:
    workload = CatalogWorkload(MLP, Recipe(optimizer="sgd"))
    model, optimizer = workload.build(CPU)
    inputs, targets = workload.make_batch(3, CPU)
    F.cross_entropy(model(inputs), targets).backward()
    rate = optimizer.param_groups[0]["lr"]
    expected = [p.detach() - rate * p.grad for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    workload.train_step(model, optimizer, (inputs, targets))
    torch.testing.assert_close(list(model.parameters()), expected)


def test_fp16_scales_the_loss_and_still_takes_the_first_step() -> None:
    workload = CatalogWorkload(MLP, Recipe(precision="amp-fp16"))
    model, optimizer = workload.build(CPU)
    workload.train_step(model, optimizer, workload.make_batch(3, CPU))
    assert set(optimizer.state) == set(model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("precision", "logits_dtype"), [("fp32", torch.float32), ("amp-bf16", torch.bfloat16), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_precision_is_the_logits_precision(shape: ModelShape, precision: Precision, logits_dtype: torch.dtype) -> None:
    workload = CatalogWorkload(shape, Recipe(precision=precision))
    model, optimizer = workload.build(CPU)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits.dtype))
    workload.train_step(model, optimizer, workload.make_batch(2, CPU))
    assert seen == [logits_dtype]


@pytest.mark.parametrize(
    ("shape", "inputs", "targets"),
    [
        (GPT2, (5, 12), (5, 12)),
        (LLAMA, (5, 12), (5, 12)),
        (BERT, (5, 12), (5,)),
        (VIT, (5, 3, 16, 16), (5,)),
        (RESNET, (5, 3, 32, 32), (5,)),
        (MLP, (5, 20), (5,)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_batches(shape: ModelShape, inputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    def dtypes(precision: Precision) -> list[torch.dtype]:
        batch = CatalogWorkload(shape, Recipe(precision=precision)).make_batch(5, CPU)
        assert [tuple(tensor.shape) for tensor in batch] == [inputs, targets]
        return [tensor.dtype for tensor in batch]

    ids = shape.family in ("gpt2", "llama", "bert")
    assert dtypes("fp32") == dtypes("amp-bf16") == [torch.int64 if ids else torch.float32, torch.int64]
    assert dtypes("bf16") == [torch.int64 if ids else torch.bfloat16, torch.int64]


def test_build_is_on_the_device_and_leaves_the_default_dtype_alone() -> None:
    meta = torch.device("meta")
    model, _ = CatalogWorkload(BERT, Recipe(precision="bf16")).build(meta)
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {meta}
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(RuntimeError):
        CatalogWorkload(replace(MLP, hidden=-1), Recipe(precision="bf16")).build(CPU)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("shape", "recipe", "message"),
    [
        (
            RESNET,
            Recipe(recompute="selective"),
            "--recompute selective: tiny-resnet has no attention to recompute; use --recompute full or none",
        ),
        (
            MLP,
            Recipe(recompute="selective"),
            "--recompute selective: tiny-mlp has no attention to recompute; use --recompute full or none",
        ),
    ],
)
def test_refuses_at_once_what_it_cannot_run(shape: ModelShape, recipe: Recipe, message: str) -> None:
    with pytest.raises(WorkloadError) as refusal:
        CatalogWorkload(shape, recipe)
    assert str(refusal.value) == message


def test_sharding_needs_its_ranks() -> None:
    workload = CatalogWorkload(GPT2, Recipe(sharding="zero3", gpus=8))
    with pytest.raises(WorkloadError, match="--sharding zero3: this process is one of 1 ranks, not of 8"):
        workload.build(CPU)


def test_says_when_the_attention_kernel_does_not_exist_here() -> None:
    workload = CatalogWorkload(GPT2, Recipe(attention="efficient"))  # PyTorch has it on CUDA only
    model, optimizer = workload.build(CPU)
    with pytest.raises(WorkloadError) as refusal:
        workload.train_step(model, optimizer, workload.make_batch(2, CPU))
    assert str(refusal.value) == (
        "--attention efficient: PyTorch has no such kernel for float32 heads of width 8 on cpu; use --attention auto"
    )


def test_imports_nothing_that_a_users_interpreter_may_lack() -> None:
    code = (
        "import json, sys, gpumem_tui.workload.standard, gpumem_tui.workload.user_file\n"
        "print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded: list[str] = json.loads(result.stdout)
    assert not {"msgspec", "click", "textual", "platformdirs", "tomllib", "tomli"} & set(loaded)


def test_model_is_in_training_mode() -> None:
    model, _ = CatalogWorkload(GPT2, Recipe()).build(CPU)
    assert model.training
    assert any(isinstance(layer, nn.Dropout) and layer.p == 0.1 for layer in model.modules())
