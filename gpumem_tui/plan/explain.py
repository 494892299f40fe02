"""Short help on every row, decision and technique: the formula, the plan's numbers in it, the source, the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.changes import NotApplicable
from gpumem_tui.formula.extras import EXTRA_RECORDS
from gpumem_tui.formula.optimizers import OPTIMIZER_TECHNIQUES
from gpumem_tui.formula.parameters import count_parameters, textbook_parameters
from gpumem_tui.formula.price import COST_ORDER
from gpumem_tui.formula.rows import FormulaRow
from gpumem_tui.formula.transformer import ONE_BLOCK, PAPER, THE_FIRST_BLOCK, WITHOUT_EXPERTS
from gpumem_tui.memory import format_bytes
from gpumem_tui.plan.answers import Answer, answer, moments_of, samples, terms_of
from gpumem_tui.plan.judgement import judgements
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import Technique, techniques
from gpumem_tui.simulator.profile import beside_allocator_bytes


@dataclass(frozen=True)
class Explanation:
    """One help text.

    Attributes:
        key: a row's name, a technique's or a judgement's key, or one of `DECISIONS`.
        formula: in symbols: b batch, S sequence, h hidden, L layers, a heads, V vocabulary, N parameters, D GPUs,
            w bytes of a value.
        numbers: the same with this plan's numbers.
        limits: where it stops being right; "" for nothing to say.
    """

    key: str
    title: str
    formula: str
    numbers: str
    source: str
    limits: str


DECISIONS = (
    "peak",
    "usable",
    "max-batch",
    "accumulation",
    "global-batch",
    "textbook-parameters",
    "textbook-activations",
    "combination",
    "beyond-one-gpu",
)
"""What is explained besides rows, techniques and judgements; the textbook's two forms for transformers only."""


def explanations(plan: Plan) -> Mapping[str, Explanation]:
    """Every help text of a plan by key: rows, decisions, techniques, judgements.

    Raises:
        ValueError: as `answer`.
    """
    now, judged = answer(plan), techniques(plan)
    found = [
        *(_row(row) for row in (*terms_of(plan), *now.prediction.rows)),  # the peak's own last: they stay
        *_decisions(now),
        *(_technique(now, technique) for technique in judged.helping),
        *(_inapplicable(entry) for entry in judged.not_applicable),
        *(
            Explanation(advice.key, advice.title, _JUDGEMENTS[advice.key], advice.text, advice.source, "")
            for advice in judgements(plan)
        ),
    ]
    return MappingProxyType({explanation.key: explanation for explanation in found})


def explain(plan: Plan, key: str) -> Explanation:
    """One help text.

    Raises:
        KeyError: no row, technique, decision or judgement of this plan has that key.
        ValueError: as `answer`.
    """
    return explanations(plan)[key]


# Rows

