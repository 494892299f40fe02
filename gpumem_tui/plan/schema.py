"""What `predict`, `search` and `plan` print with ``--json``, as types: `gpumem-tui schema` makes JSON Schema of them.

Keys of a version stay, new ones may come: so the schema that is printed allows more than it names, and tests hold what
is printed to these types, key by key. Bytes are whole numbers; null stands for what is unknown, or is not there.
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.goals import Quantity
from gpumem_tui.plan.judgement import Judgement
from gpumem_tui.search.prediction import Fit

Bytes = dict[str, int]
"""By bucket."""


class _Printed(msgspec.Struct, forbid_unknown_fields=True):
    """A printed object: it has these keys and no others; those that may be absent are `UnsetType`."""


class _Range(_Printed):
    low_bytes: int
    high_bytes: int


class _Unknown(_Range):
    name: str
    source: str


_OfRecipe: Any = msgspec.defstruct(
    "_OfRecipe",
    [(name, kind | UnsetType, UNSET) for name, kind in get_type_hints(Recipe).items()],
    bases=(_Printed,),
    kw_only=True,
)


class _Workload(_OfRecipe, kw_only=True):  # type: ignore[call-arg,misc]
    """The training that a result is about: a model with its recipe, or a command."""

    model: str
    batch_size: int | UnsetType | None = UNSET
    command: list[str] | UnsetType = UNSET
    parameters: int | UnsetType = UNSET
    trained_parameters: int | UnsetType = UNSET
    shape: dict[str, Any] | UnsetType = UNSET
    extras: list[str] | UnsetType = UNSET
    model_type: str | UnsetType = UNSET
    architecture: str | UnsetType = UNSET
    seq_len: int | UnsetType | None = UNSET


class _Device(_Printed):
    name: str
    total_bytes: int
    simulated: bool
    reason: str | None


class _Row(_Printed):
    bucket: str
    name: str
    size_bytes: int
    formula: str
    source: str
    note: str


class _Formula(_Printed):
    """The closed form at the batch size."""

    buckets: Bytes | None
    peak_bytes: int | None
    max_batch_size: int | None
    highest: Bytes | UnsetType = UNSET
    moment: str | UnsetType = UNSET
    cache_bytes: int | UnsetType = UNSET
    fits: bool | UnsetType = UNSET
    spare_bytes: int | UnsetType = UNSET
    headroom: float | UnsetType = UNSET
    rows: list[_Row] | UnsetType = UNSET
    assumptions: list[str] | UnsetType = UNSET
    unavailable: str | UnsetType = UNSET


class _Highest(_Printed):
    bytes: int
    step: int
    phase: str


class _Moment(_Printed):
    step: int
    phase: str
    operator: str
    module: str
    source: str
    function: str


class _Assumed(_Printed):
    operator: str
    times: int
    why: str


class _Passes(_Printed):
    """Passes of convolutions whose workspace is known alike: how many, and the bytes of the largest workspace."""

    passes: int
    largest: _Range


class _Phase(_Printed):
    step: int
    phase: str
    peak_allocated_bytes: int
    reserved_bytes: int
    buckets: Bytes


class _Part(_Printed):
    bucket: str
    part: str
    bytes: int


class _Held(_Printed):
    bucket: str
    module: str
    operator: str
    source: str
    bytes: int
    allocations: int
    part: str | None
    fused_with: list[str]


class _Roomy(_Printed):
    share: float
    max_batch_size: int | None


class _Traced(_Printed):
    """The traced step at the batch size; or why there is none."""

    buckets: Bytes | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    max_batch_size: int | None
    profile: str | None
    highest: dict[str, _Highest] | UnsetType = UNSET
    parameters: int | UnsetType | None = UNSET
    fits: bool | UnsetType = UNSET
    fit: Fit | UnsetType = UNSET
    device_used_range: _Range | UnsetType = UNSET
    expected_batch_size: int | UnsetType | None = UNSET
    may_fit_batch_size: int | UnsetType | None = UNSET
    unknowns: list[_Unknown] | UnsetType = UNSET
    peak: _Moment | UnsetType | None = UNSET
    context_bytes: int | UnsetType = UNSET
    context_source: str | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
    traced_layers: list[int] | UnsetType = UNSET
    assumed: list[_Assumed] | UnsetType = UNSET
    convolutions: dict[str, _Passes] | UnsetType = UNSET
    momentary_peak_bytes: int | UnsetType | None = UNSET
    momentary_reserved_bytes: int | UnsetType | None = UNSET
    phases: list[_Phase] | UnsetType = UNSET
    frozen_saving_bytes: int | UnsetType = UNSET
    parts: list[_Part] | UnsetType = UNSET
    composition: list[_Held] | UnsetType = UNSET
    with_headroom: _Roomy | UnsetType = UNSET
    unavailable: str | UnsetType = UNSET


class _Accumulation(_Printed):
    steps: int
    global_batch_size: int
    target_batch: int | None
    global_batch_tokens: int | UnsetType | None = UNSET


class _Predicted(_Printed, kw_only=True):
    schema: Literal[1]
    workload: _Workload
    device: _Device
    formula: _Formula
    traced: _Traced
    accumulation: _Accumulation | UnsetType | None = UNSET


class PredictObject(_Predicted, kw_only=True):
    """The object that `predict --json` prints."""

    gate: dict[str, Any] | UnsetType = UNSET


class _Speed(_Printed):
    samples_per_s: list[float] | None
    tokens_per_s: list[float] | UnsetType | None = UNSET
    assumed_share: list[float] | UnsetType = UNSET
    assumed_from: str | UnsetType = UNSET
    peak_tflops: float | UnsetType = UNSET
    computed_by: str | UnsetType = UNSET
    unavailable: str | UnsetType = UNSET


class _Run(_Printed):
    hours: list[float] | None
    tokens: int | UnsetType = UNSET
    link: str | UnsetType | None = UNSET
    gpu_hours: list[float] | UnsetType = UNSET
    cost: list[float] | UnsetType | None = UNSET
    price_per_hour: dict[str, Any] | UnsetType | None = UNSET
    unavailable: str | UnsetType = UNSET


class _LargestOn(_Printed):
    name: str
    title: str
    total_bytes: int
    formula_max_batch_size: int
    traced_max_batch_size: int | None
    unavailable: str | None
    same_architecture: bool
    cost_per_million: list[float] | None
    price_per_hour: dict[str, Any] | None
    notes: list[str]


class _Technique(_Printed):
    name: str
    option: str
    saved_bytes: int
    peak_bytes: int
    fits: bool
    max_batch_size: int | None
    cost: str
    source: str
    formula_only: bool
    is_traced: bool


class _NotApplicable(_Printed):
    name: str
    reason: str
    key: str | UnsetType = UNSET


class _ByTrace(_Printed):
    fits: bool | None
    peak_allocated_bytes: int | None
    max_batch_size: int | None
    unavailable: str | UnsetType = UNSET


class _Combination(_Printed):
    techniques: list[str] | None
    batch_size: int | UnsetType = UNSET
    peak_bytes: int | UnsetType = UNSET
    max_batch_size: int | UnsetType = UNSET
    accumulation: _Accumulation | UnsetType = UNSET
    formula_only: bool | UnsetType = UNSET
    traced: _ByTrace | UnsetType = UNSET
    command: str | UnsetType | None = UNSET
    unavailable: str | UnsetType = UNSET


class _Series(_Printed):
    name: str
    points: list[list[float]]
    names: list[str]


class _Mark(_Printed):
    x: float
    label: str


class _Curve(_Printed):
    key: str
    title: str
    x: str
    y: str
    note: str
    series: list[_Series]
    marks: list[_Mark]


class PlanObject(_Predicted, kw_only=True):
    """`plan --json` of a model."""

    answer: str
    fits: bool
    keeps_headroom: bool
    spare_bytes: int
    verdict_by: Literal["trace", "formula"]
    speed: _Speed
    run: _Run
    notes: list[str]
    gpus: list[_LargestOn]
    techniques: list[_Technique]
    not_applicable: list[_NotApplicable]
    combination: _Combination
    traceable_combination: _Combination
    curves: list[_Curve]
    judgements: list[Judgement]
    command: str | None


class _Tried(_Printed):
    key: str
    name: str
    how: str
    command: str
    in_the_program: list[str]
    saved_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int | None
    buckets: Bytes | None
    fits: bool
    max_batch_size: int | None
    cost: str
    cost_source: str
    source: Literal["traced", "formula"]
    unavailable: str | UnsetType = UNSET


class _Set(_Printed):
    changes: list[str]
    batch_size: int
    passes: int
    fits: bool | None
    peak_bytes: int | None
    command: str
    in_the_program: list[str]
    unavailable: str | UnsetType = UNSET


class _CommandOn(_Printed):
    name: str
    title: str
    total_bytes: int
    fits: bool
    fit: Fit
    free_bytes: int
    free_range: _Range
    max_batch_size: int | None
    may_fit_batch_size: int | None
    traced_on: str
    exact: bool


class _Batch(_Printed):
    batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    device_used_range: _Range
    fits: bool
    fit: Fit


class _Ranks(_Printed):
    ranks: int
    sharded: bool
    note: str


class CommandPlanObject(_Predicted, kw_only=True):
    """`plan --json` of a command."""

    answer: str
    techniques: list[_Tried]
    not_applicable: list[_NotApplicable]
    together: list[_Set]
    gpus: list[_CommandOn]
    batch_sizes: list[_Batch]
    ranks: _Ranks


class SolveObject(_Printed):
    """The object that `plan --solve --json` prints."""

    schema: Literal[1]
    solve: Quantity
    value: int | None
    how: Literal["verified", "traced", "formula"] | None
    beyond: int | None
    formula: int | None
    note: str | None
    lift: _Combination | None
    model: str
    gpu: str
    headroom: float
    command: str | None


class TrialLine(_Printed, tag_field="event", tag="trial"):
    """`search --json`: a trial, as it ends."""

    schema: Literal[1]
    number: int
    batch_size: int
    outcome: Literal["fit", "oom", "error"]
    simulated: bool
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    buckets: Bytes | None
    buckets_unavailable: str | None
    steps: int
    step_seconds: list[float]
    seconds: float
    alloc_retries: int
    detail: str | None
    notes: list[str]


class _Kept(_Printed):
    headroom: float
    max_batch_size: int
    free_bytes: int
    known_by: str


class ResultLine(_Printed, tag_field="event", tag="result"):
    """`search --json`: the last line."""

    schema: Literal[1]
    outcome: str
    max_batch_size: int
    first_failing: int | None
    verified: bool
    with_headroom: _Kept | None
    trials: int
    ooms: int
    message: str
    workload: _Workload
    device: _Device
    advice: list[str]
    formula: _Formula | UnsetType = UNSET
    traced: _Traced | UnsetType = UNSET
    accumulation: _Accumulation | UnsetType = UNSET


PRINTED: dict[str, tuple[Any, ...]] = {
    "predict": (PredictObject,),
    "plan": (PlanObject, CommandPlanObject, SolveObject),
    "search": (TrialLine, ResultLine),
}
"""By command, what it prints with ``--json``: one of these a line."""


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with ``--json``; keys that it lacks are allowed."""
    schemas, parts = msgspec.json.schema_components(PRINTED[command], ref_template="#/$defs/{name}")
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpumem-tui {command} --json",
        "anyOf": list(schemas),
        "$defs": dict(parts),
    }
    return cast("dict[str, Any]", _open(whole))


def _open(part: object) -> object:
    """Return a part of a schema with further keys allowed and without our marks of what is private."""
    if isinstance(part, dict):
        return {
            key.removeprefix("_"): value.replace("$defs/_", "$defs/").removeprefix("_")
            if isinstance(value, str)
            else _open(value)
            for key, value in part.items()
            if not (key == "additionalProperties" and value is False)
        }
    return [_open(one) for one in part] if isinstance(part, list) else part
