"""An inference engine alone on a GPU, and what is printed of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import GIB, Range, Unknown
from gpumem_tui.options.configuration import asked_by
from gpumem_tui.options.serving import ServeTerms, served
from gpumem_tui.report.objects import encoded
from gpumem_tui.search.serving import OWN_BYTES, Served, ServeObject, serving_lines
from tests.cli.conftest import Program
from tests.cli.test_schema import faults, is_of_its_type

QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def asked(terms: ServeTerms | None = None, **values: object) -> Served:
    return served(asked_by({"gpu": "sim:h100-80gb", **values}), terms or ServeTerms(8192, 16))


def written(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**QWEN3, **changes}))
    return str(path)


def test_the_share_is_what_the_headroom_leaves_or_the_one_that_is_given() -> None:
    found = asked(model="qwen3-8b")
    total = found.gpu.cuda_total_range
    assert found.budget == Range(int(0.9 * total.low_bytes), int(0.9 * total.high_bytes))
    assert asked(model="qwen3-8b", headroom=0.5).utilization == 0.5
    beside = asked(model="qwen3-8b", beside="0.45")
    assert (beside.utilization, beside.gpu) == (0.45, found.gpu)
    with pytest.raises(OptionError, match="takes the engine's own share"):
        asked(model="qwen3-8b", beside="30GiB")


def test_weights_are_those_of_the_type_and_of_one_gpu() -> None:
    shape = find_model("qwen3-8b")
    whole = asked(model="qwen3-8b").weights
    assert whole == Range(2 * count_parameters(shape), 2 * count_parameters(shape))
    wide = asked(ServeTerms(8192, 16, weights_bits=32), model="qwen3-8b")
    assert (wide.weights, wide.kv_type) == (Range(4 * count_parameters(shape), 4 * count_parameters(shape)), "fp32")
    halves = asked(model="qwen3-8b", tensor_parallel=2)
    assert isinstance(halves.weights, Range)
    assert isinstance(whole, Range)
    assert whole.low_bytes // 2 < halves.weights.low_bytes < 0.51 * whole.low_bytes
    assert halves.sequence == Range(16 * 512 * 73728, 16 * 512 * 73728)
    with pytest.raises(OptionError, match="--tensor-parallel 4; give that"):
        asked(model="qwen3-8b", gpus=4)


def test_each_gpu_has_whole_what_no_engine_cuts() -> None:
    """Key heads that are fewer than the GPUs are copied, and so are routers and the ways to latent vectors."""
    gib = {}
    for name, gpus in (("llama-3-70b", 16), ("deepseek-v3", 8)):
        weights = asked(model=name, tensor_parallel=gpus).weights
        assert isinstance(weights, Range)
        gib[name] = weights.high_bytes - 2 * count_parameters(find_model(name)) / gpus
    keys_and_values = 80 * 2 * 8192 * 1024 * 2 * (1 / 8 - 1 / 16)
    assert gib["llama-3-70b"] == pytest.approx(keys_and_values + 161 * 8192 * 2 * 15 / 16, abs=2)
    latents = 61 * 7168 * (1536 + 576) + 58 * 256 * 7168
    vectors = 61 * (1536 + 512) + 123 * 7168
    assert gib["deepseek-v3"] == pytest.approx(2 * (latents + vectors) * 7 / 8, abs=2)


@pytest.mark.parametrize(
    ("model", "gpus", "given"),
    [
        ("llama-3-70b", 3, "does not divide the 64 heads, 8 of keys and values of llama-3-70b; give 2 or 4"),
        ("llama-3-70b", 128, "; give 64"),
        ("qwen2.5-7b", 14, "28 heads, 4 of keys and values of qwen2.5-7b; give 4 or 28"),
        ("deepseek-v3", 3, "does not divide the 128 heads of deepseek-v3; give 2 or 4"),
    ],
)
def test_an_engine_cannot_divide_heads_over_every_number_of_gpus(model: str, gpus: int, given: str) -> None:
    with pytest.raises(OptionError) as raised:
        asked(model=model, tensor_parallel=gpus)
    assert str(raised.value).startswith(f"--tensor-parallel {gpus}: ")
    assert given in str(raised.value)
    assert asked(model="llama-3-70b", tensor_parallel=16).sequence == Range(8192 * 80 * 512, 8192 * 80 * 512)


def test_heads_of_a_configuration_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"does not divide the 16 heads, 8 of keys and values of .*; give 2 or 4"):
        asked(config=written(tmp_path), tensor_parallel=3)
    assert asked(config=written(tmp_path), tensor_parallel=16).fit == "fits"


def test_what_fits_goes_by_the_upper_end() -> None:
    found = asked(model="qwen3-8b")
    assert (found.fit, found.sequences) == ("fits", (47, 49))
    assert replace(found, concurrency=47).fit == "fits"
    assert replace(found, concurrency=48).fit == replace(found, concurrency=49).fit == "may fit"
    assert replace(found, concurrency=50).fit == "does not fit"
    share = replace(found, concurrency=30).least_share
    assert isinstance(share, float)
    assert replace(found, concurrency=30, utilization=share).fit == "fits"
    assert replace(found, concurrency=30, utilization=share - 0.01).fit != "fits"
    assert isinstance(replace(found, concurrency=500).least_share, Unknown)


def test_a_configuration_is_read_with_the_weights_that_are_stored_next_to_it(tmp_path: Path) -> None:
    path = written(tmp_path)
    counted = asked(config=path)
    assert counted.weights == Range(3_441_149_952, 3_441_149_952)
    assert counted.sequence == Range(8192 * 114_688, 8192 * 114_688)
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    assert asked(config=path).weights == Range(1000, 1000)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5 * GIB}}))
    assert asked(config=path).weights == Range(5 * GIB, 5 * GIB)
    by_formula = asked(ServeTerms(weights_bits=32), config=path, tensor_parallel=16).weights
    stored = asked(config=path, tensor_parallel=16).weights
    assert isinstance(by_formula, Range)
    assert isinstance(stored, Range)
    assert stored.low_bytes == 5 * GIB // 16
    assert stored.high_bytes / (5 * GIB) == pytest.approx(by_formula.high_bytes / 6_882_299_904)
    assert asked(ServeTerms(weights_bits=32), config=path).weights == Range(6_882_299_904, 6_882_299_904)


def test_a_sequence_longer_than_the_model_s_is_told(tmp_path: Path) -> None:
    longest = int(str(QWEN3["max_position_embeddings"]))
    told = "vLLM refuses more without VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    for context, is_told in ((longest, False), (longest + 1, True)):
        lines = list(serving_lines(asked(ServeTerms(context=context), config=written(tmp_path))))
        assert any(line.endswith(f"is for {longest:,} tokens: {told}") for line in lines) == is_told


def test_quantized_weights_are_a_range_or_unknown(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weights = asked(config=written(tmp_path, quantization_config=fp8)).weights
    assert isinstance(weights, Range)
    assert 1.72e9 < weights.low_bytes < 1.73e9 < 2.0e9 < weights.high_bytes < 2.1e9
    awq = asked(config=written(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})).weights
    assert isinstance(awq, Unknown)
    assert "give the folder with its *.safetensors" in awq.reason


def test_what_is_not_known_is_said_with_its_reason(tmp_path: Path) -> None:
    gemma = written(tmp_path, model_type="gemma2", sliding_window=4096)
    found = asked(config=gemma)
    assert isinstance(found.fit, Unknown)
    answer, *lines = serving_lines(found)
    assert answer.startswith("Not known whether 16 sequences of 8,192 tokens fit in 0.9 of NVIDIA H100")
    assert "no formula for the weights of gemma2 models" in answer
    assert "its KV cache takes 10." in answer
    assert any("within 4,096 tokens" in line for line in lines)
    newest = asked(config=written(tmp_path, model_type="newest"))
    assert next(serving_lines(newest)).endswith("no rule for the KV cache of newest models")
    for one in (found, newest):
        assert is_of_its_type(ServeObject.of(one))
        assert json.loads(encoded(ServeObject.of(one)))["unavailable"]
    with pytest.raises(OptionError, match="bert-base generates no tokens"):
        asked(ServeTerms(), model="bert-base")


def test_the_command_answers_first(program: Program) -> None:
    line = (
        "predict",
        "--serve",
        "--model",
        "qwen3-8b",
        "--context",
        "8192",
        "--concurrency",
        "16",
        "--gpu",
        "sim:h100",
    )
    said = program(*line)
    assert said.code == 0
    first, _, *rows = said.out.splitlines()
    assert first == (
        "16 sequences of 8,192 tokens fit in 0.9 of NVIDIA H100 80 GB: 33.56–35.66 GiB of 71.27–71.39 GiB; "
        "47 to 49 fit at once"
    )
    assert rows[1].split() == ["KV", "cache", "18.00", "GiB", "16", "×", "8,192", "tokens", "in", "bf16"]
    assert any(row.startswith("GPU KV cache size: 390,384 to 406,592 tokens") for row in rows)
    printed = json.loads(program(*line, "--json").out)
    assert faults(printed, "predict") == []
    assert printed["kv_cache"] == {"low_bytes": 18 * GIB, "high_bytes": 18 * GIB}
    assert printed["own"] == OWN_BYTES.as_json()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--context", "10", "--model", "gpt2", "--batch-size", "1"), "--context: is for --serve; add that"),
        (
            ("--serve", "--model", "gpt2", "--budget", "3GiB"),
            "--budget: --serve follows no training step; leave it out",
        ),
        (("--serve", "--", "python", "train.py"), "--serve: is for a model; give --model NAME"),
    ],
)
def test_options_that_do_not_go_together_are_refused(program: Program, words: tuple[str, ...], why: str) -> None:
    said = program("predict", *words)
    assert said.code == 2
    assert why in said.err
