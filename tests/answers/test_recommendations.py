"""A plan's recommendations are run as they are, and fit: 40 plans over the catalog, most of which do not fit."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.answers

PLANS = (
    "--model gpt2 --gpu sim:t4-16gb --batch-size 16",
    "--model gpt2-medium --gpu sim:t4-16gb --batch-size 8 --precision amp-fp16",
    "--model gpt2-large --gpu sim:rtx-3090-24gb --batch-size 8 --precision amp-bf16",
    "--model gpt2-xl --gpu sim:rtx-4090-24gb --batch-size 4 --precision amp-bf16",
    "--model gpt2-xl --gpu sim:a100-40gb --batch-size 8 --precision amp-bf16",
    "--model llama-3.2-1b --gpu sim:rtx-4090-24gb --batch-size 4 --precision amp-bf16",
    "--model llama-3.2-1b --gpu sim:l40s-48gb --batch-size 8 --precision amp-bf16",
    "--model llama-2-7b --gpu sim:h100-80gb --batch-size 1 --precision bf16",
    "--model llama-2-7b --gpu sim:a100-80gb --batch-size 2 --precision amp-bf16",
    "--model llama-3-8b --gpu sim:h100-80gb --batch-size 2 --precision bf16",
    "--model mistral-7b --gpu sim:h100-80gb --batch-size 2 --precision bf16",
    "--model qwen2.5-7b --gpu sim:h100-80gb --batch-size 2 --precision bf16",
    "--model bert-base --gpu sim:t4-16gb --batch-size 128",
    "--model bert-large --gpu sim:t4-16gb --batch-size 64 --precision amp-fp16",
    "--model bert-large --gpu sim:v100-16gb --batch-size 32",
    "--model vit-b-16 --gpu sim:t4-16gb --batch-size 256 --precision amp-fp16",
    "--model vit-l-16 --gpu sim:rtx-3090-24gb --batch-size 128 --precision amp-bf16",
    "--model vit-l-16 --gpu sim:v100-16gb --batch-size 32",
    "--model resnet-50 --gpu sim:t4-16gb --batch-size 256",
    "--model resnet-50 --gpu sim:rtx-4090-24gb --batch-size 512 --precision amp-bf16",
    "--model gpt2 --gpu sim:rtx-3090-24gb --batch-size 32",
    "--model gpt2 --gpu sim:a100-40gb --batch-size 64 --precision amp-bf16",
    "--model gpt2-medium --gpu sim:rtx-4090-24gb --batch-size 16 --precision amp-bf16",
    "--model gpt2-medium --gpu sim:a100-40gb --batch-size 32 --precision bf16",
    "--model llama-3.2-1b --gpu sim:rtx-3090-24gb --batch-size 2 --precision bf16 --seq-len 4096",
    "--model bert-base --gpu sim:rtx-3090-24gb --batch-size 256 --precision amp-bf16",
    "--model resnet-50 --gpu sim:v100-16gb --batch-size 256 --precision amp-fp16",
    "--model vit-b-16 --gpu sim:rtx-3090-24gb --batch-size 512 --precision amp-bf16",
    "--model gpt2-large --gpu sim:v100-16gb --batch-size 2",
    "--model gpt2-large --gpu sim:a100-80gb --batch-size 64 --precision amp-bf16",
    "--model gpt2-xl --gpu sim:h100-80gb --batch-size 32 --precision amp-bf16",
    "--model llama-3-8b --gpu sim:rtx-4090-24gb --batch-size 1 --precision bf16 --gpus 4",
    "--model llama-2-7b --gpu sim:rtx-4090-24gb --batch-size 1 --precision amp-bf16 --gpus 8",
    "--model llama-3.2-1b --gpu sim:t4-16gb --batch-size 1 --precision amp-fp16",
    "--model bert-large --gpu sim:rtx-4090-24gb --batch-size 128 --precision bf16",
    "--model gpt2 --gpu sim:h100-80gb --batch-size 256 --precision bf16",
    "--model gpt2-medium --gpu sim:l40s-48gb --batch-size 64 --precision amp-bf16",
    "--model mistral-7b --gpu sim:a100-80gb --batch-size 1 --precision amp-bf16 --seq-len 4096",
    "--model vit-l-16 --gpu sim:a100-40gb --batch-size 256 --precision amp-bf16",
    "--model gpt2-xl --gpu sim:l40s-48gb --batch-size 2 --target-batch 64",
)


def _answer(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "gpumem_tui", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("words", PLANS)
def test_a_recommendation_fits_when_it_is_run(words: str) -> None:
    """`predict` takes the command that the plan prints, and states of its peak what the plan has said, to the byte."""
    plan = _answer("plan", *shlex.split(words))
    best = plan["combination"]
    if best["formula_only"]:  # then a trace confirms a dearer one, or nothing does
        best = plan["traceable_combination"]
    assert best["command"] is not None, plan["answer"]
    _, _, *options = shlex.split(best["command"])
    found = _answer("predict", *options)
    traced, size = found["traced"], found["workload"]["batch_size"]
    assert traced["fits"], f"{plan['answer']} → {best['command']}"
    assert found["workload"]["compile"] or traced["max_batch_size"] >= size
    assert best["traced"]["fits"]
    assert best["traced"]["peak_allocated_bytes"] == traced["peak_allocated_bytes"]
    print(f"\n{plan['answer']}\n  {best['command']}\n  {traced['peak_allocated_bytes'] / 2**30:.2f} GiB, fits")
