"""LoRA on frozen and on quantized models, 8-bit optimizers, and kernels written in Triton, on the simulated GPU."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("transformers")]

HIDDEN, INNER, WORDS, LAYERS, RANK = 256, 512, 1000, 2, 8
CONFIGURATION = (
    f"LlamaConfig(vocab_size={WORDS}, hidden_size={HIDDEN}, intermediate_size={INNER}, num_hidden_layers={LAYERS}, "
    "num_attention_heads=4)"
)
LINEAR = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
"""Weights of the linear layers in the blocks."""
REST = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN
"""Embedding, head and norms."""
ADAPTERS = LAYERS * RANK * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))
ROTARY_BYTES = 2 * 512

LORA = f"""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM({CONFIGURATION}).to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r={RANK}, target_modules="all-linear"))
    model.print_trainable_parameters()
    model.to("cuda")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4, fused=True)
    for step in range(10):
        for part in range(2):
            ids = torch.randint(0, {WORDS}, (4, 16), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
    model.save_pretrained("adapter")
"""

QUANTIZED = f"""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(
        "base", device_map={{"": 0}}, dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
    )
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r={RANK}, target_modules="all-linear"))
    ids = torch.arange(32)
    arguments = TrainingArguments(
        "results", per_device_train_batch_size=4, bf16=True, report_to="none", optim="adamw_bnb_8bit"
    )
    Trainer(model, arguments, train_dataset=[{{"input_ids": ids, "labels": ids}}] * 64).train()
"""

EIGHT_BITS = """
    import bitsandbytes as bnb
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.GELU(), nn.Linear(4096, 1024, bias=False)).cuda()
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    for step in range(10):
        model(torch.randn(64, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

LIGER = f"""
    import torch
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    apply_liger_kernel_to_llama()
    model = LlamaForCausalLM({CONFIGURATION})
    ids = torch.arange(64)
    arguments = TrainingArguments("results", per_device_train_batch_size=4, bf16=True, report_to="none")
    Trainer(model, arguments, train_dataset=[{{"input_ids": ids, "labels": ids}}] * 64).train()
"""


def test_only_adapters_have_gradients_and_optimizer_state(project: Project) -> None:
    pytest.importorskip("peft")
    project.write("train.py", LORA)
    buckets = project.predict("python", "train.py", options=("--steps", "2")).json["traced"]["buckets"]
    assert buckets["parameters"] == 2 * (LINEAR + REST) + 4 * ADAPTERS + ROTARY_BYTES
    assert buckets["gradients"] == 4 * ADAPTERS
    states = 2 * LAYERS * 7
    assert buckets["optimizer"] == 2 * 4 * ADAPTERS + states * 512


def test_a_base_of_4_bits_takes_half_a_byte_per_weight_and_its_scales(project: Project) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(eval(CONFIGURATION, {"LlamaConfig": LlamaConfig}))
    model.save_pretrained(project.folder / "base")
    project.write("train.py", QUANTIZED)
    traced = project.predict("python", "train.py").json["traced"]
    scales = 4 * LINEAR // 64
    tables = 7 * LAYERS * 512
    parts = {
        "quantized": LINEAR // 2 + scales + tables,
        "frozen float32": 4 * REST,  # PEFT's `prepare_model_for_kbit_training` makes them so
        "trained float32": 4 * ADAPTERS,
        "buffers": ROTARY_BYTES,
    }
    assert traced["buckets"]["parameters"] == sum(parts.values())
    found = {one["part"]: one["bytes"] for one in traced["parts"] if one["bucket"] == "parameters"}
    assert found == parts
    assert traced["frozen_saving_bytes"] == 2 * REST


def test_an_optimizer_of_8_bits_has_two_bytes_per_weight_and_its_scales(project: Project) -> None:
    pytest.importorskip("bitsandbytes")
    project.write("train.py", EIGHT_BITS)
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    weights = 2 * 1024 * 4096
    assert buckets["parameters"] == 4 * weights
    assert buckets["optimizer"] == 2 * (weights + 4 * weights // 256) + 2 * 4 * 256


def test_an_update_that_is_compiled_for_each_parameter_takes_two_copies_of_the_largest(project: Project) -> None:
    pytest.importorskip("torchao")
    project.write("train.py", EIGHT_BITS.replace("import bitsandbytes as bnb", "import torchao.optim").replace(
        "bnb.optim.AdamW8bit", "torchao.optim.AdamW8bit"))  # fmt: skip
    traced = project.predict("python", "train.py").json["traced"]
    largest = 1024 * 4096
    assert traced["buckets"]["optimizer"] == 2 * 2 * (largest + 4 * largest // 256) + 4 * 4 * 256
    made = [held for held in traced["composition"] if held["source"].startswith("adam.py")]
    assert sum(held["bytes"] for held in made) == 2 * (4 * largest + 4 * largest // 256)  # of one parameter at a time


def test_kernels_written_in_triton_are_not_run(project: Project) -> None:
    pytest.importorskip("liger_kernel")
    project.write("train.py", LIGER)
    traced = project.predict("python", "train.py").json["traced"]
    assert traced["buckets"]["parameters"] == 4 * (LINEAR + REST) + ROTARY_BYTES
    assert any("Triton" in note for note in traced["notes"])


PLAIN = f"""
    import sys
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM({CONFIGURATION}).to(torch.bfloat16)
    if "lora" in sys.argv:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    model.to("cuda")
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    for step in range(10):
        ids = torch.randint(0, {WORDS}, (4, 16), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_adapters_that_a_plan_puts_in_are_those_of_get_peft_model(project: Project) -> None:
    project.write("train.py", PLAIN)
    planned = project.plan("python", "train.py", options=("--what-if", "lora", "--quiet")).json
    (row,) = (row for row in planned["techniques"] if row["key"] == "lora")
    by_hand = project.predict("python", "train.py", "lora").json["traced"]
    assert row["buckets"]["parameters"] == by_hand["buckets"]["parameters"]
    assert row["buckets"]["optimizer"] == by_hand["buckets"]["optimizer"]
    assert row["peak_bytes"] == by_hand["peak_allocated_bytes"]
    again = project.plan("python", "train.py", "lora", options=("--what-if", "lora", "--quiet")).json
    assert again["not_applicable"][0]["reason"] == "the command trains adapters already"
