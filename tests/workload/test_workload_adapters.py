"""LoRA and QLoRA on the catalog's networks: what is in memory is what the closed form counts, and it trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import BASE_QUANTIZATIONS, BaseQuantization, Recipe
from gpumem_tui.formula.weights import kept_bytes, trained_parameters
from gpumem_tui.step.workload import WorkloadError
from gpumem_tui.workload.hugging_face import chosen
from gpumem_tui.workload.quantized import QuantizedLinear
from gpumem_tui.workload.standard import CatalogWorkload
from gpumem_tui.workload.trained import DoraLinear
from tests.workload.tiny_shapes import DEEPSEEK, GPT_OSS, QWEN_MOE

CPU = torch.device("cpu")
TINY: dict[str, ModelShape] = {
    "llama": find_model("llama-3.2-1b").overridden(layers=2, hidden=64, heads=4, kv_heads=2, vocab=100, seq_len=16),
    "gpt2": find_model("gpt2").overridden(layers=2, hidden=64, heads=4, vocab=100, seq_len=16),
    "qwen-moe": QWEN_MOE,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
}


def recipe(quantization: BaseQuantization = "none", targets: str = "all-linear") -> Recipe:
    return Recipe("bf16", adapter="lora", lora_rank=4, lora_targets=targets, base_quantization=quantization)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("quantization", BASE_QUANTIZATIONS)
def test_bytes_and_trained_values_are_those_of_the_formula(family: str, quantization: BaseQuantization) -> None:
    shape, wanted = TINY[family], recipe(quantization)

    model, _ = CatalogWorkload(shape, wanted).build(CPU)

    assert sum(p.numel() * p.element_size() for p in model.parameters()) == kept_bytes(shape, wanted)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained_parameters(shape, wanted)


@pytest.mark.parametrize("quantization", BASE_QUANTIZATIONS)
def test_a_step_changes_the_adapters_and_nothing_else(quantization: BaseQuantization) -> None:
    workload = CatalogWorkload(TINY["llama"], recipe(quantization, "q_proj,down_proj"))
    model, optimizer = workload.build(CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    workload.train_step(model, optimizer, workload.make_batch(2, CPU))

    changed = {name for name, value in model.named_parameters() if not _equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert len(changed) == 2 * 2 * 2
    assert all(torch.isfinite(value.float()).all() for value in model.parameters() if value.is_floating_point())


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_dora_in_fp32_has_magnitudes_and_trains(family: str, quantization: BaseQuantization) -> None:
    shape, wanted = TINY[family], replace(recipe(quantization), adapter="dora", adapter_dtype="fp32")
    workload = CatalogWorkload(shape, wanted)
    model, optimizer = workload.build(CPU)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    workload.train_step(model, optimizer, workload.make_batch(2, CPU))

    assert sum(p.numel() * p.element_size() for p in model.parameters()) == kept_bytes(shape, wanted)
    assert sum(value.numel() for value in before.values()) == trained_parameters(shape, wanted)
    assert {value.dtype for value in before.values()} == {torch.float32}
    moved = {name for name, value in before.items() if not _equal(model.get_parameter(name), value)}
    assert any("magnitude" in name for name in moved)


def test_dora_scales_each_output_to_its_magnitude() -> None:
    base = torch.nn.Linear(6, 4)
    layer = DoraLinear(base, 6, 4, 2, torch.float32)
    torch.nn.init.normal_(layer.lora_b.weight)
    layer.magnitude.data.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.randn(5, 6)

    weight = base.weight + 2 * layer.lora_b.weight @ layer.lora_a.weight
    expected = x @ (weight / weight.norm(dim=1, keepdim=True)).T * layer.magnitude + base.bias

    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("quantization", BASE_QUANTIZATIONS)
def test_gradients_pass_through_packed_experts(quantization: BaseQuantization) -> None:
    workload = CatalogWorkload(TINY["qwen-moe"], recipe(quantization, "q_proj"))
    model, optimizer = workload.build(CPU)
    before = model.get_parameter("blocks.0.attention.q_proj.lora_b.weight").detach().clone()

    workload.train_step(model, optimizer, workload.make_batch(2, CPU))

    after = model.get_parameter("blocks.0.attention.q_proj.lora_b.weight")
    assert not _equal(after, before), "the first block's, before which all experts of the second are"
    assert torch.isfinite(after).all()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().view(torch.uint8), other.view(torch.uint8))


def test_nf4_unpacks_to_its_sixteen_values_times_the_scale_of_the_block() -> None:
    layer = QuantizedLinear(torch.nn.Linear(128, 3, bias=False), "nf4")
    codes = torch.arange(192, dtype=torch.uint8)
    layer.codes.data.copy_(codes)
    layer.scales[0].data.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))

    found = layer.unpacked(torch.float32).flatten()

    # The first weight of a pair is in the upper four bits, as bitsandbytes packs them.
    assert found[0] == found[1] == -1.0
    assert found[2 * 7 + 1] == 0.0
    assert found[2 * 15 + 1] == 1.0
    assert found[64 + 1] == 2 * found[1]
    assert found[2 * 0x7F + 1] == 4.0


def test_double_quantization_gives_each_block_its_scale() -> None:
    layer = QuantizedLinear(torch.nn.Linear(64, 257, bias=False), "nf4-dq")
    layer.codes.data.fill_(0xFF)
    small, shared, mean = layer.scales
    small.data.copy_(torch.arange(257) % 7)
    shared.data.copy_(torch.tensor([2.0, 10.0]))
    mean.data.fill_(0.5)

    found = layer.unpacked(torch.float32)

    expected = torch.arange(257) % 7 * 2.0 + 0.5
    expected[256] = 256 % 7 * 10.0 + 0.5
    assert torch.equal(found, expected[:, None].expand(257, 64))


def test_the_gradient_through_a_packed_layer_is_that_of_its_unpacked_weight() -> None:
    layer = QuantizedLinear(torch.nn.Linear(64, 8), "int8")
    layer.codes.data.random_(-127, 128)
    layer.scales[0].data.fill_(0.01)
    torch.nn.init.ones_(layer.bias)
    x = torch.randn(5, 64, requires_grad=True)

    output = layer(x)
    output.sum().backward()

    weight = layer.unpacked(torch.float32)
    assert torch.allclose(output, x @ weight.T + 1, atol=1e-5)
    assert x.grad is not None
    assert torch.allclose(x.grad, weight.sum(0).expand(5, 64), atol=1e-5)


def test_targets_of_a_hugging_face_model_go_by_the_end_of_a_name() -> None:
    linear = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.q_proj"]

    assert chosen(linear, "all-linear") == linear
    assert chosen(linear, "self_attn.q_proj") == [linear[0], linear[2]]
    assert chosen(linear, "q_proj,k_proj") == [linear[0], linear[2], linear[1]]
    with pytest.raises(WorkloadError, match="no linear layer is called proj; choose among k_proj, q_proj"):
        chosen(linear, "proj")
