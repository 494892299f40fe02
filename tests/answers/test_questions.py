"""Twenty questions, asked in one command each with the README alone: the first line answers, and something else agrees.

`pytest -m answers -s` prints each answer with its seconds. It is compared with arithmetic that is written out
here, a search, whose trials ran, or a trace of another program that does this too.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.catalog.loader import find_model, list_prices
from gpumem_tui.formula.parameters import count_parameters

pytestmark = pytest.mark.answers

GIB = 1 << 30
LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496
"""Parameters, as published: vocabulary · hidden · 2 + layers · (attention + feed-forward + 2 norms) + norm."""

_LOOP = """
import argparse, torch
{imports}
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=1)
size = parser.parse_args().batch_size
model = {model}.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
{batch}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_BY_CONFIG = "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('.'), dtype=torch.bfloat16)"
_TOKENS = """
    ids = torch.randint(0, 1000, (size, {length}), device="cuda")
    batch = dict(input_ids=ids, labels=ids)
"""
_UNET = """
import argparse, torch
from diffusers import UNet2DConditionModel
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=1)
size = parser.parse_args().batch_size
model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    images, steps = torch.randn(size, 4, 64, 64, device="cuda"), torch.randint(0, 1000, (size,), device="cuda")
    words = torch.randn(size, 77, 768, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(images, steps, words).sample.float(), images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152, "head_dim": 256,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144, "sliding_window": 512, "query_pre_attn_scalar": 256,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072,
        "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "vocab_size": 32128, "dropout_rate": 0.1,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 768,
        "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_layers": 12,
        "decoder_attention_heads": 12, "decoder_ffn_dim": 3072, "num_mel_bins": 80, "max_source_positions": 1500,
        "max_target_positions": 448, "vocab_size": 51865,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody has configurations and training scripts."""
    folder = tmp_path_factory.mktemp("asked")
    for name, config in _CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    imports = "from transformers import AutoConfig, AutoModelForCausalLM"
    loop = _LOOP.format(imports=imports, model=_BY_CONFIG, batch=_TOKENS.format(length=1024))
    (folder / "gemma3" / "train.py").write_text(loop)
    gpt2 = "GPT2LMHeadModel(GPT2Config(n_layer=6))"
    loop = _LOOP.format(
        imports="from transformers import GPT2Config, GPT2LMHeadModel", model=gpt2, batch=_TOKENS.format(length=512)
    )
    (folder / "train.py").write_text(loop)
    (folder / "unet.py").write_text(_UNET)
    return folder


