"""The Plan screen's controls: each one's value in a draft, its range, its steps, and what it refuses.

`plan_of` turns a draft into a `Plan`, or tells which control is in the way. Nudges only ever offer values that go
together with the others; typed ones may not. The words are in ``controls.toml``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import combinations
from typing import Any, cast

import msgspec

from gpumem_tui.catalog.loader import gpus, models
from gpumem_tui.catalog.shapes import ShapeError
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.checks import check_adapters, fault
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.recipe import (
    ADAPTER_DTYPES,
    ADAPTERS,
    ALL_BUT_HEAD,
    ALL_LINEAR,
    ATTENTIONS,
    BASE_QUANTIZATIONS,
    NOTHING_FROZEN,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Extra,
    Extras,
    Recipe,
)
from gpumem_tui.formula.records import OPTIMIZER_RECORDS, PRECISION_RECORDS, QUANTIZATION_RECORDS, SHARDING_RECORDS
from gpumem_tui.formula.techniques import catalog_techniques, why_not
from gpumem_tui.formula.weights import block_count, linear_names
from gpumem_tui.memory import GIB, format_count
from gpumem_tui.plan.control import (
    ALIGNMENT,
    Choice,
    Control,
    Number,
    Option,
    PlanError,
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
from gpumem_tui.plan.plan import MOST_GPUS, SHAPE_LIMITS, Draft, Plan, draft_of, has_field
from gpumem_tui.search.beside import as_beside

_MOST_SAMPLES = 1_000_000_000
_MOST_RANK = 1_000_000
_CUTS = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
_ADAPTER_KEYS = ("adapter", "lora_rank", "lora_targets", "adapter_dtype", "base_quantization")


def controls(draft: Draft) -> tuple[Control, ...]:
    """Return the controls of a draft from top to bottom, without those that its model has nothing to set for."""
    return tuple(control for key, control in _CONTROLS.items() if _has(draft, key))


def control_of(draft: Draft, key: str) -> Control:
    """Return the control with that key.

    Raises:
        KeyError: the draft has none.
    """
    if not _has(draft, key):
        raise KeyError(key)
    return _CONTROLS[key]


def _has(draft: Draft, key: str) -> bool:
    """Return whether there is something to set: a field of the shape, or a cut of a transformer over several GPUs."""
    recipe = draft.recipe
    if key in SHAPE_LIMITS:
        return has_field(draft.shape, key)
    if key in _ADAPTER_KEYS:
        return recipe.has_adapters or (key == "adapter" and draft.shape.record.predicts_tokens)
    if key == "freeze":  # under adapters all is frozen
        return not recipe.has_adapters or recipe.has_frozen_layers
    if key == "expert_parallel" and draft.shape.experts is None:
        return recipe.expert_parallel > 1
    if key in _CUTS:
        return draft.shape.record.has_attention and (recipe.gpus > 1 or getattr(recipe, key) != getattr(Recipe(), key))
    if key == "sequence_parallel":
        return recipe.tensor_parallel > 1 or recipe.sequence_parallel
    if key == "channels_last":
        return draft.shape.record.has_batch_norm or recipe.channels_last
    if key in ("schedule", "micro_batches"):
        return recipe.pipeline_parallel > 1
    return key != "virtual_stages" or (recipe.pipeline_parallel > 1 and recipe.schedule == "interleaved")


def check(plan: Plan) -> None:
    """Check that the controls could have said this.

    Raises:
        OptionError: a number out of its range, or numbers that do not go together; names the option to change.
    """
    try:
        plan_of(draft_of(plan))
    except PlanError as error:
        raise OptionError(f"--{error.control.replace('_', '-')}: {error}") from error


def plan_of(draft: Draft) -> Plan:
    """Return the plan that a draft describes.

    Raises:
        PlanError: a number out of its range, or numbers that do not go together.
    """
    for control in controls(draft):
        if isinstance(control, Number):
            control.check(draft)
    try:
        shape = draft.shape.overridden(**draft.changes)
        shape.check()
        check_adapters(shape, draft.recipe)
    except ShapeError as error:
        key = _key_of(error.option)
        if key == "freeze" or (key in _ADAPTER_KEYS and not _has(draft, key)):
            key = "model"  # without adapters, their controls are not there
        raise PlanError(key, str(error).removeprefix(f"{error.option}: ")) from error
    target, samples = draft.target_batch, draft.pass_samples
    if target is not None and target < samples:
        recipe = draft.recipe
        times = f"{draft.batch_size:,} × {recipe.data_parallel:,} GPU{'s' if recipe.data_parallel > 1 else ''}"
        times += f" × {recipe.pipelined:,} micro-batches of a pipeline" if recipe.pipelined > 1 else ""
        raise PlanError(
            "target_batch",
            f"{target:,} is less than one pass of {samples:,} ({times}); raise it, or lower the batch size",
        )
    if wrong := fault(shape, draft.recipe):
        option, says = wrong
        raise PlanError(_key_of(option), says)
    return Plan(**{**draft.values, "shape": shape})


def _key_of(option: str) -> str:
    """Return the control of a command-line option.

    >>> _key_of("--lora-rank")
    'lora_rank'
    """
    return option.removeprefix("--").replace("-", "_")


def remarks(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what is allowed but may not be meant: a control's key and one line."""
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
        yield catalog_techniques()[extra].control, words
    if recipe.sharding == "none" and recipe.gpus > recipe.model_parallel == recipe.expert_parallel == 1:
        yield "gpus", "without sharding each GPU holds everything"


