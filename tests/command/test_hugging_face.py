"""Models that transformers builds from a config.json: their parameters and their step, on the simulated GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.catalog.config_file import read_config_file
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import predict as predict_by_formula
from gpumem_tui.memory import Bucket
from gpumem_tui.options.workload import WorkloadOptions, simulated_device
from gpumem_tui.run.control import Unusable
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import Replay
from gpumem_tui.workload.spec import WorkloadSpec
from tests.command.running import TIMEOUT_S, Project
from tests.sharing import WarmPython, made_once
from tests.terminal.terminal import terminal
from tests.warm import TRANSFORMERS

pytestmark = pytest.mark.scripts

SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WIDE = {**SIZES, "head_dim": 16}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **SIZES, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], **SIZES, "attention_dropout": 0.1},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **SIZES, "hidden_act": "gelu", "tie_word_embeddings": True},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], **WIDE, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "attention_bias": True,
    },
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **WIDE},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **WIDE, "sliding_window": 32},
    "phi3": {"architectures": ["Phi3ForCausalLM"], **SIZES, **ENDS},
    "opt": {
        "architectures": ["OPTForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "ffn_dim": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 64,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "vocab_size": 1000, "d_model": 64,
        "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0,
    },
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"], **SIZES, **ENDS, "cls_token_id": 1, "sep_token_id": 2,
    },
    "convnext": {
        "architectures": ["ConvNextForImageClassification"], "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1],
        "image_size": 64,
    },
}  # fmt: skip
"""By model_type a small network of each kind; Llama's, Mistral's and Qwen's are as no closed form has them."""

_OWN = {
    **WIDE, "vocab_size": 500, "hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
_BERT = {key: value for key, value in _OWN.items() if key not in ("num_key_value_heads", "head_dim")}
OWN_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 500, "n_embd": 128, "n_layer": 2, "n_head": 4,
        "n_positions": 512,
    },
    "bert": {"architectures": ["BertForSequenceClassification"], **_BERT},
    "vit": {
        "architectures": ["ViTForImageClassification"], "hidden_size": 128, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 8,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], **_OWN},
    "mistral": {"architectures": ["MistralForCausalLM"], **_OWN},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_OWN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_OWN},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], **_OWN, "moe_intermediate_size": 128, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], **_OWN, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], **_OWN, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 32,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], **_OWN, "num_key_value_heads": 4, "moe_intermediate_size": 128,
        "n_routed_experts": 16, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32,
        "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
}  # fmt: skip
"""By model_type a small network of each kind that has a closed form and a network of ours since it has experts, or
normalizes its queries."""

COUNT = """
import json, sys
import torch, transformers

counts = {}
for name, values in json.load(sys.stdin).items():
    config = transformers.AutoConfig.for_model(name.split()[0], **values)
    with torch.device("meta"):
        model = getattr(transformers, values["architectures"][0])(config)
    counts[name] = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
print(json.dumps(counts))
"""
LONGEST = """
import json
from transformers.models.auto import configuration_auto, modeling_auto

keys = "max_position_embeddings", "n_positions", "max_target_positions"
tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM")]
found = {}
for name in sorted({name for table in tables for name in table}):
    try:
        config = configuration_auto.CONFIG_MAPPING[name]()
        text = config.get_text_config()
    except Exception:
        continue  # has no defaults of its own
    longest = next((value for key in keys if isinstance(value := getattr(text, key, None), int)), None)
    heads = [table[name] for table in reversed(tables) if name in table]
    head = heads[0] if isinstance(heads[0], str) else heads[0][0]
    found[name] = longest, head, bool(config.is_encoder_decoder)
print(json.dumps(found))
"""


