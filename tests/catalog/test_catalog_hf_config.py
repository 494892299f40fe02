"""Hugging Face configurations: the published ones give the catalog's shapes, wrong ones a clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.catalog.config_file import read_config_file
from gpumem_tui.catalog.huggingface import CONFIGS
from gpumem_tui.catalog.loader import NoClosedFormError, find_model, shape_from_hf_config
from gpumem_tui.catalog.shapes import CatalogError, ModelShape
from gpumem_tui.formula.parameters import count_parameters

Config = dict[str, object]

GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
LLAMA_3_2_1B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 32.0, "rope_type": "llama3"},
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
LLAMA_2_7B: Config = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
MISTRAL_7B: Config = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_NEMO: Config = {
    **MISTRAL_7B,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN2_5_0_5B: Config = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
BERT_BASE: Config = {
    "architectures": ["BertForSequenceClassification"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
VIT_B_16: Config = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "id2label": {str(label): f"LABEL_{label}" for label in range(1000)},
    "image_size": 224,
    "intermediate_size": 3072,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
}


def architecture(shape: ModelShape) -> ModelShape:
    """The shape without what a configuration cannot know."""
    return replace(shape, name="", source="", published_parameters=None)


def refused(config: Config) -> str:
    with pytest.raises(CatalogError) as caught:
        shape_from_hf_config(config, "mine")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "the configuration of mine" in message
    return message


@pytest.mark.parametrize(
    ("config", "catalog_name"),
    [
        (GPT2, "gpt2"),
        (LLAMA_2_7B, "llama-2-7b"),
        (LLAMA_3_2_1B, "llama-3.2-1b"),
        (MISTRAL_7B, "mistral-7b"),
        (MISTRAL_NEMO, "mistral-nemo-12b"),
        (QWEN2_5_0_5B, "qwen2.5-0.5b"),
        (QWEN3_30B_A3B, "qwen3-30b-a3b"),
        (BERT_BASE, "bert-base"),
        (VIT_B_16, "vit-b-16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_configuration_is_the_catalog_model(config: Config, catalog_name: str) -> None:
    shape = shape_from_hf_config(config, "mine")
    assert shape.name == "mine"
    assert architecture(shape) == architecture(find_model(catalog_name))


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (GPT2, {"n_inner": None}, {"ffn": 3072}),
        (GPT2, {"n_inner": 1000}, {"ffn": 1000}),
        (GPT2, {"tie_word_embeddings": False}, {"tied_head": False}),
        (GPT2, {"n_positions": 512}, {"seq_len": 512, "max_seq_len": 512}),
        (GPT2, {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}, {"dropout": 0.0}),
        (LLAMA_2_7B, {"attention_bias": True}, {"qkv_bias": True}),
        (LLAMA_2_7B, {"num_key_value_heads": None}, {"kv_heads": 32}),
        (LLAMA_2_7B, {"head_dim": None}, {"head_dim": 0}),
        (LLAMA_2_7B, {"head_dim": 64}, {"head_dim": 64}),
        (LLAMA_2_7B, {"max_position_embeddings": 512}, {"seq_len": 512}),
        (MISTRAL_7B, {"attention_bias": True}, {"qkv_bias": False}),
        (BERT_BASE, {"num_labels": 5}, {"classes": 5}),
        (BERT_BASE, {"id2label": {0: "a", 1: "b", 2: "c"}}, {"classes": 3}),
        (VIT_B_16, {"id2label": None}, {"classes": 2}),
    ],
)
def test_reads_the_key(config: Config, changes: Config, expected: dict[str, object]) -> None:
    shape = shape_from_hf_config({**config, **changes}, "mine")
    assert {field: getattr(shape, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("dense", "parameters"), [([], 30_532_122_624), ([0], 29_965_629_440), ([2, 0, 1], 28_832_643_072)]
)
def test_first_blocks_without_experts_have_the_dense_networks_width(dense: list[int], parameters: int) -> None:
    """As transformers 5.24 counts them: `Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))` on the meta device."""
    shape = shape_from_hf_config({**QWEN3_30B_A3B, "mlp_only_layers": dense}, "mine")
    assert count_parameters(shape) == parameters


def test_a_file_that_transformers_5_saved_is_the_same_model() -> None:
    saved = {**QWEN3_30B_A3B, "num_local_experts": QWEN3_30B_A3B["num_experts"], "rope_parameters": {"rope_theta": 1e6}}
    del saved["num_experts"]
    assert shape_from_hf_config(saved, "mine") == shape_from_hf_config(QWEN3_30B_A3B, "mine")


@pytest.mark.parametrize(("noise", "is_read"), [(0, True), (0.0, True), (0.1, False)])
def test_noise_on_the_router_is_refused_and_none_of_it_is_not(noise: float, is_read: bool) -> None:
    mixtral = {**MISTRAL_7B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral["router_jitter_noise"] = noise
    if is_read:
        assert count_parameters(shape_from_hf_config(mixtral, "mine")) == 46_702_792_704
    else:
        assert "router_jitter_noise must be 0" in refused(mixtral)


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaModel", "\x1b[2J"])
def test_another_head_is_no_network_of_the_formula(head: str) -> None:
    with pytest.raises(NoClosedFormError, match="the formula is of LlamaForCausalLM") as caught:
        shape_from_hf_config({**LLAMA_2_7B, "architectures": [head]}, "mine")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GPT2, "n_layer"),
        (GPT2, "vocab_size"),
        (LLAMA_2_7B, "hidden_size"),
        (MISTRAL_7B, "num_key_value_heads"),
        (QWEN2_5_0_5B, "max_position_embeddings"),
        (BERT_BASE, "intermediate_size"),
        (VIT_B_16, "patch_size"),
    ],
)
def test_names_a_missing_key(config: Config, key: str) -> None:
    without = {name: value for name, value in config.items() if name != key}
    assert refused(without).endswith(f"has no {key!r}: add it to the file")


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (GPT2, "n_layer", "twelve"),
        (GPT2, "n_layer", 12.5),
        (GPT2, "n_layer", True),
        (GPT2, "n_head", 0),
        (GPT2, "n_embd", None),
        (GPT2, "resid_pdrop", 1.5),
        (GPT2, "activation_function", "relu"),
        (LLAMA_2_7B, "head_dim", -64),
        (LLAMA_2_7B, "hidden_act", "gelu"),
        (LLAMA_2_7B, "tie_word_embeddings", "yes"),
        (BERT_BASE, "type_vocab_size", 16),
        (BERT_BASE, "position_embedding_type", "relative_key"),
        (VIT_B_16, "image_size", [224, 224]),
        (VIT_B_16, "num_channels", 1),
    ],
)
def test_names_the_key_whose_value_is_wrong(config: Config, key: str, value: object) -> None:
    assert f"has {key!r} = {value!r}" in refused({**config, key: value})


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (LLAMA_2_7B, {"mlp_bias": True}, "mlp_bias must be false"),
        (LLAMA_2_7B, {"attention_dropout": 0.1}, "attention_dropout must be 0"),
        (
            LLAMA_2_7B,
            {"num_attention_heads": 33},
            "cannot exist: 33 heads do not divide a hidden size of 4096",
        ),
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "5 key/value heads do not divide 32 heads"),
        (GPT2, {"attn_pdrop": 0.0}, "attn_pdrop and embd_pdrop and resid_pdrop"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [0, 2]}, "mlp_only_layers must be the first blocks"),
        (QWEN3_30B_A3B, {"mlp_only_layers": list(range(48))}, "none has experts"),
        (VIT_B_16, {"qkv_bias": False}, "qkv_bias must be true"),
        (VIT_B_16, {"patch_size": 15}, "not a multiple of the 15 pixel patch"),
    ],
)
def test_refuses_what_it_cannot_represent(config: Config, changes: Config, said: str) -> None:
    assert said in refused({**config, **changes})


@pytest.mark.parametrize("model_type", ["t5", "", None, 7, ["gpt2"]])
def test_lists_the_supported_model_types(model_type: object) -> None:
    line = refused({**GPT2, "model_type": model_type})
    assert line.endswith(f"supported are {', '.join(CONFIGS)}")


def _read(path: str | Path) -> ModelShape:
    file = read_config_file(path)
    return shape_from_hf_config(file.values, file.name)


def test_loads_a_file_or_its_directory_named_after_the_directory(tmp_path: Path) -> None:
    model = tmp_path / "my-gpt"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GPT2))
    shape = _read(model)
    assert shape.name == "my-gpt"
    assert shape == _read(str(model / "config.json"))


def test_names_another_file_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(GPT2))
    assert _read(path).name == "tiny"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not valid JSON"),
        (b'{"model_type": "gpt2",', "is not valid JSON"),
        (b'{"model_type": "\xff"}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1, 2]", "that holds one JSON object"),
        (b"{}", "has no 'model_type'"),
    ],
    ids=["empty", "cut off", "not UTF-8", "nested too deep", "a list", "no keys"],
)
def test_says_what_is_wrong_with_the_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CatalogError, match=said) as caught:
        _read(path)
    assert len(str(caught.value).splitlines()) == 1


def test_says_which_file_is_missing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CatalogError, match=r"cannot read .*config\.json: No such file or directory"):
            _read(path)
