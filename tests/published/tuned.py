"""Language models tuned by transformers' Trainer, as foundation-model-stack/fms-acceleration's benchmarks do, anew.

Their tables (scripts/benchmarks/refs) have the most bytes that torch allocated while a hundred steps were made on
A100s of 80 GB, with torch 2.4.1, transformers 4.48.1, PEFT 0.13.2 and bitsandbytes 0.43.3: texts packed to 4,096
tokens, recomputation of every layer, FlashAttention 2. `lora`: on q, k, v and o, of 32 bits next to a base of 16,
without autocast; `qlora`: the same next to NF4 with scales quantized twice, under autocast; `qlora-trl`: with norms of
32 bits, as TRL prepares them.

`gpumem-tui predict --gpu sim:a100-80gb -- python tests/published/tuned.py mistral-7b lora 4` predicts a row,
`python -m tests.published tuned` all of them. `lora-fsdp`: the same over two GPUs by FSDP1. Around it, as of
transformers before 5, a checkpoint gives each layer's recomputation an input that is a leaf; FSDP1's hook on it, by
which a frozen layer's weights are let go (`_register_post_backward_reshard_only_hook`), keeps it and its gradient until
backward ends. Not among the rows: kernels of their own, GPTQ, two GPUs otherwise.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gpumem_tui.memory import GIB
from tests.published.compiled import Row

_TOKENS = 4096
_STEPS = 2
_NETWORKS: dict[str, dict[str, Any]] = {
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None,
    },
    "llama-2-70b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
}  # fmt: skip
_SOURCE = "foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb.csv@876e2ed"
_MEASURED = (
    ("mistral-7b full 4", 72_434_837_504), ("mistral-7b full 8", 72_435_230_720),
    ("mistral-7b lora 4", 26_704_571_904), ("mistral-7b lora 8", 38_742_912_512),
    ("mistral-7b qlora-trl 4", 20_669_338_112), ("mistral-7b qlora-trl 8", 37_002_646_016),
    ("mistral-7b qlora 4", 16_373_838_336), ("mistral-7b qlora 8", 28_412_178_944),
    ("llama-2-70b qlora 4", 68_126_381_056),
)  # fmt: skip
_WHY = {"mistral-7b": "0.4 MB or less are not explained", "llama-2-70b": "47 MB are not explained"}
_SHARDED = (("mistral-7b lora-fsdp 2", 15_144_870_400), ("mistral-7b lora-fsdp 4", 21_959_827_968))
ROWS = (
    *(
        Row(
            "fms-" + arguments.replace(" ", "-"), _SOURCE, "a100-80gb", ("tuned.py", *arguments.split()),
            "peak_allocated_bytes", measured_bytes / GIB, 0.1, _WHY[arguments.split()[0]],
            gpus=1 + ("fsdp" in arguments), torch="2.4",
        )
        for arguments, measured_bytes in (*_MEASURED, *_SHARDED)
    ),
)  # fmt: skip
_ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _model(network: str, method: str, device: torch.device) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

    from gpumem_tui.workload.quantized import materialize, pack_base

    AttentionInterface.register("packed", _attention)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)  # a packed text has no padding
    shape = dict(_NETWORKS[network])
    with torch.device("meta"):
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="packed")
    type(model).forward = _forward
    if method.startswith("qlora"):
        from transformers import BitsAndBytesConfig

        settings = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        pack_base(model, settings, device)
    if method != "lora-fsdp":  # which has FSDP bring one unit after the other to the GPU
        materialize(model, device)
    return model


def _adapted(model: Any, method: str) -> Any:
    import peft

    if method == "qlora-trl":
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = parameter.data.float()
    config = peft.LoraConfig(
        r=16, lora_alpha=16, lora_dropout=0.1, target_modules=_ADAPTED, task_type="CAUSAL_LM"
    )  # fmt: skip
    made = peft.get_peft_model(model, config)
    made.enable_input_require_grads()
    return made


def _attention(_module: Any, query: Any, key: Any, value: Any, _mask: None, **_: Any) -> tuple[torch.Tensor, None]:
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2), None


def _forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers 4.48: the last hidden state lives on, and logits of 32 bits next to their copy for the loss."""
    hidden = self.model(input_ids=input_ids, use_cache=False)[0]
    logits = self.lm_head(hidden)
    wide = logits.float()
    shifted = wide[..., :-1, :].contiguous()
    loss = F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[..., 1:].contiguous().view(-1))
    return loss, logits


def _step(model: Any, words: torch.Tensor, labels: torch.Tensor, *, autocast: bool) -> None:
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss, logits = model(input_ids=words, labels=labels)
    if autocast:
        logits = logits.float()  # accelerate's, of what a model returns
    del logits
    loss.backward()


def _sharded(model: Any) -> Any:
    """By FSDP1 as accelerate does for PEFT: each layer, and each adapter of it, is a unit."""
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel

    from gpumem_tui.workload.quantized import materialize

    torch.distributed.init_process_group("nccl")
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=0, limit_all_gathers=True, param_init_fn=lambda module: materialize(module, torch.device("cuda", 0)),
    )  # fmt: skip
    for layer in model.get_base_model().model.layers:
        layer.forward = partial(_checkpointed, layer.forward)
    return sharded


def _checkpointed(forward: Any, hidden: torch.Tensor, **others: Any) -> Any:
    """As transformers 4.48: around FSDP, where that of transformers 5 is within."""
    return checkpoint(partial(forward, **others), hidden, use_reentrant=True)


def train(network: str, method: str, batch_size: int) -> None:
    """Make steps on the GPU."""
    device = torch.device("cuda", 0)
    model = _model(network, method, device)
    if method != "lora-fsdp":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    if method != "full":
        model = _adapted(model, method)
        model = _sharded(model) if method == "lora-fsdp" else model.get_base_model()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, eps=1e-4, weight_decay=0.01)
    for _ in range(_STEPS):
        words, mask, labels = torch.ones(3, batch_size, _TOKENS, dtype=torch.long).unbind()
        words, mask, labels = words.to(device), mask.to(device), labels.to(device)
        _step(model, words, labels, autocast=method.startswith("qlora"))
        clip = torch.nn.utils.clip_grad_norm_
        model.clip_grad_norm_(1.0) if method == "lora-fsdp" else clip(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        del mask


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