def test_no_sample_is_longer_than_transformers_takes_where_the_file_does_not_say(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    python = WarmPython.path(TRANSFORMERS)
    done = subprocess.run([python, "-c", LONGEST], capture_output=True, text=True, check=True)
    found: dict[str, tuple[int | None, str, bool]] = json.loads(done.stdout)
    assert len(found) > 100
    for name, (longest, head, is_pair) in found.items():
        if longest is not None and longest > 0:  # XLNet's has no end
            said = {"model_type": name, "architectures": [head], "is_encoder_decoder": is_pair}
            (tmp_path / "config.json").write_text(json.dumps(said))
            assert read_config_file(tmp_path).usual_seq_len <= longest, name


BLOCK = 512
"""Bytes to which the allocator rounds a parameter up, at the most."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Parameters and their tensors, as transformers builds each model on tensors without data."""
    pytest.importorskip("transformers")
    return made_once(tmp_path_factory, "counts", _counted)


def _counted() -> dict[str, tuple[int, int]]:
    done = subprocess.run(
        [WarmPython.path(TRANSFORMERS), "-c", COUNT],
        input=json.dumps({**CONFIGS, **{f"{name} own": values for name, values in OWN_CONFIGS.items()}}),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, tuple[int, int]] = json.loads(done.stdout)
    return found


def written(folder: Path, name: str, **more: Any) -> str:
    """The config.json of one of the models, in a folder of its name."""
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": name, **CONFIGS[name], **more}))
    return str(path)


@pytest.mark.parametrize("name", OWN_CONFIGS)
def test_the_closed_form_and_our_network_are_as_transformers_builds_it(
    name: str, tmp_path: Path, counts: dict[str, tuple[int, int]]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, **OWN_CONFIGS[name]}))
    options = WorkloadOptions(config=str(path), precision="bf16", optimizer="sgd")
    spec = options.spec(WarmPython.path(TRANSFORMERS))
    assert spec.shape is not None
    assert spec.network == f"traced as transformers' {OWN_CONFIGS[name]['architectures'][0]}"
    ours = traced_spec(WorkloadSpec(spec.recipe, shape=spec.shape), 32).at(32)
    theirs = traced(options, 32).at(32)
    formula = predict_by_formula(spec.shape, spec.recipe, 32).peak_bytes
    assert count_parameters(spec.shape) == counts[f"{name} own"][0]
    if name not in ("gpt2", "bert", "vit"):  # so small that cuBLAS's workspaces are most of what the formula lacks
        assert formula == pytest.approx(ours.peak_allocated_bytes, rel=0.1)

    assert ours.peak_moment is not None
    at = ours.peak_moment[1].operator
    by_ours, by_theirs = highest_at(ours, at), highest_at(theirs, at)
    named: Counter[str] = Counter()
    for _, mebibytes in APART.get(name, ()):
        named.update({operator: round(MIB * size) for operator, size in mebibytes.items()})
    near = 0.001 * by_theirs.total()
    assert by_ours.total() - by_theirs.total() == pytest.approx(named.total(), abs=near)
    made = {"aten.randint", "aten.randn", "aten._to_copy"}  # the batch, made on the device or copied to it
    for operator in (by_ours.keys() | by_theirs.keys()) - made:
        assert by_ours[operator] - by_theirs[operator] == pytest.approx(named[operator], abs=near), operator


def highest_at(replay: Replay, operator: str) -> Counter[str]:
    """Return what was asked for and held, in bytes by the operator that made it, at the operator's highest moment."""
    timeline, live, most = replay.timeline, Counter[int](), Counter[int]()
    made = iter(enumerate(zip(timeline.sizes, timeline.sites, strict=True), 1))
    operators = {}
    for event in timeline.events:
        if event < 0:
            live.pop(-event, None)
            continue
        number, (size, site) = next(made)
        live[number], operators[number] = size, timeline.site_table[site].operator
        if operators[number] == operator and live.total() > most.total():
            most = live.copy()
    found: Counter[str] = Counter()
    for number, size in most.items():
        found[operators[number]] += size
    return found


