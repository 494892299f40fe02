"""The shape of a model, derived from the names and dimensions of its parameters.

Only so far as the parameters tell: what they leave open (attention heads, the sequence length) comes from the catalog
where a model of these dimensions is in it, else from what is usual, and is listed as assumed. A derived shape counts
only if it has as many parameters as the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from gpumem_tui.catalog.loader import models
from gpumem_tui.catalog.shapes import FAMILIES, ModelShape, ShapeError
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.probe.wire import Trained, TrainedModel, TrainedParameter

_MOSTLY = 0.95
_TOLERANCE = 0.01
"""Share of the parameters that a shape may leave unexplained."""

_HEAD_WIDTH = 64
_LLAMA_HEAD_WIDTH = 128
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_TOKENS = r"(?:wte|embed_tokens|token_embedding|tok_embeddings|word_embeddings|embeddings\.word)\.weight$"
_POSITIONS = r"(?:wpe|position_embeddings?|embeddings\.position)(?:\.weight)?$"
_SEGMENT_TYPES = r"token_type(?:_embeddings)?\.weight$"
_HEAD = r"(?:^|\.)(?:lm_head|head|heads\.head|output|classifier|fc|score)\.weight$"
_PREDICTIONS = r"(?:^|\.)predictions\."
_QUERY = r"(?:q_proj|query|wq)\.weight$"
_KEY = r"(?:k_proj|key|wk)\.weight$"
_QUERY_BIAS = r"(?:q_proj|wq)\.bias$"
_QUERY_NORM = r"q_norm\.weight$"
_GATE = r"(?:gate_proj|w1)\.weight$"
_WIDEN = r"(?:c_fc|mlp\.0|mlp\.linear_1|mlp\.fc1|intermediate\.dense|fc1|linear1)\.weight$"
_PATCHES = r"(?:patch_embeddings?(?:\.projection)?|patch_embed\.proj|conv_proj)\.weight$"


@dataclass(frozen=True)
class Derived:
    """A shape and what had to be assumed for it, one phrase each."""

    shape: ModelShape
    assumed: tuple[str, ...]


def derive(trained: Trained) -> Reading[Derived]:
    """Derive the shape of what a process trains, or say why it is not known."""
    if not trained.models:
        return Unknown("the probe found no module")
    sizes = {model: sum(map(_values, model.parameters)) for model in trained.models}
    model = max(sizes, key=lambda one: sizes[one])
    total = sum(sizes.values())
    name = class_name(model.name)
    if model.truncated:
        return Unknown(f"{name} has more parameters than the probe lists")
    if sizes[model] < _MOSTLY * total:
        return Unknown(f"{len(trained.models)} models are trained together")
    trainable = sum(_values(parameter) for parameter in model.parameters if parameter.trained)
    if trainable < _MOSTLY * sizes[model]:
        return Unknown(f"only {trainable / max(1, sizes[model]):.1%} of the parameters of {name} are trained")
    derived = _of_model(model, sizes[model])
    if isinstance(derived, Unknown):
        return derived
    simplified = []
    if trainable < sizes[model]:
        simplified.append(f"all parameters trained, though {1 - trainable / sizes[model]:.1%} of them are frozen")
    if sizes[model] < total:
        others = ", ".join(sorted({class_name(other.name) for other in sizes if other is not model}))
        simplified.append(f"{others}, trained next to it with {total - sizes[model]:,} parameters, left out of account")
    return replace(derived, assumed=(*derived.assumed, *simplified))


def _of_model(model: TrainedModel, parameters: int) -> Reading[Derived]:
    tensors = _Tensors(model)
    candidates = [found for rule in (_resnet, _vit, _llama, _bert, _gpt2, _mlp) for found in rule(tensors)]
    for candidate in candidates:
        shape, assumed = candidate.shape, candidate.assumed
        try:
            shape.check()
        except ShapeError:
            continue
        unexplained = parameters - count_parameters(shape)
        if abs(unexplained) <= _TOLERANCE * parameters:
            if unexplained:
                assumed = (*assumed, f"{abs(unexplained):,} of {parameters:,} parameters left out of account")
            return Derived(replace(shape, published_parameters=None), assumed)
    if candidates:
        family = candidates[0].shape.family
        return Unknown(f"{tensors.name} is no plain {family} model: its {parameters:,} parameters do not add up to one")
    return Unknown(f"{tensors.name} is of no family known here")


def class_name(qualified: str) -> str:
    """Return ``GPT2LMHeadModel`` of ``transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel``."""
    return qualified.rpartition(".")[2]


class _Tensors:
    """A model's parameters by name, without what wrappers add to the names."""

    def __init__(self, model: TrainedModel) -> None:
        self.name = class_name(model.name)
        self.dims: Mapping[str, tuple[int, ...]] = {
            _WRAPPERS.sub("", parameter.name): parameter.shape for parameter in model.parameters
        }

    def find(self, pattern: str, rank: int | None = None) -> tuple[int, ...] | None:
        """Return the dimensions of the first parameter of that name, and of so many dimensions."""
        matches = re.compile(pattern).search
        return next(
            (dims for name, dims in self.dims.items() if matches(name) and (rank is None or len(dims) == rank)), None
        )

    def count(self, pattern: str) -> int:
        """Count the parameters that have such a name."""
        return sum(bool(re.search(pattern, name)) for name in self.dims)


