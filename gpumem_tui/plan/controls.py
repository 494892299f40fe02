"""The Plan screen's controls as data: what each one sets, its range, its steps, and what it refuses.

`plan_of` turns what they say into a `Plan`, or tells which control is in the way. Nudges only ever offer values that go
together with the others; typed ones may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from gpumem_tui.catalog.loader import gpus, models
from gpumem_tui.catalog.shapes import ShapeError
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.adapters import AdapterError, check_adapters
from gpumem_tui.formula.extras import EXTRA_RECORDS, Extras, why_not
from gpumem_tui.formula.optimizers import OPTIMIZER_RECORDS
from gpumem_tui.formula.parallel import fault
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.quantization import QUANTIZATION_RECORDS
from gpumem_tui.formula.recipe import (
    ADAPTER_DTYPES,
    ATTENTIONS,
    BASE_QUANTIZATIONS,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Recipe,
)
from gpumem_tui.formula.sharding import SHARDING_RECORDS
from gpumem_tui.memory import GIB, format_count
from gpumem_tui.plan.adapter_controls import (
    ADAPTER_KEYS,
    ADAPTER_OPTIONS,
    has_adapter_control,
    put_adapter,
    target_options,
)
from gpumem_tui.plan.control import Choice, Control, Number, Option, PlanError
from gpumem_tui.plan.draft import MOST_GPUS, SHAPE_LIMITS, Draft, draft_of, has_field
from gpumem_tui.plan.freeze_control import freeze_options, put_freeze
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.steps import (
    ALIGNMENT,
    Steps,
    by,
    divisor,
    double,
    heads_fit,
    hidden_unit,
    image_unit,
    multiple,
    power,
)

_MODEL, _BATCH, _TRAINING, _HARDWARE = "Model", "Batch", "Training", "Hardware"


def controls(draft: Draft) -> tuple[Control, ...]:
    """The controls of a draft, from top to bottom; those that its model has nothing to set for are left out."""
    return tuple(c for c in _CONTROLS if _has(draft, c.key))


def _has(draft: Draft, key: str) -> bool:
    """Whether there is something to set: a field of the shape, or of how a transformer is cut over several GPUs."""
    recipe = draft.recipe
    if key in SHAPE_LIMITS:
        return has_field(draft.base, key)
    if key in ADAPTER_KEYS:
        return has_adapter_control(draft, key)
    if key == "freeze":  # under adapters all is frozen
        return not recipe.has_adapters or recipe.has_frozen_layers
    if key == "expert_parallel" and draft.base.experts is None:
        return recipe.expert_parallel > 1
    if key in _CUTS:
        return draft.base.record.has_attention and (recipe.gpus > 1 or getattr(recipe, key) != getattr(Recipe(), key))
    if key == "sequence_parallel":
        return recipe.tensor_parallel > 1 or recipe.sequence_parallel
    if key in ("schedule", "micro_batches"):
        return recipe.pipeline_parallel > 1
    return key != "virtual_stages" or (recipe.pipeline_parallel > 1 and recipe.schedule == "interleaved")


def control_of(draft: Draft, key: str) -> Control:
    """The control with that key.

    Raises:
        KeyError: the draft has none.
    """
    found = [control for control in controls(draft) if control.key == key]
    if not found:
        raise KeyError(key)
    return found[0]


def check(plan: Plan) -> None:
    """Whether the controls could have said this.

    Raises:
        OptionError: a number out of its range, or numbers that do not go together; names the option to change.
    """
    try:
        plan_of(draft_of(plan))
    except PlanError as error:
        raise OptionError(f"--{error.control.replace('_', '-')}: {error}") from error


def plan_of(draft: Draft) -> Plan:
    """The plan that a draft describes.

    Raises:
        PlanError: a number out of its range, or numbers that do not go together.
    """
    for control in controls(draft):
        if isinstance(control, Number):
            control.check(draft)
    try:
        shape = draft.base.overridden(**draft.changes)
        shape.check()
    except ShapeError as error:
        key = error.option.removeprefix("--").replace("-", "_")
        raise PlanError(key, str(error).removeprefix(f"{error.option}: ")) from error
    try:
        check_adapters(shape, draft.recipe)
    except AdapterError as error:
        key = error.option.removeprefix("--").replace("-", "_")
        at = key if has_adapter_control(draft, key) else "model"
        raise PlanError(at, str(error).removeprefix(f"{error.option}: ")) from error
    target, samples = draft.target_batch, draft.pass_samples
    if target is not None and target < samples:
        gpus = f"{draft.recipe.gpus:,} GPU{'s' if draft.recipe.gpus > 1 else ''}"
        raise PlanError(
            "target_batch", f"{target:,} is less than one pass of {samples:,} ({draft.batch_size:,} × {gpus})"
        )
    recipe, extras, goals = draft.recipe, draft.extras, draft.goals
    if wrong := fault(shape, recipe):
        option, says = wrong
        raise PlanError(option.removeprefix("--").replace("-", "_"), says)
    return Plan(shape, recipe, draft.gpu, draft.batch_size, draft.headroom, target, extras, goals, draft.model_file)


def remarks(plan: Plan) -> Iterator[tuple[str, str]]:
    """What is allowed but may not be meant: the control's key and one line."""
    shape, recipe = plan.shape, plan.recipe
    known = models().get(shape.name)
    trained = known.max_seq_len if known is not None else shape.max_seq_len
    if 0 < trained < shape.seq_len:
        yield "seq_len", f"longer than the {trained:,} it was trained at"
    if recipe.attention == "flash" and recipe.precision == "fp32":
        yield "attention", "flash kernels take 16-bit values; in fp32 PyTorch uses efficient"
    if recipe.sharding != "none" and recipe.gpus == 1:
        yield "sharding", "one GPU: there is nothing to shard over"
    for extra in sorted(plan.extras):
        words = why_not(extra, shape, recipe) or "formula only: cannot be traced or searched"
        yield EXTRA_RECORDS[extra].control, words
    if recipe.sharding == "none" and recipe.gpus > recipe.model_parallel == recipe.expert_parallel == 1:
        yield "gpus", "without sharding each GPU holds everything"