def _run(folder: Path, line: str) -> str:
    began_s = time.monotonic()
    words = [sys.executable, "-m", "gpumem_tui", *shlex.split(line)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr[-1000:]  # 3: nothing fits, which is an answer
    first = done.stdout.partition("\n")[0][:300]
    print(
        f"\n{time.monotonic() - began_s:5.1f} s  gpumem-tui {line.replace(sys.executable, 'python')}\n         {first}"
    )
    return done.stdout


def _asked(folder: Path, line: str, answer: str) -> str:
    """Return what is printed; its first line is an answer of that form."""
    out = _run(folder, line)
    first = out.partition("\n")[0]
    assert re.search(answer, first), first
    return out


def _json(folder: Path, line: str) -> dict[str, Any]:
    command, _, rest = line.partition(" ")
    found: dict[str, Any] = json.loads(_run(folder, f"{command} --json {rest}"))
    return found


def _searched(folder: Path, line: str) -> int:
    """Return the largest batch that ran, the next having been out of memory."""
    found = re.search(r"^.*?\b[Bb]atch ([\d,]+)(?: on [^;]*: it)? ran with", _run(folder, f"search --plain {line}"))
    assert found is not None
    return int(found[1].replace(",", ""))


def _row(out: str, name: str) -> float:
    """Return the GiB of the formula in a row of the table."""
    line = next(line for line in out.splitlines() if line.startswith(f"| {name} |"))
    return float(line.split("|")[2].split()[0])


def _parameters(name: str) -> int:
    return count_parameters(find_model(name))


def test_1_the_largest_batch_of_gpt2_on_a_4090(folder: Path) -> None:
    words = "--model gpt2 --precision amp-bf16 --gpu sim:rtx-4090-24gb"
    planned = re.search(
        r"^Batch 1 fits .* safe batch (\d+), (\d+) keeps 10 % free", _run(folder, f"plan --plain {words}")
    )
    form = r"^Safe batch (\d+) on .* 19 was out of memory; batch (\d+) keeps 10 %"
    ran = re.search(form, _run(folder, f"search --plain {words}"))
    assert planned is not None
    assert ran is not None
    assert planned.groups() == ran.groups() == ("18", "16")


def test_2_a_full_fine_tune_of_8b_on_eight_h100(folder: Path) -> None:
    words = "--model llama-3.1-8b --precision bf16 --sharding fsdp2 --gpus 8 --gpu sim:h100-80gb --tokens 10B"
    span = r"([\d.,]+) to ([\d.,]+)"
    form = rf"^Batch 1 fits .* safe batch 3 a GPU.*? {span} tokens/s: {span} h .* cost {span} USD"
    out = _asked(folder, f"plan --plain {words}", form)
    found = re.search(form, out)
    assert found is not None
    slowest, fastest, least_h, most_h, least, most = (float(word.replace(",", "")) for word in found.groups())
    assert [least_h, most_h] == pytest.approx([10e9 / fastest / 3600, 10e9 / slowest / 3600], rel=0.01)
    price = list_prices()["h100-80gb"].an_hour
    assert [least, most] == pytest.approx([8 * price * least_h, 8 * price * most_h], rel=0.01)
    # A GPU's eighth of weights in bf16, and of AdamW's two moments, which PyTorch keeps in it, too.
    assert _row(out, "parameters") == pytest.approx(2 * LLAMA_8B / 8 / GIB, abs=0.01)
    assert _row(out, "optimizer state") == pytest.approx(4 * LLAMA_8B / 8 / GIB, abs=0.01)


def test_3_lora_of_8b_on_a_4090(folder: Path) -> None:
    words = "--model llama-3.1-8b --adapter lora --lora-rank 16 --precision bf16 --gpu sim:rtx-4090-24gb"
    _asked(folder, f"plan --plain {words}", r"^Batch 1 does not fit .* missing; .* To change: full recompute\.")
    found = _json(folder, f"predict --batch-size 1 --recompute full {words}")["traced"]
    assert found["max_batch_size"] >= 1
    # r · (in + out) of the seven matrices of 32 layers, with grouped keys and values of 1,024; two moments in bf16.
    matrices = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
    adapters = 32 * sum(16 * (wide + high) for wide, high in matrices)
    assert found["buckets"]["optimizer"] == pytest.approx(2 * 2 * adapters, rel=0.01)


def test_4_qlora_of_70b(folder: Path) -> None:
    words = "plan --plain --model llama-3-70b --adapter lora --base-quantization nf4-dq --precision bf16"
    line = f"{words} --recompute full --gpu sim:h100-80gb"
    out = _asked(folder, line, r"^Batch 1 fits on NVIDIA H100 80 GB.*: .* safe batch \d")
    # 4 bits, 8 more for the scale of 64 values, 32 for that of 256 scales; embedding, head and norms are in bf16.
    outside = 2 * 128_256 * 8192 + 161 * 8192
    packed = (LLAMA_70B - outside) * (4 + 8 / 64 + 32 / (64 * 256)) / 8
    assert _row(out, "parameters") == pytest.approx((packed + 2 * outside) / GIB, rel=0.01)
    line = f"{words} --recompute full --sharding zero3 --gpus 2 --seq-len 512 --gpu sim:rtx-3090-24gb"
    _asked(folder, line, r"^Batch 1 does not fit on 2 × NVIDIA GeForce RTX 3090: .* To change: ")


def test_5_mixtures_of_experts_on_eight_h100(folder: Path) -> None:
    words = "--precision amp-bf16 --recompute full --sharding fsdp2 --gpus 8 --gpu sim:h100-80gb"
    form = r"^Batch 1 does not fit .*; no batch fits"
    _asked(folder, f"plan --plain --model mixtral-8x7b {words}", form)
    # Weights, gradients and two moments in fp32 are more than eight GPUs have.
    assert 16 * _parameters("mixtral-8x7b") / 8 > 80 * GIB
    form = r"^Batch 1 fits on 8 × NVIDIA H100 80 GB.*: .* safe batch \d.* a GPU"
    _asked(folder, f"plan --plain --model qwen3-30b-a3b {words}", form)
    assert 16 * _parameters("qwen3-30b-a3b") / 8 < 0.8 * 79.2 * GIB


def test_6_how_many_h100_deepseek_v3_takes(folder: Path) -> None:
    words = "plan --plain --solve gpus --model deepseek-v3 --precision bf16 --recompute full --sharding fsdp2"
    line = f"{words} --gpu sim:h100-80gb"
    _asked(folder, line, r"none; .* fills them up .* --expert-parallel 8 does with ≈112 GPUs")
    _asked(folder, f"{line} --expert-parallel 8", r"≈112 GPUs, by formula")
    # Weights, gradients and two moments in bf16. Gathered besides: embedding, head, and two blocks with an eighth of
    # their experts each; as many gradients of blocks wait, as they were made and as they are sent.
    held, outside, block = 8 * _parameters("deepseek-v3"), 2 * 129280 * 7168, 256 * 3 * 7168 * 2048 / 8
    besides = 2 * (outside + 2 * block + 2 * block)
    assert held / 112 + besides < 0.9 * 79.2 * GIB < held / 80 + besides


def test_7_the_longest_sequence_of_1b_on_a_t4(folder: Path) -> None:
    line = "plan --plain --solve seq-len --model llama-3.2-1b --gpu sim:t4-16gb"
    _asked(folder, line, r"none; even 128 tokens .* parameters, gradients and optimizer state alone take ≈18\.42 GiB")
    assert 16 * _parameters("llama-3.2-1b") / GIB == pytest.approx(18.42, abs=0.01)


def test_8_vit_l_at_384_pixels_on_a_v100(folder: Path) -> None:
    words = "--model vit-l-16 --image-size 384 --precision amp-fp16 --gpu sim:v100-16gb"
    _asked(
        folder, f"plan --plain {words}", r"^Batch 1 fits .* safe batch 21, \d+ expected, 23 at most, 18 keeps 10 % free"
    )
    assert 21 <= _searched(folder, words) <= 23


def test_9_resnet_50_in_channels_last_on_a_2080_ti(folder: Path) -> None:
    words = "--model resnet-50 --precision amp-fp16 --channels-last --gpu sim:rtx-2080-ti-11gb"
    form = r"^Batch 1 fits .* safe batch (\d+), \d+ expected, (\d+) at most"
    found = re.search(form, _asked(folder, f"plan --plain {words}", form))
    assert found is not None
    assert int(found[1]) <= _searched(folder, words) <= int(found[2])


def test_10_optimizers_of_bert_large(folder: Path) -> None:
    parameters = _parameters("bert-large")
    # 8-bit: a scale of 4 bytes for 256 values; what is small stays in fp32. Adafactor: a matrix's rows and columns.
    for name, least, most in (("adamw", 8, 8), ("adafactor", 0, 0.02), ("adamw-8bit", 2, 2.2)):
        line = f"predict --model bert-large --batch-size 8 --optimizer {name}"
        _asked(folder, line, r"^Batch 8 fits .* safe batch \d+")
        state = _json(folder, line)["formula"]["buckets"]["optimizer"]
        assert 0.999 * least * parameters <= state <= 1.001 * most * parameters, name


@pytest.mark.parametrize(
    ("sharding", "a_parameter"),
    [("deepspeed-zero1", 4 + 12 / 16), ("deepspeed-zero2", 2 + 14 / 16), ("deepspeed-zero3", 16 / 16), ("fsdp2", 1)],
)
def test_11_thirteen_billion_on_sixteen_gpus(folder: Path, sharding: str, a_parameter: float) -> None:
    """DeepSpeed's estimates of states, `estimate_zero2_model_states_mem_needs` and its like, is held."""
    words = f"--model llama-2-13b --precision amp-bf16 --gpus 16 --sharding {sharding} --gpu sim:a100-80gb"
    form = r"^Batch 1 fits on 16 × NVIDIA A100 80 GB.*: .* safe batch \d.* a GPU"
    _asked(folder, f"plan --plain {words}", form)
    highest = _json(folder, f"plan {words} --no-trace")["formula"]["highest"]
    held = sum(highest[bucket] for bucket in ("parameters", "gradients", "optimizer"))
    assert held >= 0.98 * a_parameter * _parameters("llama-2-13b")


def test_12_a_32b_by_pipeline_and_tensor_parallel(folder: Path) -> None:
    words = "--model qwen2.5-32b --precision bf16 --pipeline-parallel 4 --tensor-parallel 2 --gpus 8 --micro-batches 16"
    form = rf"^Batch [\d,]+ fits by formula .* 1 pass makes a global batch of 16 \({16 * 2048:,} tokens\)"
    out = _asked(folder, f"plan --plain {words} --target-batch 16 --gpu sim:a100-80gb", form)
    # An eighth of the network, and of the first stage's embedding, which is not cut in four, the rest.
    assert _row(out, "parameters") >= 2 * _parameters("qwen2.5-32b") / 8 / GIB


def test_13_accumulation_for_half_a_million_tokens(folder: Path) -> None:
    passes = round(500_000 / 1024 / 8)
    samples = 8 * passes
    form = rf"^Batch 8 fits .* {passes} passes make a global batch of {samples} \({samples * 1024:,} tokens\)"
    words = "--model gpt2 --target-tokens 0.5M --precision amp-bf16 --batch-size 8 --gpu sim:a100-40gb"
    out = _asked(folder, f"plan --plain {words}", form)
    assert f"{samples * 1024:,} tokens" in out.partition("\n")[0]
    assert abs(samples * 1024 - 500_000) <= 8 * 1024 / 2, "the nearest number of whole passes"


def test_14_the_learning_rate_and_the_critical_batch(folder: Path) -> None:
    # Kaplan et al. 2020: 2.1e8 tokens / loss^(1/0.21). GPT-3 of this size: 0.5M tokens; √2 to 2 for each doubling.
    words = "--model gpt2 --batch-size 8 --target-batch 512 --precision amp-bf16"
    form = r"multiply the learning rate by ([\d.]+) to ([\d.]+)"
    said = _asked(folder, f"plan --plain --no-trace {words}", form)
    doubled, found = 512 * 1024 / 0.5e6, re.search(form, said)
    assert found is not None
    assert [float(found[1]), float(found[2])] == pytest.approx([doubled**0.5, doubled], rel=0.01)
    critical = re.search(r"^\| 3\.0 \| ([\d,]+) tokens \| within \|$", said, re.MULTILINE)
    assert critical is not None
    assert int(critical[1].replace(",", "")) == pytest.approx(2.1e8 / 3 ** (1 / 0.21), rel=0.05)


def test_15_a_new_config_of_hugging_face(folder: Path) -> None:
    """transformers' own class in a script of a user's fits and does not, as the file does."""
    words = "--model gemma3/config.json --precision bf16 --gpu sim:rtx-4090-24gb --seq-len 1024"
    form = r"^Batch 1 fits on NVIDIA GeForce RTX 4090: .* safe batch 2\b"
    _asked(folder, f"plan --plain {words}", form)
    line = f"predict --gpu sim:rtx-4090-24gb -- {sys.executable} train.py --batch-size"
    assert _json(folder / "gemma3", f"{line} 2")["traced"]["fits"]
    assert not _json(folder / "gemma3", f"{line} 3")["traced"]["fits"]


def test_16_what_makes_batch_64_fit(folder: Path) -> None:
    line = f"--gpu sim:rtx-4090-24gb -- {sys.executable} train.py --batch-size"
    form = r"^Batch 64 does not fit .* To change: (\d) passes of (\d+), traced: it fits"
    found = re.search(form, _asked(folder, f"plan --plain --quiet {line} 64", form))
    assert found is not None
    assert int(found[1]) * int(found[2]) == 64
    assert _json(folder, f"predict {line} {found[2]}")["traced"]["fits"]


def test_17_the_cheapest_gpu(folder: Path) -> None:
    found = _json(folder, "plan --model gpt2 --precision amp-bf16 --tokens 10B --gpu sim:a100-40gb")
    assert re.search(r"Cheapest GPU for it: NVIDIA H100 80 GB, [\d.]+ to [\d.]+ USD a million tokens", found["answer"])
    costs = {row["name"]: row["cost_per_million"] for row in found["gpus"] if row["cost_per_million"] is not None}
    assert min(costs, key=lambda name: sum(costs[name])) == "h100-80gb"
    there = _json(folder, "plan --model gpt2 --precision amp-bf16 --gpu sim:h100-80gb --no-trace")
    price = list_prices()["h100-80gb"].an_hour
    by_hand = [price / 3600 / speed * 1e6 for speed in sorted(there["speed"]["tokens_per_s"], reverse=True)]
    assert costs["h100-80gb"] == pytest.approx(by_hand)


def test_18_optimizer_state_in_host_memory(folder: Path) -> None:
    words = "--model llama-3.2-1b --precision bf16 --gpu sim:rtx-4090-24gb"
    _asked(folder, f"plan --plain {words} --extra offload-optimizer", r"^Batch 1 fits by formula .* to spare")
    for extra, a_parameter in (("", 4), (" --extra offload-optimizer", 0)):
        state = _json(folder, f"plan {words} --no-trace{extra}")["formula"]["buckets"]["optimizer"]
        assert state == a_parameter * _parameters("llama-3.2-1b")


@pytest.mark.parametrize(
    ("line", "least"),
    [
        (f"--quiet --gpu sim:rtx-4090-24gb -- {sys.executable} unet.py --batch-size 2", 16 * 686_000_000),
        ("--model whisper/config.json --precision bf16 --batch-size 4 --gpu sim:rtx-4090-24gb", 8 * 241_000_000),
        ("--model t5/config.json --precision bf16 --batch-size 4 --gpu sim:rtx-4090-24gb", 8 * 222_000_000),
    ],
    ids=["unet", "whisper", "t5"],
)
def test_19_fine_tuning_a_unet_whisper_and_t5(folder: Path, line: str, least: int) -> None:
    """Weights, gradients and two moments are held as the weights are updated: the peak is not below."""
    _asked(folder, f"predict {line}", r"^(by trace )?batch \d fits")
    assert _json(folder, f"predict {line}")["traced"]["peak_allocated_bytes"] > least


def test_20_128_thousand_tokens_by_context_parallel(folder: Path) -> None:
    words = "--model llama-3.1-8b --precision bf16 --recompute full --seq-len 131072 --context-parallel 8 --gpus 8"
    line = f"{words} --sharding zero3 --gpu sim:h100-80gb"
    _asked(folder, f"plan --plain {line}", r"^Batch 1 fits by formula on 8 × NVIDIA H100 80 GB: .* to spare")
    rows = {row["name"]: row["size_bytes"] for row in _json(folder, f"plan {line} --no-trace")["formula"]["rows"]}
    # The input of each of 32 layers: an eighth of the sequence, 4,096 values of 2 bytes.
    assert rows["inputs of the blocks"] == 32 * 131_072 // 8 * 4096 * 2