MIB = 1 << 20
LOGITS = (
    "our step holds the logits through backward, as a loop's variable does; transformers' output goes with its loss",
    {"aten.mm": 15.625},
)
HEADS = (
    "our keys and values are repeated for every head of the queries, transformers' attention takes the heads there are",
    {"aten.clone": 8.0, "aten.add": -2.0, "aten.mm": -2.0},
)
BIASED_HEADS = (HEADS[0], {"aten.clone": 8.0, "aten.add": -2.0, "aten.addmm": -2.0})
APART: dict[str, tuple[tuple[str, dict[str, float]], ...]] = {
    "gpt2": (
        LOGITS,
        (
            "transformers writes gelu_new out, and backward keeps every step of its formula",
            {"aten.gelu": 32.0, "aten.mul": -64.0, "aten.add": -32.0, "aten.tanh": -32.0},
        ),
    ),
    "llama": (LOGITS, HEADS),
    "mistral": (LOGITS, HEADS),
    "qwen2": (LOGITS, BIASED_HEADS),
    "qwen3": (LOGITS, HEADS),
    "qwen3_moe": (
        LOGITS,
        HEADS,
        (
            "our router normalizes, transformers' only where the file has norm_topk_prob",
            {"aten.clone": 0.25, "aten.sum": 0.125},
        ),
    ),
    "mixtral": (LOGITS, HEADS),
    "gpt_oss": (
        LOGITS,
        (
            "both repeat keys and values, as sinks want attention written out; rotated halves are joined otherwise",
            {"aten.clone": 4.0, "aten.cat": -4.0},
        ),
    ),
    "deepseek_v3": (LOGITS,),
}
"""Why our plain network and transformers' class hold different amounts at the peak, by family: of each reason the
sentence, and by operator how many MiB ours has more. BERT and ViT hold equal amounts. The class is what a plan traces.

GPT-OSS's class has its peak elsewhere: see below. The allocator gives ViT's a block 0.7 MiB larger than is asked for.
"""