def _shape_number(name: str, label: str, group: str, hint: str, nudge: Steps, jump: Steps) -> Number:
    def put(draft: Draft, value: int | None) -> Draft:
        changes = {**draft.changes, name: value or 0}
        if changes[name] == getattr(draft.base, name):
            del changes[name]
        return replace(draft, changes=changes)

    return Number(name, label, group, hint, SHAPE_LIMITS[name], nudge, jump, lambda d: d.shape_value(name), put)


def _recipe_choice(
    name: str, group: str, hint: str, notes: Mapping[str, str], values: tuple[str, ...], label: str = ""
) -> Choice:
    options = tuple(Option(value, notes.get(value, "")) for value in values)
    return Choice(
        name, label or name, group, hint, lambda draft: options,
        lambda draft: cast(str, getattr(draft.recipe, name)),
        lambda draft, value: replace(draft, recipe=_with(draft.recipe, name, value)),
    )  # fmt: skip


def _recipe_number(name: str, label: str, hint: str, least: int = 1) -> Number:
    return Number(
        name, label, _HARDWARE, hint, MOST_GPUS, by(1), power, lambda draft: cast(int, getattr(draft.recipe, name)),
        lambda draft, value: replace(draft, recipe=_with(draft.recipe, name, value or 0)), least,
    )  # fmt: skip


def _with(recipe: Recipe, name: str, value: Any) -> Recipe:
    return replace(recipe, **{name: value})


def _model_options(draft: Draft) -> tuple[Option, ...]:
    listed = models()
    own = () if draft.base.name in listed else (draft.base,)
    return tuple(Option(m.name, f"{format_count(count_parameters(m))} parameters") for m in (*own, *listed.values()))


def _put_model(draft: Draft, name: str) -> Draft:
    """Another model comes with its own shape: the changes were meant for the one that was."""
    return draft if name == draft.base.name else replace(draft, base=models()[name], changes={}, model_file=None)


def _gpu_options(draft: Draft) -> tuple[Option, ...]:
    listed = gpus()
    own = () if draft.gpu.name in listed else (draft.gpu,)
    return tuple(Option(gpu.name, f"{gpu.total_bytes / GIB:.1f} GiB, {gpu.sm}") for gpu in (*own, *listed.values()))


