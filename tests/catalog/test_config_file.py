"""A config.json on this machine: found by file, folder or the hub's cache; what it states of any network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumem_tui.catalog.config_file import looks_like_path, quantization_of, read_config_file
from gpumem_tui.catalog.shapes import CatalogError

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}


def test_the_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    found = read_config_file(folder)
    assert found == read_config_file(folder / "config.json")
    assert (found.name, found.model_type, found.architecture) == ("my-qwen", "qwen3", "Qwen3ForCausalLM")


def test_a_folder_of_the_hubs_cache_is_read_at_its_main_revision(tmp_path: Path) -> None:
    model = tmp_path / "models--Qwen--Qwen3-8B"
    for revision, model_type in (("aaa", "qwen3"), ("bbb", "other")):
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "config.json").write_text(json.dumps({"model_type": model_type}))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa\n")
    found = read_config_file(model)
    assert (found.name, found.model_type) == ("Qwen3-8B", "qwen3")


def test_a_name_on_the_hub_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "aaa"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN))
    assert read_config_file("Qwen/Qwen3-8B").name == "Qwen3-8B"
    with pytest.raises(CatalogError, match=r"no model of that name in .*hub: leave --offline out, or give the path of"):
        read_config_file("Qwen/Qwen3-9B", offline=True)


def test_what_a_cache_lacks_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    with pytest.raises(CatalogError, match=r"cannot read .*config\.json: No such file or directory"):
        read_config_file(tmp_path / "models--a--b")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (QWEN, 2048),
        ({**QWEN, "max_position_embeddings": 256}, 256),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, 512),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, 512),
        ({"model_type": "whisper", "is_encoder_decoder": True}, 448),
        ({"model_type": "whisper", "is_encoder_decoder": True, "max_target_positions": 224}, 224),
        ({"model_type": "gemma3", "vision_config": {}, "text_config": {"max_position_embeddings": 1024}}, 1024),
        ({"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], "image_size": 224}, 0),
    ],
)
def test_tokens_a_sample_are_usual_ones_within_what_it_takes(
    tmp_path: Path, config: dict[str, object], tokens: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_config_file(path).usual_seq_len == tokens


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "4-bit NF4 of bitsandbytes, 4.5 bits a weight",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            "4-bit NF4 of bitsandbytes with double quantization, 4.127 bits a weight",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit LLM.int8() of bitsandbytes"),
        ({"quant_method": "mxfp4"}, "4-bit MXFP4 (experts), 4.25 bits a weight"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "8-bit FP8 in blocks of 128 × 128, 8.002 bits a weight",
        ),
        ({"quant_method": "gptq", "bits": 4}, "4-bit GPTQ"),
    ],
)
def test_a_quantized_format_is_named_with_its_constants(said: dict[str, object], words: str) -> None:
    found = quantization_of({**QWEN, "quantization_config": said})
    assert found is not None
    assert found.words == words


def test_most_configurations_are_not_quantized() -> None:
    assert quantization_of(QWEN) is None
    assert quantization_of({**QWEN, "quantization_config": None}) is None


def test_a_path_is_told_from_a_name_of_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    assert all(map(looks_like_path, ("qwen", "./x", "config.json", "Qwen/Qwen3-8B", ".")))
    assert not looks_like_path("llama-3-8b")