def _values(parameter: TrainedParameter) -> int:
    return math.prod(parameter.shape)


def _transformer(found: ModelShape, width: int) -> Derived:
    """Complete what its tensors tell of a transformer; `width` is the usual one of an attention head."""
    dimensions = (found.family, found.layers, found.hidden, found.ffn)
    alike = [m for m in models().values() if (m.family, m.layers, m.hidden, m.ffn) == dimensions]
    known = next((model for model in alike if model.vocab == found.vocab), alike[0] if alike else None)
    assumed = []
    if known is not None:
        heads, dropout = known.heads, known.dropout
        assumed.append(f"{heads} heads and dropout {dropout:g} as in {known.name}")
    else:
        heads, dropout = max(1, found.hidden // width), 0.0
        assumed.append(f"{heads} heads of {width} and no dropout")
    if found.tied_head:
        assumed.append("an output head that shares the embedding")
    name = known.name if known is not None and known.vocab == found.vocab else found.name
    shape = replace(found, name=name, heads=heads, kv_heads=heads, dropout=dropout)
    usual = FAMILIES[shape.family].training_seq_len
    if usual:
        longest = shape.max_seq_len or (known.max_seq_len if known is not None else usual)
        length = min(longest, usual)
        shape = replace(shape, seq_len=length, max_seq_len=longest)
        assumed.append(f"sequence length {length:,}")
    return Derived(shape, tuple(assumed))


def _gpt2(tensors: _Tensors) -> Iterator[Derived]:
    tokens, positions = tensors.find(_TOKENS, 2), tensors.find(_POSITIONS, 2)
    widen = tensors.find(_WIDEN, 2)
    if tokens is None or positions is None or widen is None or tensors.find(_SEGMENT_TYPES) is not None:
        return
    yield _transformer(
        ModelShape(
            name=tensors.name,
            family="gpt2",
            layers=tensors.count(_WIDEN),
            hidden=tokens[1],
            ffn=max(widen) if max(widen) > tokens[1] else min(widen),
            vocab=tokens[0],
            max_seq_len=positions[0],
            tied_head=tensors.find(_HEAD, 2) is None,
        ),
        _HEAD_WIDTH,
    )


def _bert(tensors: _Tensors) -> Iterator[Derived]:
    tokens, positions = tensors.find(_TOKENS, 2), tensors.find(_POSITIONS, 2)
    widen, head = tensors.find(_WIDEN, 2), tensors.find(_HEAD, 2)
    if tokens is None or positions is None or widen is None or tensors.find(_SEGMENT_TYPES) is None:
        return
    if tensors.find(_PREDICTIONS) is not None:
        return  # a head over the vocabulary holds far more than a classifier
    yield _transformer(
        ModelShape(
            name=tensors.name,
            family="bert",
            layers=tensors.count(_WIDEN),
            hidden=tokens[1],
            ffn=widen[0],
            vocab=tokens[0],
            max_seq_len=positions[0],
            classes=head[0] if head is not None else 2,
        ),
        _HEAD_WIDTH,
    )


def _llama(tensors: _Tensors) -> Iterator[Derived]:
    tokens, gate = tensors.find(_TOKENS, 2), tensors.find(_GATE, 2)
    query, key = tensors.find(_QUERY, 2), tensors.find(_KEY, 2)
    if tokens is None or gate is None or query is None or key is None:
        return
    derived = _transformer(
        ModelShape(
            name=tensors.name,
            family="llama",
            layers=tensors.count(_GATE),
            hidden=tokens[1],
            ffn=gate[0],
            vocab=tokens[0],
            tied_head=tensors.find(_HEAD, 2) is None,
            qkv_bias=tensors.find(_QUERY_BIAS) is not None,
            qk_norm=tensors.find(_QUERY_NORM) is not None,
        ),
        min(_LLAMA_HEAD_WIDTH, key[0]),
    )
    heads = derived.shape.heads
    width = query[0] // heads
    yield replace(
        derived,
        shape=replace(
            derived.shape,
            kv_heads=max(1, key[0] // max(1, width)),
            head_dim=0 if width * heads == derived.shape.hidden else width,
        ),
    )


def _vit(tensors: _Tensors) -> Iterator[Derived]:
    patches, positions = tensors.find(_PATCHES, 4), tensors.find(r"pos(?:ition)?_embed(?:ding)?s?$", 3)
    widen, head = tensors.find(_WIDEN, 2), tensors.find(_HEAD, 2)
    if patches is None or positions is None or widen is None:
        return
    side = math.isqrt(positions[1] - 1)
    yield _transformer(
        ModelShape(
            name=tensors.name,
            family="vit",
            layers=tensors.count(_WIDEN),
            hidden=patches[0],
            ffn=widen[0],
            image_size=side * patches[2],
            patch_size=patches[2],
            classes=head[0] if head is not None else 0,
        ),
        _HEAD_WIDTH,
    )


def _resnet(tensors: _Tensors) -> Iterator[Derived]:
    """Yield those of the catalog, with the last layer as found."""
    convolutions = sorted(dims for dims in tensors.dims.values() if len(dims) == 4)
    head = tensors.find(_HEAD, 2)
    if (64, 3, 7, 7) not in convolutions or head is None:
        return
    for known in models().values():
        if known.family == "resnet":
            yield Derived(replace(known, classes=head[0]), (f"images of {known.image_size} pixels a side",))


def _mlp(tensors: _Tensors) -> Iterator[Derived]:
    """Yield linear layers one after another, all hidden ones of one width."""
    matrices = [dims for dims in tensors.dims.values() if len(dims) == 2]
    vectors = [dims for dims in tensors.dims.values() if len(dims) == 1]
    if len(matrices) < 2 or len(matrices) + len(vectors) != len(tensors.dims) or len(matrices) != len(vectors):
        return
    chained = all(before[0] == after[1] for before, after in pairwise(matrices))
    if chained and len({dims[0] for dims in matrices[:-1]}) == 1:
        shape = ModelShape(
            name=tensors.name,
            family="mlp",
            layers=len(matrices),
            hidden=matrices[0][0],
            inputs=matrices[0][1],
            classes=matrices[-1][0],
        )
        yield Derived(shape, ())