def _put_gpu(draft: Draft, name: str) -> Draft:
    return draft if name == draft.gpu.name else replace(draft, gpu=gpus()[name])


def _loss(draft: Draft) -> str:
    return "chunked" if "chunked-loss" in draft.extras else "whole"


def _put_loss(draft: Draft, value: str) -> Draft:
    chunked: Extras = frozenset({"chunked-loss"})
    return replace(draft, extras=draft.extras | chunked if value == "chunked" else draft.extras - chunked)


_OFFLOADS: Mapping[str, Extras] = {
    "none": frozenset(),
    "optimizer": frozenset({"offload-optimizer"}),
    "activations": frozenset({"offload-activations"}),
    "both": frozenset({"offload-optimizer", "offload-activations"}),
}


def _offload(draft: Draft) -> str:
    moved = draft.extras & _OFFLOADS["both"]
    return next(name for name, extras in _OFFLOADS.items() if extras == moved)


def _put_offload(draft: Draft, value: str) -> Draft:
    return replace(draft, extras=draft.extras - _OFFLOADS["both"] | _OFFLOADS[value])


def _percent(draft: Draft) -> int:
    percent = round(draft.headroom * 100)
    return min(99, percent) if draft.headroom < 1 else percent


def _show_percent(draft: Draft) -> str:
    return f"{draft.headroom * 100:g} %"


_SEQUENCE_PARALLEL = (Option("off", "whole between the cut matrices"), Option("on", "cut there, too"))
_CUTS = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
_LOSSES = (Option("whole", "all logits at once"), Option("chunked", "the sequence in pieces; formula only"))
_OFFLOAD_OPTIONS = (
    Option("none", "everything stays on the GPU"),
    Option("optimizer", "optimizer state in host memory; formula only"),
    Option("activations", "activations in host memory; formula only"),
    Option("both", "optimizer state and activations; formula only"),
)