_STATES = (
    "states per parameter: AdamW, Adam 2; momentum, Lion, Adagrad, RMSprop, Muon's matrices 1; SGD 0; Adafactor row "
    "and column sums"
)
_LINEAR = "part of the textbook's 34·S·b·h a layer; fused or compiled code keeps less"
_ROWS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "parameters": ("N · w", "w is 4 in fp32 and under autocast, 2 in pure bfloat16; / D under ZeRO-3"),
        "gradients": ("N · w", "gone after the optimizer step; / D under ZeRO-2 and ZeRO-3"),
        "gradients of the tied embedding": (
            "2 · V · h · w",
            "while the embedding's gradient and the head's are summed: only where they share one weight",
        ),
        "optimizer state": ("N · states · w", f"{_STATES}; / D under every ZeRO stage; there from the first step on"),
        "16-bit working copy of the parameters": (
            "2N",
            "autocast's cache of 16-bit weights; the textbook's mixed precision keeps such a copy all the time",
        ),
        "16-bit working copy": (
            "2 · N of a block",
            "autocast copies a block's weights again",
        ),
        "gradient of the output head": ("V · h · w", "in a tied head it waits for the embedding's own"),
        "scratch of the update": (
            "N · values · w (Adafactor: of the largest tensor alone)",
            "`fused=True` or `foreach=False` have none; / D under every ZeRO stage",
        ),
        "fp32 master weights": ("N · 4 / D", "DeepSpeed has them whatever the network runs in"),
        "fp32 gradients for the update": ("N · 4 / D, of 1e9 weights at most under ZeRO-3", "gone after the update"),
        "gradients being summed": ("5e8 · w", "`reduce_bucket_size` of DeepSpeed's configuration"),
        "gradients being reduced": ("N outside the blocks · (w + 4)", "of FSDP2's last group, as backward ends"),
        "keys and values on their way": ("2 · b · S/c · 2 · keys · w", "of ring attention; gathering all needs more"),
        "frozen parameters": (
            "N · w, under quantization of what is no linear layer of a block",
            "no gradient, no state",
        ),
        "trained parameters": ("N of what is not frozen · w", "the first blocks and the embedding are frozen"),
        "values inside a frozen block": (
            "S · b · (3h · w of the weights + 2 ffn · w; SwiGLU 3 ffn · w)",
            "what PyTorch's unfused code has at once; only the peak where next to nothing is trained",
        ),
        "gathered inputs": ("L · 2 · S · b · h · w · (t − 1)/t", "Megatron-LM gathers them again in backward"),
        "16-bit copy of a frozen weight": ("inputs · outputs · 2 of the largest", "only under autocast"),
        "the first trained block's maps": ("b · its maps · w", "what comes before it is frozen and keeps none"),
        "quantized parameters": (
            "N of the blocks' linear layers · bits / 8; NF4: 4 + 32/64, doubly 4 + 8/64 + 32/(64 · 256)",
            "PEFT keeps the output head and embeddings unquantized, and in fp32 under autocast",
        ),
        "adapters": ("rank · (inputs + outputs) of each layer that has one · w", "PEFT keeps them in fp32 unless told"),
        "dequantized matrix": ("inputs · outputs · w of the largest", "fused kernels of single requests have none"),
        "adapters' values": (
            "L · S · b · adapters of a block · rank · w; in fp32 over 16 bits + inputs · 4; DoRA + outputs · 2w",
            "`autocast_adapter_dtype=False` keeps PEFT's in the format of the weights",
        ),
        "norm of W + B A": (
            "(inputs² + 3 · inputs · outputs) · w of the largest layer",
            "PEFT goes by way of an identity matrix, which other code does not need",
        ),
        "experts": (
            "L · S · b · (k · (2h + 4·ffn) · v + E · 4 + h · w), and 4 · shared ffn · w",
            "k active of E experts; v is the width of the weights; experts run one by one keep as much",
        ),
        "normalization of queries and keys": ("L · S · b · (queries + keys) · (4 + w)", "fused kernels keep less"),
        "tokens on their way to experts": ("2 · S · b · k · h · w", "as many come as go: an even share"),
        "gathered parameters": (
            "(N − (L − 2) · N of a block) · w",
            "FSDP2 sharding by block; other engines gather in other units",
        ),
        "attention": ("L · S · b · h · 5w (w = 2: 10; grouped keys: less)", _LINEAR),
        "feed-forward": ("L · S · b · h · (1 + 2·ffn/h) · w (SwiGLU: 4·ffn/h)", _LINEAR),
        "normalization": ("L · S · b · h · 2w", _LINEAR),
        "residual stream": (
            "L · S · b · h · 2 · (4 − w), RMSNorm: 2 · (4 + v − w)",
            "v is the width of the weights; fused RMSNorm kernels keep less",
        ),
        "inputs cast again": (
            "L · S · b · h · 2 · casts",
            "one fused projection for queries, keys and values has none",
        ),
        "repeated keys and values": ("L · S · b · 2 · (queries − keys) · w", "`enable_gqa=True` has none"),
        "gradients inside a block": ("S · b · (sums + inner values)", "freed from one operator to the next"),
        "dropout masks": ("L · S · b · h · 2", "none in a model without dropout"),
        "inputs of the blocks": ("L · S · b · h · w", "with full recompute: 2·L·S·b·h bytes in 16 bits, ≥ 90 % less"),
        "attention log-sum-exp": ("L · b · a · S · 4", "fused kernels may keep some more, such as a random state"),
        "attention scores": (
            "L · b · a · S² · (2w + 1), without dropout L · b · a · S² · w",
            "the 5·a·S/h term; a fused kernel has none, so that doubling S then only doubles the memory",
        ),
        "outside the blocks": ("S · b · h · (2w + 1)", ""),
        "convolution outputs": ("Σ b · C · H · W · w", "each is kept as the input of batch norm"),
        "normalized and activated maps": ("Σ b · C · H · W · w", "ReLU in place; cuDNN's workspaces are not counted"),
        "maps of one block while recomputed": ("Σ b · C · H · W · w", "of the block that backward is in"),
        "the stem's maps": ("Σ b · C · H · W · w", "read last in backward"),
        "pooling indices": ("b · C · H · W · 8", "of the one max pooling"),
        "layer outputs": ("b · L · H · w", "w = 4 in fp32: the textbook's B·L·H·4"),
        "output head: logits": ("b · S · V · w", "with the next rows often the peak of a step"),
        "output head: log-softmax": ("b · S · V · 4", "missing in the textbook form; chunked losses avoid it"),
        "output head: logits in fp32": ("b · S · V · 4", "of 16-bit logits, while the loss is computed"),
        "output head: gradients": ("b · S · V · 2 · 4", "missing in the textbook form; short-lived"),
        "output head: gradient of its input": ("b · S · h · w", "a chunked loss makes it in forward"),
        "token ids": ("b · S · 8", "int64, as PyTorch's embedding takes them"),
        "features": ("b · inputs · w", "the textbook's B·D·4 in fp32"),
        "images": ("b · 3 · H · W · w", "the textbook's B·D·4 in fp32"),
        "targets": ("b · S · 8 (a classifier: b · 8)", ""),
    }
)