# How a control is made


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: str
    hint: str
    label: str = ""
    notes: dict[str, str] = {}


_WORDS = msgspec.toml.decode(files("gpumem_tui.plan").joinpath("controls.toml").read_bytes(), type=dict[str, _Words])


def _choice(
    key: str,
    options: Sequence[str] | Callable[[Draft], tuple[Option, ...]],
    notes: Mapping[str, str] | None = None,
    get: Callable[[Draft], str] | None = None,
    put: Callable[[Draft, str], Draft] | None = None,
) -> Choice:
    """Return a choice; of the recipe's field of that name where neither `get` nor `put` states otherwise."""
    words = _WORDS[key]
    if not callable(options):
        explained = {**words.notes, **(notes or {})}
        fixed = tuple(Option(value, explained.get(value, "")) for value in options)
        options = lambda _: fixed  # noqa: E731
    return Choice(
        key, words.label or key, words.group, words.hint, options,
        get or (lambda draft: cast(str, getattr(draft.recipe, key))), put or _recipe_put(key),
    )  # fmt: skip


def _switch(key: str) -> Choice:
    """Return a choice whether the recipe has something."""
    put = _recipe_put(key)
    get: Callable[[Draft], str] = lambda draft: "on" if getattr(draft.recipe, key) else "off"  # noqa: E731
    return _choice(key, ("off", "on"), get=get, put=lambda draft, value: put(draft, value == "on"))


def _number(
    key: str,
    most: int,
    steps: tuple[Steps, Steps],
    put: Callable[[Draft, int | None], Draft],
    get: Callable[[Draft], int | None] | None = None,
    **more: Any,
) -> Number:
    """Return a number; of the draft's field of that name where `get` does not say otherwise.

    Args:
        steps: for an arrow key alone and with shift.
        more: fields of the `Number`.
    """
    words = _WORDS[key]
    get = get or (lambda draft: getattr(draft, key))
    return Number(key, words.label or key, words.group, words.hint, most, *steps, get, put, **more)


def _shape_number(key: str, nudge: Steps, jump: Steps = double) -> Number:
    def put(draft: Draft, value: int | None) -> Draft:
        changes = {**draft.changes, key: value or 0}
        if changes[key] == getattr(draft.shape, key):
            del changes[key]
        return replace(draft, changes=changes)

    return _number(key, SHAPE_LIMITS[key], (nudge, jump), put, lambda draft: draft.shape_value(key))