_CONTROLS: tuple[Control, ...] = (
    Choice("model", "model", _MODEL, "Enter picks from the catalog", _model_options, lambda d: d.base.name, _put_model),
    _shape_number("layers", "layers", _MODEL, "Transformer blocks", by(1), double),
    _shape_number("hidden", "hidden", _MODEL, "Width of the residual stream; the feed-forward width follows",
                  multiple(hidden_unit), double),
    _shape_number("heads", "heads", _MODEL, "Attention heads; they divide the hidden size",
                  divisor(lambda d: d.shape_value("hidden"), heads_fit), double),
    _shape_number("kv_heads", "kv heads", _MODEL, "Key/value heads; they divide the heads",
                  divisor(lambda d: d.shape_value("heads"), lambda d, n: True), double),
    _shape_number("ffn", "ffn", _MODEL, "Inner width of the feed-forward network",
                  multiple(lambda d: ALIGNMENT), double),
    _shape_number("vocab", "vocab", _MODEL, "Vocabulary: the output head's width",
                  multiple(lambda d: ALIGNMENT), double),
    _shape_number("image_size", "image px", _MODEL, "Pixels a side", multiple(image_unit), double),
    Number("batch_size", "micro-batch", _BATCH, "Samples of one forward and backward on one GPU", 1_000_000_000,
           by(1), power, lambda d: d.batch_size, lambda d, v: replace(d, batch_size=v or 0)),
    _shape_number("seq_len", "sequence", _BATCH, "Tokens a sample",
                  multiple(lambda d: ALIGNMENT), power),
    Number("target_batch", "target", _BATCH, "Samples wanted per optimizer step over all GPUs; 0 for none",
           1_000_000_000, multiple(lambda d: max(1, d.pass_samples)), power, lambda d: d.target_batch,
           lambda d, v: replace(d, target_batch=v or None), optional=True),
    _recipe_choice("precision", _TRAINING, "What weights, gradients and activations are kept in",
                   {key: record.keeps for key, record in PRECISION_RECORDS.items()}, PRECISIONS),
    _recipe_choice("optimizer", _TRAINING, "What it keeps per parameter between steps",
                   {key: record.keeps for key, record in OPTIMIZER_RECORDS.items()}, OPTIMIZERS),
    _recipe_choice("recompute", _TRAINING, "What backward computes again instead of keeping", {
        "none": "keep every activation", "selective": "the attention core", "full": "every block",
    }, RECOMPUTES),
    _recipe_choice("attention", _TRAINING, "The scaled-dot-product kernel", {
        "auto": "PyTorch's choice", "flash": "fused, 16-bit only", "efficient": "fused", "math": "keeps the scores",
    }, ATTENTIONS),
    Choice("freeze", "freeze", _TRAINING, "The first blocks, which stay as they are", freeze_options,
           lambda d: d.recipe.freeze, put_freeze),
    Choice("adapter", "adapter", _TRAINING, "What is trained", lambda d: ADAPTER_OPTIONS, lambda d: d.recipe.adapter,
           put_adapter),
    Number("lora_rank", "rank", _TRAINING, "Width between an adapter's two matrices", 1_000_000, by(1), power,
           lambda d: d.recipe.lora_rank, lambda d, v: replace(d, recipe=replace(d.recipe, lora_rank=v or 0))),
    Choice("lora_targets", "adapters at", _TRAINING, "The linear layers that have adapters", target_options,
           lambda d: d.recipe.lora_targets, lambda d, v: replace(d, recipe=replace(d.recipe, lora_targets=v))),
    _recipe_choice("adapter_dtype", _TRAINING, "What adapters are kept in", {
        "base": "as the precision has it", "fp32": "PEFT's default",
    }, ADAPTER_DTYPES, "adapters in"),
    _recipe_choice("base_quantization", _TRAINING, "What the frozen weights of the blocks are kept in", {
        "none": "as the precision has it", **{key: record.keeps for key, record in QUANTIZATION_RECORDS.items()},
    }, BASE_QUANTIZATIONS, "base"),
    Choice("loss", "loss", _TRAINING, "How much of the logits is there at once", lambda d: _LOSSES, _loss, _put_loss),
    Choice("offload", "offload", _TRAINING, "What waits in host memory", lambda d: _OFFLOAD_OPTIONS, _offload,
           _put_offload),
    Choice("gpu", "GPU", _HARDWARE, "Enter picks from the catalog", _gpu_options, lambda d: d.gpu.name, _put_gpu),
    Number("gpus", "GPU count", _HARDWARE, "GPUs that train together", MOST_GPUS, by(1), power,
           lambda d: d.recipe.gpus, lambda d, v: replace(d, recipe=replace(d.recipe, gpus=v or 0))),
    _recipe_choice("sharding", _HARDWARE, "What is spread over the GPUs (ZeRO)", {
        key: record.keeps for key, record in SHARDING_RECORDS.items()
    }, SHARDINGS),
    _recipe_number("tensor_parallel", "tensor (TP)", "Tensor parallel: GPUs over which every block's matrices are cut"),
    Choice("sequence_parallel", "seq. (SP)", _HARDWARE, "Sequence parallel: cuts what tensor parallel leaves whole",
           lambda d: _SEQUENCE_PARALLEL, lambda d: "on" if d.recipe.sequence_parallel else "off",
           lambda d, v: replace(d, recipe=replace(d.recipe, sequence_parallel=v == "on"))),
    _recipe_number("context_parallel", "context (CP)", "Context parallel: GPUs over which each sequence is cut"),
    _recipe_number("expert_parallel", "experts (EP)", "Expert parallel: GPUs over which a block's experts are spread"),
    _recipe_number("pipeline_parallel", "stages (PP)", "Pipeline stages (GPUs) among which the blocks are divided"),
    _recipe_choice("schedule", _HARDWARE, "Pipeline schedule: how many micro-batches' activations wait for backward", {
        "1f1b": "at most one micro-batch a stage", "gpipe": "every micro-batch",
        "interleaved": "1f1b, each GPU with pieces of the network",
    }, SCHEDULES),
    _recipe_number("micro_batches", "batches (PP)", "Micro-batches of a pipeline's step; 0: as many as stages", 0),
    _recipe_number("virtual_stages", "pieces (PP)", "Pieces on each GPU of an interleaved pipeline", 2),
    Number("headroom", "headroom", _HARDWARE, "Share of the GPU that the formula leaves free", 99, by(1),
           multiple(lambda d: 5), _percent, lambda d, v: replace(d, headroom=(v or 0) / 100), least=0,
           show=_show_percent),
)  # fmt: skip
