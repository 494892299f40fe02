"""Transformers' Trainer as its documentation uses it: models from a configuration, on the simulated GPU."""

from __future__ import annotations

import pytest

from tests.command.running import Project, needs

pytestmark = [pytest.mark.scripts, needs("transformers", "accelerate")]

LLAMA = """
    import torch
    from torch.utils.data import Dataset
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Texts(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            ids = torch.randint(0, 1000, (32 + index % 3,))[:32]
            return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    print("parameters", sum(p.numel() for p in model.parameters()))
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
"""
HIDDEN, INNER, WORDS = 128, 344, 1000
LLAMA_PARAMETERS = 2 * WORDS * HIDDEN + 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN) + HIDDEN
ROTARY_BYTES = 2 * 512
"""The frequencies of the rotary embedding, of 16 numbers each, take two blocks of the allocator."""

BERT = """
    import random
    from transformers import (
        BertConfig, BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling, Trainer, TrainingArguments
    )

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(500))]
    with open("vocabulary.txt", "w") as file:
        file.write("\\n".join(words))
    tokenizer = BertTokenizerFast("vocabulary.txt")
    lengths = [random.randrange(5, 40) for _ in range(32)]
    texts = [tokenizer(" ".join(f"w{random.randrange(500)}" for _ in range(length))) for length in lengths]
    model = BertForMaskedLM(BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    ))

    def accuracy(result):
        wanted = result.label_ids != -100
        print("masked", wanted.sum() > 0, result.predictions.shape[:2] == result.label_ids.shape)
        return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids)[wanted].mean())}

    trainer = Trainer(
        model=model,
        args=TrainingArguments("results", per_device_train_batch_size=4, report_to="none", optim="adafactor"),
        train_dataset=texts,
        eval_dataset=texts,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
        compute_metrics=accuracy,
    )
    print(trainer.evaluate())
    trainer.train()
"""

T5_AND_VIT = """
    import torch
    from transformers import (
        Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments,
        ViTConfig, ViTForImageClassification,
    )

    images = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 10} for i in range(32)]
    vit = ViTForImageClassification(ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        num_labels=10,
    ))
    Trainer(
        vit, TrainingArguments("vit", per_device_train_batch_size=8, max_steps=1, report_to="none", fp16=True), None,
        train_dataset=images,
    ).train()

    texts = [{"input_ids": torch.randint(2, 100, (16,)), "labels": torch.randint(2, 100, (8,))} for _ in range(32)]
    t5 = T5ForConditionalGeneration(T5Config(
        vocab_size=100, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, decoder_start_token_id=0
    ))
    arguments = Seq2SeqTrainingArguments("t5", per_device_train_batch_size=4, report_to="none", bf16=True)
    Seq2SeqTrainer(t5, arguments, train_dataset=texts).train()
"""

WHISPER = """
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

    sounds = [{"input_features": torch.randn(80, 3000), "labels": torch.randint(3, 100, (8,))} for _ in range(8)]
    model = WhisperForConditionalGeneration(WhisperConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ))
    arguments = Seq2SeqTrainingArguments(
        "whisper", per_device_train_batch_size=2, report_to="none", bf16=True, gradient_checkpointing=True
    )
    Seq2SeqTrainer(model, arguments, train_dataset=sounds).train()
"""


def test_every_bucket_of_llama_with_trainer(project: Project) -> None:
    project.write("train.py", LLAMA)
    done = project.predict(
        "python", "train.py", "--output_dir=results", "--per_device_train_batch_size=8", "--bf16=True",
        "--report_to=none", "--save_steps=1", "--dataloader_num_workers=1", "--optim=adamw_torch",
    )  # fmt: skip
    buckets = done.json["traced"]["buckets"]
    assert f"| parameters {LLAMA_PARAMETERS}" in done.stderr
    assert buckets["parameters"] == 4 * LLAMA_PARAMETERS + ROTARY_BYTES
    assert buckets["optimizer"] == 2 * 4 * LLAMA_PARAMETERS
    assert buckets["batch_data"] > 0


def test_accumulated_gradients_of_a_checkpointed_model(project: Project) -> None:
    project.write("train.py", LLAMA)
    done = project.predict(
        "python", "train.py", "--output_dir=results", "--per_device_train_batch_size=8", "--fp16=True",
        "--gradient_checkpointing=True", "--gradient_accumulation_steps=2", "--optim=adafactor", "--report_to=none",
        "--eval_strategy=steps", "--eval_steps=1",
    )  # fmt: skip
    traced = done.json["traced"]
    assert traced["buckets"]["parameters"] == 4 * LLAMA_PARAMETERS + ROTARY_BYTES
    assert traced["buckets"]["gradients"] == 4 * LLAMA_PARAMETERS
    assert "eval_loss" in done.stderr


def test_metrics_see_the_true_labels_of_a_padded_evaluation(project: Project) -> None:
    project.write("train.py", BERT)
    done = project.predict("python", "train.py")
    assert done.json["traced"]["buckets"]["parameters"] > 0
    assert "masked True True" in done.stderr


@pytest.mark.parametrize("script", [T5_AND_VIT, WHISPER], ids=["vit-and-t5", "whisper"])
def test_other_models_train(project: Project, script: str) -> None:
    project.write("train.py", script)
    done = project.predict("python", "train.py")
    assert done.json["traced"]["buckets"]["parameters"] > 0


def test_checkpoints_are_noted_with_their_place_and_not_written(project: Project) -> None:
    project.write("train.py", LLAMA)
    done = project.predict(
        "python", "train.py", "--output_dir=results", "--save_steps=1", "--report_to=none", options=("--steps", "2")
    )
    assert not list((project.folder / "results").glob("checkpoint-*"))
    place = len(LLAMA.strip().splitlines())
    assert any(f"train.py:{place + 1}" in note for note in done.json["traced"]["notes"])


@needs("liger_kernel", "triton")
def test_ligers_loss_makes_the_gradient_of_the_head_in_forward_and_no_logits(project: Project) -> None:
    words, tokens = 32_000, 8 * 32
    project.write("train.py", LLAMA.replace(f"vocab_size={WORDS}", f"vocab_size={words}"))
    line = ("train.py", "--output_dir", "out", "--per_device_train_batch_size", "8", "--max_steps", "4")
    with_liger, without = (
        project.predict("python", *line, "--use_liger_kernel", use).json["traced"] for use in ("True", "False")
    )
    head_bytes, logits_bytes = 4 * words * HIDDEN, 4 * words * tokens
    parameters = 4 * (LLAMA_PARAMETERS + 2 * (words - WORDS) * HIDDEN) + ROTARY_BYTES
    assert with_liger["buckets"]["parameters"] == without["buckets"]["parameters"] == parameters
    assert with_liger["buckets"]["gradients"] == head_bytes
    assert with_liger["buckets"]["activations"] < logits_bytes < without["buckets"]["activations"]