def test_the_class_of_gpt_oss_has_its_peak_in_the_experts_forward(tmp_path: Path) -> None:
    """Its masks, two, and the biases gathered for every token are held there; ours has its peak at the loss."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt_oss", **OWN_CONFIGS["gpt_oss"]}))
    found = traced(WorkloadOptions(config=str(path), precision="bf16", optimizer="sgd"), 32)
    moment = found.at(32).peak_moment
    assert moment is not None
    assert (moment[0].phase, moment[1].module) == ("forward", "model.layers.1.mlp.experts")
    held: Counter[tuple[str, str]] = Counter()
    for one in found.held_at_peak(32):
        held[one.site.operator, one.site.module] += one.size_bytes
    samples, tokens, chosen, both_projections = 32, 512, 2, 2 * 512
    assert held["aten.where", "model"] == 2 * 2 * samples * tokens * tokens
    biases = 2 * samples * tokens * chosen * both_projections
    assert held["aten.index", moment[1].module] == pytest.approx(biases, rel=0.15), "and the tokens' own rows"


def traced(options: WorkloadOptions, batch_size: int = 2) -> Traced:
    """The step at one batch size."""
    return traced_spec(options.spec(WarmPython.path(TRANSFORMERS)), batch_size)


def traced_spec(spec: WorkloadSpec, batch_size: int) -> Traced:
    """The step of a workload at one batch size."""
    python = WarmPython.path(TRANSFORMERS)
    config = SearchConfig(spec, simulated_device("a100-40gb"), python, steps=2)
    found = predict(config, batch_size=batch_size, not_affine="one size is enough").prediction
    assert isinstance(found.traced, Traced)
    assert found.formula.max_batch_size
    return found.traced


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_any_architecture_is_traced(name: str, tmp_path: Path, counts: dict[str, tuple[int, int]]) -> None:
    parameters, tensors = counts[name]
    found = traced(WorkloadOptions(config=written(tmp_path, name)))
    buckets = found.at(2).breakdown
    assert found.done.parameters == parameters
    assert 0 <= buckets[Bucket.PARAMETERS] - 4 * parameters <= BLOCK * (tensors + 40), "and a few buffers"
    assert 0 <= buckets[Bucket.OPTIMIZER] - 8 * parameters <= 3 * BLOCK * tensors, "two moments, and a step's number"
    assert buckets[Bucket.ACTIVATIONS] > 0
    assert buckets[Bucket.BATCH_DATA] > 0


class TestOptions:
    """Precision, recompute and the sequence, on a model that has nothing else about it."""

    def test_bf16_halves_weights_and_state(self, tmp_path: Path) -> None:
        path = written(tmp_path, "olmo2", torch_dtype="float32")
        single, half = traced(WorkloadOptions(config=path)), traced(WorkloadOptions(config=path, precision="bf16"))
        for bucket in (Bucket.PARAMETERS, Bucket.OPTIMIZER):
            before, after = single.at(2).breakdown[bucket], half.at(2).breakdown[bucket]
            assert after == pytest.approx(before / 2, rel=0.05)

    def test_recompute_keeps_less(self, tmp_path: Path) -> None:
        path = written(tmp_path, "olmo2", num_hidden_layers=6, vocab_size=100)
        kept, again = traced(WorkloadOptions(config=path)), traced(WorkloadOptions(config=path, recompute="full"))
        assert again.at(2).breakdown[Bucket.ACTIVATIONS] < kept.at(2).breakdown[Bucket.ACTIVATIONS] / 2
        assert again.done.parameters == kept.done.parameters


NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("doubly", [False, True])
def test_a_base_of_4_bits_is_packed_by_bitsandbytes(tmp_path: Path, doubly: bool) -> None:
    for library in ("peft", "bitsandbytes", "accelerate"):
        pytest.importorskip(library)
    path = tmp_path / "config.json"
    values = {"model_type": "llama", **OWN_CONFIGS["qwen3"], "architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps({**values, "quantization_config": {**NF4, "bnb_4bit_use_double_quant": doubly}}))
    hidden, inner, words, layers, rank = 128, 512, 500, 2, 8
    attention = [(64, hidden), (32, hidden), (32, hidden), (hidden, 64)]
    matrices = [*attention, (inner, hidden), (inner, hidden), (hidden, inner)] * layers
    adapters = sum(rank * (outputs + inputs) for outputs, inputs in matrices)
    blocks = sum(outputs * inputs for outputs, inputs in matrices) // 64
    tables = len(matrices) * (BLOCK + (1024 + BLOCK if doubly else 0))
    scales = blocks + 4 * len(matrices) if doubly else 4 * blocks
    rest = 2 * (2 * words * hidden + (2 * layers + 1) * hidden)

    packed = traced(WorkloadOptions(config=str(path), adapter="lora", precision="bf16"), 32).at(32)
    ours = WorkloadOptions(
        config=str(path), dequantize=True, adapter="lora", precision="bf16",
        base_quantization="nf4-dq" if doubly else "nf4",
    )  # fmt: skip
    by_ours = traced(ours, 32).at(32)

    counted = 32 * blocks + scales + tables + rest + 2 * adapters
    held = packed.breakdown[Bucket.PARAMETERS]
    assert counted <= held <= counted + BLOCK * (5 * len(matrices) + 10), "what the allocator rounds up to"
    assert packed.peak_allocated_bytes == pytest.approx(by_ours.peak_allocated_bytes, rel=0.05)


def test_frozen_layers_have_no_state(tmp_path: Path) -> None:
    path = written(tmp_path, "olmo2", num_hidden_layers=4)
    state = [
        traced(WorkloadOptions(config=path, freeze=freeze)).at(2).breakdown[Bucket.OPTIMIZER]
        for freeze in ("none", "2", "3", "4")
    ]
    block = state[1] - state[2]
    assert state[2] - state[3] == block > 0
    assert state[0] - state[1] == pytest.approx(2 * block + 8 * 1000 * 64, rel=0.01), "two blocks and the embedding"


def test_what_transformers_builds_and_cannot_be_frozen_so_is_one_line(tmp_path: Path) -> None:
    for name, freeze, says in (
        ("t5", "1", "T5ForConditionalGeneration has not one list of blocks but these: encoder.block, decoder.block"),
        ("opt", "3", "OPTForCausalLM has 2 blocks, in model.decoder.layers; freeze 1 to 2"),
        ("qwen2", "all-but-head", "nothing of Qwen2ForCausalLM is left to train"),
    ):
        with pytest.raises(Unusable, match=f"--freeze {freeze}: {says}"):
            traced(WorkloadOptions(config=written(tmp_path, name), freeze=freeze))


def test_the_command_line_takes_a_path_as_a_model(tmp_path: Path, counts: dict[str, tuple[int, int]]) -> None:
    folder = Path(written(tmp_path, "qwen3_moe")).parent
    options = (
        "--model",
        str(folder),
        "--gpu",
        "sim:t4-16gb",
        "--batch-size",
        "4",
        "--python",
        WarmPython.path(TRANSFORMERS),
    )
    done = Project(tmp_path).run("predict", *options, "--json").json
    assert done["workload"]["model"] == "qwen3_moe"
    assert done["workload"]["architecture"] == "Qwen3MoeForCausalLM"
    assert done["formula"]["unavailable"].endswith(
        "has 'attention_bias' = True, which has no formula: use `--python PATH` with transformers"
    )
    assert done["traced"]["parameters"] == counts["qwen3_moe"][0]
    assert done["traced"]["max_batch_size"] > 4


def test_a_plan_of_it_shows_what_was_traced_and_runs_what_ifs(tmp_path: Path) -> None:
    path = written(tmp_path, "olmo2")
    options = (
        "--model",
        path,
        "--gpu",
        "sim:t4-16gb",
        "--what-if",
        "checkpointing",
        "--python",
        WarmPython.path(TRANSFORMERS),
    )
    done = Project(tmp_path).run("plan", *options, "--json").json
    assert done["formula"]["buckets"] is None
    assert done["traced"]["peak_allocated_bytes"] > 0
    assert [technique["key"] for technique in done["techniques"] if technique["source"] == "traced"] == [
        "checkpointing"
    ]
    assert {gpu["name"]: gpu["max_batch_size"] for gpu in done["gpus"]}["h100-80gb"] > done["traced"]["max_batch_size"]


def test_a_plan_of_it_that_fits_runs_no_what_ifs_unasked(tmp_path: Path) -> None:
    options = ("--model", written(tmp_path, "olmo2"), "--gpu", "sim:t4-16gb", "--python", WarmPython.path(TRANSFORMERS))
    done = Project(tmp_path).run("plan", *options, "--json").json
    assert done["answer"].startswith("Batch 1 fits")
    reasons = {one["key"]: one["reason"] for one in done["not_applicable"]}
    assert reasons["checkpointing"] == "skipped, already fits; --what-if checkpointing runs it"


def test_what_transformers_does_not_know_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "nobody-has-this", "vocab_size": 10}))
    with pytest.raises(Unusable, match=r"--config: transformers [\d.]+ cannot read .*nobody-has-this"):
        traced(WorkloadOptions(config=str(path)))


def test_where_transformers_is_missing_one_line_says_what_to_do(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("transformers.py", "raise ImportError('No module named transformers')")
    model = written(tmp_path, "olmo2")
    options = ("--gpu", "sim:t4-16gb", "--batch-size", "1", "--python", sys.executable)
    done = project.run("predict", "--model", model, *options)
    assert done.code == 2
    assert "cannot import transformers (No module named transformers), which builds this model" in done.complaint
    assert "--python" in done.complaint
    assert "--workload, or your command after --" in done.complaint


def test_the_plan_screen_shows_the_trace(tmp_path: Path) -> None:
    options = (
        "--model",
        written(tmp_path, "olmo2"),
        "--gpu",
        "sim:t4-16gb",
        "--no-what-if",
        "--python",
        WarmPython.path(TRANSFORMERS),
    )
    with terminal("plan", *options, columns=120, lines=40) as screen:
        screen.wait_for("olmo2 · Olmo2ForCausalLM", "parameters · sequence length 64", deadline_s=TIMEOUT_S)
        screen.wait_for("✓ fits", "activations", "= allocated", deadline_s=TIMEOUT_S)


def test_a_search_tries_sizes_of_it(tmp_path: Path) -> None:
    options = (
        "--model",
        written(tmp_path, "olmo2"),
        "--gpu",
        "sim:t4-16gb",
        "--limit",
        "128MiB",
        "--python",
        WarmPython.path(TRANSFORMERS),
    )
    *_, result = Project(tmp_path).run("search", *options, "--json").lines
    assert result["verified"]
    assert result["max_batch_size"] > 1