def _recipe_number(key: str, most: int = MOST_GPUS, least: int = 1) -> Number:
    put = _recipe_put(key)
    get: Callable[[Draft], int] = lambda draft: getattr(draft.recipe, key)  # noqa: E731
    return _number(key, most, (by(1), power), lambda draft, value: put(draft, value or 0), get, least=least)


def _recipe_put(key: str) -> Callable[[Draft, Any], Draft]:
    return lambda draft, value: replace(draft, recipe=replace(draft.recipe, **{key: value}))


# Single controls: their values, and the fields that they set


def _model_options(draft: Draft) -> tuple[Option, ...]:
    listed = models()
    own = () if draft.shape.name in listed else (draft.shape,)
    return tuple(Option(m.name, f"{format_count(count_parameters(m))} parameters") for m in (*own, *listed.values()))


def _put_model(draft: Draft, name: str) -> Draft:
    """Choose another model and drop shape overrides, which were for the old one."""
    return draft if name == draft.shape.name else replace(draft, shape=models()[name], changes={}, model_file=None)


def _gpu_options(draft: Draft) -> tuple[Option, ...]:
    listed = gpus()
    own = () if draft.gpu.name in listed else (draft.gpu,)
    return tuple(Option(gpu.name, f"{gpu.total_bytes / GIB:.1f} GiB, {gpu.sm}") for gpu in (*own, *listed.values()))


def _put_gpu(draft: Draft, name: str) -> Draft:
    return draft if name == draft.gpu.name else replace(draft, gpu=as_beside(gpus()[name], draft.gpu))


_QUARTERS = {1: "a quarter", 2: "half", 3: "three quarters", 4: "all"}


def _freeze_options(draft: Draft) -> tuple[Option, ...]:
    """Return nothing, quarters of the blocks, all but the head where it has a weight of its own, and what was typed."""
    try:
        blocks = block_count(draft.shape.overridden(**draft.changes))
    except ShapeError:
        blocks = block_count(draft.shape)
    notes = {NOTHING_FROZEN: "every weight is trained"}
    for quarters, words in _QUARTERS.items():
        if count := blocks * quarters // 4:
            notes.setdefault(str(count), f"{words} of the {blocks} blocks, and all before them")
    if not draft.shape.tied_head:
        notes[ALL_BUT_HEAD] = "only the last layer is trained"
    notes.setdefault(draft.recipe.freeze, "as given")
    return tuple(Option(value, note) for value, note in notes.items())


def _put_adapter(draft: Draft, value: str) -> Draft:
    """Set the adapter; without one the controls about adapters go back to their defaults."""
    usual = {key: getattr(Recipe(), key) for key in _ADAPTER_KEYS} if value == "none" else {}
    return replace(draft, recipe=replace(draft.recipe, **{**usual, "adapter": value}))