def _row(row: FormulaRow) -> Explanation:
    name = row.name
    for suffix in (ONE_BLOCK, THE_FIRST_BLOCK, WITHOUT_EXPERTS):
        name = name.removesuffix(suffix)
    formula, limits = _ROWS[name]
    numbers = f"{row.expression} = {format_bytes(row.size_bytes)}"
    said = "; ".join(part for part in (row.note, limits) if part)
    return Explanation(row.name, row.name, formula, numbers, row.source, said)


# Decisions


def _decisions(now: Answer) -> list[Explanation]:
    plan, prediction, steps = now.plan, now.prediction, now.accumulation
    gpus, total = plan.recipe.gpus, plan.gpu.total_bytes
    share = f"{1 - plan.headroom:g}"
    moments = moments_of(plan)
    bound = min(moments, key=lambda one: (now.usable_bytes - moments[one].fixed_bytes) // moments[one].sample_bytes)
    tight = moments[bound]
    found = [
        Explanation(
            "peak",
            "Peak of a step",
            "at the highest moment of a step: fixed + b · bytes of a sample",
            f"{prediction.moment.value}: {format_bytes(prediction.fixed_bytes)} + {plan.batch_size} · "
            f"{format_bytes(prediction.activation_bytes_per_sample)} = {format_bytes(now.peak_bytes)}",
            "sum of the rows",
            " ".join(prediction.assumptions),
        ),
        Explanation(
            "usable",
            "Usable memory",
            "M · (1 − headroom) − what the allocator cannot have",
            f"{format_bytes(total)} · {share} − {format_bytes(beside_allocator_bytes(plan.gpu))} = "
            f"{format_bytes(now.usable_bytes)}",
            "the 0.9 rule of batch-size calculators; context and driver's reserve as the trace counts them",
            "the trace leaves the same headroom free; of the usable bytes the formula takes some for pieces of the "
            "allocator's segments, which PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves little of",
        ),
        Explanation(
            "max-batch",
            "Largest batch",
            "b_max = min over moments of floor((usable − M_fixed / D) / bytes of a sample)",
            f"{bound.value}: floor(({format_bytes(now.usable_bytes)} − {format_bytes(tight.fixed_bytes)}) / "
            f"{format_bytes(tight.sample_bytes)}) = {now.max_batch_size:,}",
            "textbook accounting; Rajbhandari et al. 2020 for D",
            "M_fixed is divided by D only as far as the ZeRO stage shards it",
        ),
        Explanation(
            "accumulation",
            "Accumulation steps",
            "steps = target / (b · D), rounded up",
            f"{steps.target_batch:,} / ({plan.batch_size} · {gpus}) = {steps.steps}"
            + ("" if steps.exact else f", rounded up: {steps.global_batch_size:,} samples instead"),
            "textbook accounting",
            "K steps cost K passes; batch norm sees the micro-batch only",
        ),
        Explanation(
            "global-batch",
            "Global batch",
            "b · D · steps, in tokens · S",
            f"{plan.batch_size} · {gpus} · {steps.steps} = {samples(steps.global_batch_size)}"
            + (f", {now.global_batch_tokens:,} tokens" if now.global_batch_tokens else ""),
            "textbook accounting",
            "D GPUs each take other samples; under model parallelism they would share them",
        ),
        Explanation(
            "combination",
            "Cheapest combination",
            "least price over all sets of at most one change an axis",
            f"cheaper means, in this order: {COST_ORDER}",
            "this program's order",
            "by the closed form; apply it and see what the trace says",
        ),
        Explanation(
            "beyond-one-gpu",
            "Beyond one GPU",
            "data parallel: M_fixed each; ZeRO/FSDP: M_fixed / D; model parallel: L or h / D; offloading: host memory",
            f"{gpus} GPU{'s' if gpus != 1 else ''}, sharding {plan.recipe.sharding}",
            "Rajbhandari et al. 2020, 2021; Shoeybi et al. 2019",
            "cuts by tensor, sequence, context, expert and pipeline are controls of their own",
        ),
    ]
    if plan.shape.record.inputs == "tokens":
        found += [_textbook_parameters(plan.shape), _textbook_activations(plan)]
    return found


def _textbook_parameters(shape: ModelShape) -> Explanation:
    layers, hidden, vocab = shape.layers, shape.hidden, shape.vocab
    counted = textbook_parameters(layers, hidden, vocab)
    return Explanation(
        "textbook-parameters",
        "Parameters by the textbook",
        "N = V·h + L·(12h² + 13h) + 2h",
        f"{vocab:,}·{hidden:,} + {layers}·(12·{hidden:,}² + 13·{hidden:,}) + 2·{hidden:,} = {counted:,}",
        "GPT-2's layout with ffn = 4h",
        f"this architecture has {count_parameters(shape):,}: positions, grouped keys, SwiGLU make the difference",
    )


def _textbook_activations(plan: Plan) -> Explanation:
    shape, batch = plan.shape, plan.batch_size
    linear = shape.layers * shape.seq_len * batch * shape.hidden
    scores = 5 * shape.layers * batch * shape.heads * shape.seq_len**2
    sizes = {
        "none": 34 * linear + scores,
        "selective": 34 * linear,
        "full": 2 * linear + (34 * linear + scores) // shape.layers,
    }
    return Explanation(
        "textbook-activations",
        "Activations by the textbook",
        "L·S·b·h·(34 + 5·a·S/h) bytes in 16 bits; selective recompute 34·L·S·b·h; full 2·L·S·b·h and one layer's own",
        "; ".join(f"recompute {name}: {format_bytes(size_bytes)}" for name, size_bytes in sizes.items()),
        PAPER,
        "GPT blocks with dropout and unfused attention, without the logits; twice that in fp32, masks aside. The rows "
        "count this model's own blocks",
    )


# Judgements

_JUDGEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "throughput": "a product takes the longer of 2·m·n·k / (share · peak · tiles / multiprocessors, at most 1) and "
        "its bytes / bandwidth; backward makes two for one of forward; the update moves 28N bytes with fp32 AdamW",
        "cost": "hours = tokens / (tokens/s · GPUs · efficiency); cost = hours · GPUs · price",
        "critical-batch": "steps = fewest steps · (1 + B_critical / B); samples = fewest · (1 + B / B_critical)",
        "batch-multiple": "largest batch − largest batch mod multiple",
        "learning-rate": "rate · (B / B₀)^½ to rate · B / B₀; B the global batch, B₀ the one of the known rate",
        "batch-norm": "(x − mean) / deviation, both of the micro-batch on one GPU: the noise falls as 1 / √b",
        "precision": "relative step of a value = 2^−mantissa bits; smaller than the smallest, it becomes 0",
        "scaling": "efficiency = step / (step + exposed); sent = 2(n − 1)/n · gradients, ZeRO 3 as much again by half; "
        "exposed = sent / link, at best less backward (2/3 of a pass)",
    }
)


