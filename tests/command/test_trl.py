"""TRL's SFTTrainer with an adapter, on the simulated GPU."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("trl")]

SCRIPT = """
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{i}" for i in range(496))]
    words_only = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    texts = [" ".join(f"w{(i * j) % 496}" for j in range(10 + i % 20)) for i in range(64)]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    ))
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": texts}),
        args=SFTConfig("results", per_device_train_batch_size=4, max_length=32, bf16=True, report_to="none"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
"""
BASE = 2 * 500 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128
ADAPTERS = 2 * 2 * 8 * (128 + 128)


def test_buckets_of_supervised_fine_tuning(project: Project) -> None:
    project.write("train.py", SCRIPT)
    buckets = project.predict("python", "train.py").json["traced"]["buckets"]
    assert buckets["parameters"] == 4 * (BASE + ADAPTERS) + 2 * 512
