"""Models larger than the host: what ends on the device takes no memory there, and a program's data keeps its values."""

from __future__ import annotations

import re

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("transformers", "accelerate")]

GIB = 1 << 30
PEAK = """
    def peak_of_this_process():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
"""

LLAMA_8B = (
    """
    import atexit

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
"""
    + PEAK
    + """
    atexit.register(lambda: print("peak", peak_of_this_process(), flush=True))
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, use_cache=False,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 128256, (2048,))
    arguments = TrainingArguments(
        "results", per_device_train_batch_size=1, bf16=True, gradient_checkpointing=True, optim="adafactor",
        report_to="none",
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
"""
)
PARAMETERS_8B = 8_030_261_248
"""As Meta counts the parameters of Llama 3 8B."""

PRETRAINED = (
    """
    import sys

    import torch
    import transformers.models.llama.modeling_llama  # with what it imports, which is not weights
    from transformers import AutoModelForCausalLM
"""
    + PEAK
    + """
    before = peak_of_this_process()
    model = AutoModelForCausalLM.from_pretrained("checkpoint", dtype=torch.float32, **eval(sys.argv[1]))
    model = model.to("cuda")
    print("took", peak_of_this_process() - before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        ids = torch.randint(0, 1000, (1, 16), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)

STATE_DICT = (
    """
    import torch
    from torch import nn
"""
    + PEAK
    + """
    torch.save({"mean": torch.full((3,), 2.0), "images": torch.arange(6000000.0)}, "data.pt")
    before = peak_of_this_process()
    data = torch.load("data.pt")
    print("data", data["mean"].tolist(), data["images"][-1].item())
    torch.save({"mean": data["mean"] + 1}, "data.pt")
    print("again", torch.load("data.pt")["mean"].tolist(), data["images"][-1].item())

    model = nn.Sequential(nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 4096, bias=False))
    model.load_state_dict(torch.load("model.pt"))
    model.cuda()
    copy = torch.load("model.pt", map_location="cuda")
    print("copy", sum(weight.nbytes for weight in copy.values()), copy["0.weight"].device)
    print("took", peak_of_this_process() - before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        model(torch.randn(4, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
"""
)


def figure(stderr: str, name: str) -> int:
    """The number that the script printed behind a word, a bar of progress before it perhaps."""
    return int(re.findall(rf"\b{name} (\d+)$", stderr, re.MULTILINE)[0])


@pytest.mark.bench
def test_eight_billion_parameters_from_a_configuration(project: Project) -> None:
    project.write("train.py", LLAMA_8B)
    done = project.predict("python", "train.py", gpu="h200-141gb")
    buckets = done.json["traced"]["buckets"]
    assert buckets["parameters"] == 4 * PARAMETERS_8B + 2 * 512
    assert buckets["gradients"] == 4 * PARAMETERS_8B
    assert figure(done.stderr, "peak") <= 4 * GIB


@pytest.mark.parametrize("options", ["{}", "{'device_map': 'cuda'}"], ids=["over the host", "to the device"])
def test_a_checkpoint_of_safetensors_takes_no_host_memory(project: Project, options: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(project.folder / "checkpoint", max_shard_size="50MB")
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    project.write("train.py", PRETRAINED)
    done = project.predict("python", "train.py", options)
    assert done.json["traced"]["buckets"]["parameters"] == parameter_bytes + 2 * 512
    assert figure(done.stderr, "took") < parameter_bytes // 4


def test_a_state_dict_takes_no_host_memory_and_data_keeps_its_values(project: Project) -> None:
    import torch

    weight_bytes = 4 * 4096 * 8192
    torch.save({"0.weight": torch.zeros(8192, 4096), "1.weight": torch.zeros(4096, 8192)}, project.folder / "model.pt")
    written = (project.folder / "model.pt").stat().st_mtime_ns
    project.write("train.py", STATE_DICT)
    done = project.predict("python", "train.py")
    assert "| data [2.0, 2.0, 2.0] 5999999.0" in done.stderr
    assert "| again [3.0, 3.0, 3.0] 5999999.0" in done.stderr
    assert f"| copy {2 * weight_bytes} cuda:0" in done.stderr
    assert done.json["traced"]["buckets"]["parameters"] == 2 * weight_bytes
    assert figure(done.stderr, "took") < weight_bytes
    assert (project.folder / "model.pt").stat().st_mtime_ns == written