_OF_ATTENTION = frozenset(
    {"qkv", "proj", "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
)
_OF_THE_PAPER = ("q_proj", "v_proj")


def _target_options(draft: Draft) -> tuple[Option, ...]:
    """Return every linear layer, attention's, those of the paper (Hu et al. 2021), the others, and what was typed."""
    names = linear_names(draft.shape)
    attention = [name for name in names if name in _OF_ATTENTION]
    sets = {
        ",".join(attention): "attention",
        ",".join(name for name in names if name not in _OF_ATTENTION): "feed-forward",
    }
    if set(_OF_THE_PAPER) <= set(names):
        sets[",".join(_OF_THE_PAPER)] = "as Hu et al. 2021"
    notes = {ALL_LINEAR: "every one but the output head", **{value: note for value, note in sets.items() if value}}
    notes.setdefault(draft.recipe.lora_targets, "as given")
    return tuple(Option(value, note) for value, note in notes.items())


def _extras_choice(key: str, none: str, **extras: Extra) -> Choice:
    """Return a choice of any of some techniques that only the formula knows.

    Args:
        none: the value without any.
        extras: by the value that represents it alone; several are their values joined by "+".
    """
    every = frozenset(extras.values())
    sets: dict[str, Extras] = {none: frozenset()}
    for count in range(1, len(extras) + 1):
        for some in combinations(extras, count):
            sets["+".join(some)] = frozenset(extras[value] for value in some)

    def get(draft: Draft) -> str:
        return next(value for value, there in sets.items() if there == draft.extras & every)

    return _choice(key, tuple(sets), None, get, lambda d, value: replace(d, extras=d.extras - every | sets[value]))


def _percent(draft: Draft) -> int:
    percent = round(draft.headroom * 100)
    return min(99, percent) if draft.headroom < 1 else percent


def _keeps(records: Mapping[Any, Any]) -> dict[str, str]:
    return {key: record.keeps for key, record in records.items()}


_ALL: tuple[Control, ...] = (
    _choice("model", _model_options, get=lambda d: d.shape.name, put=_put_model),
    _shape_number("layers", by(1)),
    _shape_number("hidden", multiple(hidden_unit)),
    _shape_number("heads", divisor(lambda d: d.shape_value("hidden"), heads_fit)),
    _shape_number("kv_heads", divisor(lambda d: d.shape_value("heads"), lambda _, __: True)),
    _shape_number("ffn", multiple(lambda _: ALIGNMENT)),
    _shape_number("vocab", multiple(lambda _: ALIGNMENT)),
    _shape_number("image_size", multiple(image_unit)),
    _number("batch_size", _MOST_SAMPLES, (by(1), power), lambda d, value: replace(d, batch_size=value or 0)),
    _shape_number("seq_len", multiple(lambda _: ALIGNMENT), power),
    _number("target_batch", _MOST_SAMPLES, (multiple(lambda d: max(1, d.pass_samples)), power),
            lambda d, value: replace(d, target_batch=value or None), optional=True),
    _choice("precision", PRECISIONS, _keeps(PRECISION_RECORDS)),
    _choice("optimizer", OPTIMIZERS, _keeps(OPTIMIZER_RECORDS)),
    _choice("recompute", RECOMPUTES),
    _choice("attention", ATTENTIONS),
    _switch("compile"),
    _choice("freeze", _freeze_options),
    _choice("adapter", ADAPTERS, put=_put_adapter),
    _recipe_number("lora_rank", _MOST_RANK),
    _choice("lora_targets", _target_options),
    _choice("adapter_dtype", ADAPTER_DTYPES),
    _choice("base_quantization", BASE_QUANTIZATIONS, _keeps(QUANTIZATION_RECORDS)),
    _extras_choice("loss", "whole", chunked="chunked-loss"),
    _switch("channels_last"),
    _extras_choice("offload", "none", optimizer="offload-optimizer", activations="offload-activations",
                   parameters="offload-parameters"),
    _choice("gpu", _gpu_options, get=lambda d: d.gpu.name, put=_put_gpu),
    _recipe_number("gpus"),
    _choice("sharding", SHARDINGS, _keeps(SHARDING_RECORDS)),
    _recipe_number("tensor_parallel"),
    _switch("sequence_parallel"),
    _recipe_number("context_parallel"),
    _recipe_number("expert_parallel"),
    _recipe_number("pipeline_parallel"),
    _choice("schedule", SCHEDULES),
    _recipe_number("micro_batches", least=0),
    _recipe_number("virtual_stages", least=2),
    _number("headroom", 99, (by(1), multiple(lambda _: 5)), lambda d, value: replace(d, headroom=(value or 0) / 100),
            _percent, least=0, show=lambda d: f"{d.headroom * 100:g} %"),
)  # fmt: skip
_CONTROLS = {control.key: control for control in _ALL}
