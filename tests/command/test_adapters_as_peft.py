"""Our own LoRA and DoRA against the real PEFT's, on the same small Llama on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumem_tui.formula.recipe import Adapter, AdapterDtype, Precision
from gpumem_tui.formula.records import PRECISION_RECORDS
from gpumem_tui.formula.weights import trained_parameters
from gpumem_tui.memory import Bucket
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.workload.spec import WorkloadSpec
from tests.command.test_hugging_face import BLOCK, traced, traced_spec

pytestmark = pytest.mark.scripts

WORDS, TOKENS, SAMPLES, LAYERS = 500, 512, 32, 2
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": WORDS, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
}  # fmt: skip


@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "base"), ("bf16", "fp32"), ("amp-bf16", "base")])
def test_weights_state_and_peak_are_as_pefts(
    tmp_path: Path, adapter: Adapter, precision: Precision, dtype: AdapterDtype
) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    options = WorkloadOptions(config=str(path), adapter=adapter, adapter_dtype=dtype, precision=precision)
    spec = options.spec()
    assert spec.shape is not None
    ours = traced_spec(WorkloadSpec(spec.recipe, shape=spec.shape), SAMPLES).at(SAMPLES)
    theirs = traced(options, SAMPLES)
    by_peft = theirs.at(SAMPLES)

    counted = trained_parameters(spec.shape, spec.recipe)
    whole = 2 * WORDS * 256 + LAYERS * (2 * 256 * (256 + 256) + 3 * 256 * 512 + 2 * 256) + 256
    assert theirs.done.parameters == whole + counted
    assert ours.breakdown[Bucket.OPTIMIZER] == by_peft.breakdown[Bucket.OPTIMIZER]
    assert abs(ours.breakdown[Bucket.PARAMETERS] - by_peft.breakdown[Bucket.PARAMETERS]) <= 2 * BLOCK
    logits = SAMPLES * TOKENS * WORDS * PRECISION_RECORDS[precision].compute_bytes
    """Our step holds the logits as backward runs; transformers' output, which held them, is gone by then."""
    assert by_peft.peak_allocated_bytes + logits == pytest.approx(ours.peak_allocated_bytes, rel=0.002)