# Techniques

_TECHNIQUES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mixed-precision": (
            "activations · ½; parameters, gradients, state stay 16N, and 2N of 16-bit copies",
            "the copies can cost more than the activations save: small batches of large models",
        ),
        "pure-bf16": ("all of it · ½: 8N with Adam", "7 mantissa bits: an update below 1/256 of a weight is lost"),
        "selective-recompute": (
            "34·L·S·b·h, and one block's scores: the 5·a·S/h term goes",
            "saves next to nothing where a fused kernel keeps no scores",
        ),
        "full-recompute": ("2·L·S·b·h and one block's own", "the output head stays; 60 to 90 % less of the blocks"),
        "lora": (
            "N · w frozen; gradients and state of rank · (inputs + outputs) only",
            "another training: weights move within a low rank; activations stay",
        ),
        "qlora": (
            "N · 4.13 bits frozen; gradients and state of rank · (inputs + outputs) only",
            "as LoRA, and each product unpacks its matrix: slower",
        ),
        "freeze-half": (
            "gradients, state and activations of what comes after the frozen half",
            "of a network that is trained already: what is frozen learns nothing",
        ),
        "fused-attention": ("the 5·a·S/h term becomes 4·a·S bytes", "needs a kernel for the head width and precision"),
        **{key: (technique.arithmetic, technique.caveat) for key, technique in OPTIMIZER_TECHNIQUES.items()},
        "zero1": ("optimizer state / D", "PyTorch's ZeroRedundancyOptimizer spreads whole tensors: less even"),
        "zero2": ("(gradients + optimizer state) / D", "in FSDP2: sharding without resharding after forward"),
        "zero3": ("(parameters + gradients + optimizer state) / D", "blocks are gathered while they run"),
        "more-gpus": ("(parameters + gradients + optimizer state) / 2D", "activations of a GPU do not change"),
        **{extra: (record.arithmetic, record.caveat) for extra, record in EXTRA_RECORDS.items()},
        "shorter-sequence": ("S / 2: linear terms halve, unfused scores quarter", "the network sees less context"),
        "gradient-accumulation": ("b / K samples a pass, K passes", "batch norm sees the micro-batch only"),
        "smaller-batch": ("b / 2", "other gradient noise: see the learning rate"),
    }
)


def _technique(now: Answer, technique: Technique) -> Explanation:
    formula, limits = _TECHNIQUES[technique.key]
    numbers = (
        f"{format_bytes(now.peak_bytes)} → {format_bytes(technique.peak_bytes)} at batch {technique.plan.batch_size}; "
        f"largest batch {now.max_batch_size:,} → {technique.max_batch_size:,}"
    )
    only = "; formula only: cannot be traced" if technique.formula_only else ""
    said = f"cost: {technique.cost}; {limits}{only}"
    return Explanation(technique.key, technique.name, formula, numbers, technique.source, said)


def _inapplicable(entry: NotApplicable) -> Explanation:
    formula, limits = _TECHNIQUES[entry.key]
    return Explanation(entry.key, entry.name, formula, f"not here: {entry.reason}", "this plan", limits)
