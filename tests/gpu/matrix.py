"""The training runs that are recorded on a real GPU: small enough that all of them take minutes, ordered by size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB
from gpumem_tui.workload.spec import WorkloadSpec

STEPS = 3
"""The first step makes the optimizer's state, the second runs next to it, the third in what the second left cached."""


@dataclass(frozen=True)
class Configuration:
    """One run. `id` states all that sets it apart."""

    id: str
    workload: WorkloadSpec
    batch_size: int


@dataclass(frozen=True)
class Edge:
    """A search for the largest batch that trains under a cap on reserved bytes."""

    id: str
    workload: WorkloadSpec
    limit_bytes: int


@cache
def configurations() -> tuple[Configuration, ...]:
    """Every run, cheap to costly by the formula's peak."""
    found = {configuration.id: configuration for configuration in _all()}
    return tuple(sorted(found.values(), key=_peak_bytes))


@cache
def edges() -> tuple[Edge, ...]:
    """Every search for a largest batch. The caps keep the batches small, so that each trial takes a second or two."""
    cases = [
        ("mlp-2048", Recipe(), GIB),
        ("resnet-18", Recipe(optimizer="sgd-momentum"), 2 * GIB),
        ("gpt2-tiny", Recipe(), 2 * GIB),
        ("gpt2-tiny", Recipe(precision="amp-bf16", recompute="full"), 2 * GIB),
        ("llama-tiny", Recipe(precision="bf16"), 2 * GIB),
        ("bert-base", Recipe(precision="amp-fp16"), 4 * GIB),
    ]
    return tuple(
        Edge(f"largest-{label}-{_words(recipe)}-{limit // GIB}gib", _workload(label, recipe), limit)
        for label, recipe, limit in cases
    )


@cache
def _shapes() -> dict[str, ModelShape]:
    """The networks by the label that ids begin with; those of the catalog under its own names."""
    gpt2, llama = find_model("gpt2"), find_model("llama-3.2-1b")
    return {
        "mlp-2048": find_model("mlp").overridden(hidden=2048),
        "gpt2-tiny": gpt2.overridden(layers=4, hidden=384, heads=6, seq_len=256),
        "gpt2-4-layers": gpt2.overridden(layers=4),
        "gpt2": gpt2,
        "llama-tiny": llama.overridden(layers=4, hidden=512, heads=8, kv_heads=2, vocab=32000, seq_len=512),
        "llama-3.2-1b-2-layers": llama.overridden(layers=2, seq_len=1024),
        "bert-base": find_model("bert-base").overridden(seq_len=128),
        "bert-base-512": find_model("bert-base"),
        "vit-b-16": find_model("vit-b-16"),
        "resnet-18": find_model("resnet-18"),
        "resnet-50": find_model("resnet-50"),
    }


def _all() -> Iterator[Configuration]:
    yield from _multilayer_perceptrons()
    yield from _language_models()
    yield from _encoders()
    yield from _convnets()


def _multilayer_perceptrons() -> Iterator[Configuration]:
    yield from _runs("mlp-2048", (64,), Recipe())
    yield from _runs("mlp-2048", (1, 1000), Recipe())
    yield from _runs("mlp-2048", (64,), Recipe(precision="amp-fp16", optimizer="sgd"))
    for recipe in (
        Recipe(optimizer="sgd-momentum"),
        Recipe(optimizer="adam"),
        Recipe(optimizer="adafactor"),
        Recipe(optimizer="adagrad"),
        Recipe(optimizer="rmsprop"),
        Recipe(precision="amp-bf16"),
        Recipe(precision="bf16"),
    ):
        yield from _runs("mlp-2048", (64,), recipe)


def _language_models() -> Iterator[Configuration]:
    yield from _runs("gpt2-tiny", (8,), Recipe())
    yield from _runs("gpt2-tiny", (1, 3, 32), Recipe())
    yield from _runs("gpt2-tiny", (8,), Recipe(precision="amp-fp16", attention="math"))
    yield from _runs("gpt2-tiny", (8,), Recipe(precision="amp-bf16", recompute="full"))
    for recipe in (
        Recipe(attention="efficient"),
        Recipe(attention="math"),
        Recipe(recompute="selective", attention="math"),
        Recipe(recompute="full"),
        Recipe(precision="amp-bf16"),
        Recipe(precision="amp-bf16", attention="flash"),
        Recipe(precision="amp-bf16", attention="efficient"),
        Recipe(precision="amp-bf16", recompute="selective", attention="math"),
        Recipe(precision="bf16", optimizer="adafactor"),
        Recipe(precision="bf16", optimizer="sgd-momentum", attention="math"),
    ):
        yield from _runs("gpt2-tiny", (8,), recipe)
    yield from _runs("gpt2-4-layers", (4,), Recipe(precision="amp-bf16"))
    yield from _runs("gpt2", (2,), Recipe())
    yield from _runs("gpt2", (4,), Recipe(precision="amp-bf16", optimizer="sgd-momentum"))
    yield from _runs("gpt2", (4,), Recipe(precision="bf16", recompute="full"))
    yield from _runs("llama-tiny", (4,), Recipe())
    yield from _runs("llama-tiny", (4,), Recipe(precision="bf16"))
    for recipe in (
        Recipe(attention="math"),
        Recipe(recompute="full", optimizer="sgd"),
        Recipe(precision="amp-bf16"),
        Recipe(precision="amp-fp16", optimizer="adafactor"),
        Recipe(precision="bf16", recompute="selective"),
        Recipe(precision="bf16", attention="efficient"),
    ):
        yield from _runs("llama-tiny", (4, 16), recipe)
    yield from _runs("llama-3.2-1b-2-layers", (1,), Recipe(precision="bf16"))
    yield from _runs("llama-3.2-1b-2-layers", (4,), Recipe(precision="bf16", recompute="full"))
    yield from _runs("llama-3.2-1b-2-layers", (2,), Recipe(precision="amp-bf16", optimizer="adafactor"))


def _encoders() -> Iterator[Configuration]:
    yield from _runs("bert-base", (8,), Recipe(precision="amp-fp16"))
    yield from _runs("bert-base", (8,), Recipe(optimizer="sgd-momentum", attention="math"))
    yield from _runs("bert-base", (8,), Recipe(precision="amp-bf16", recompute="full", optimizer="adafactor"))
    yield from _runs("bert-base-512", (4,), Recipe())
    yield from _runs("bert-base-512", (4,), Recipe(precision="amp-bf16", recompute="selective", attention="math"))
    yield from _runs("vit-b-16", (8,), Recipe(optimizer="sgd-momentum"))
    yield from _runs("vit-b-16", (8,), Recipe(precision="amp-bf16"))
    yield from _runs("vit-b-16", (16,), Recipe(precision="amp-fp16", recompute="full"))
    yield from _runs("vit-b-16", (32,), Recipe(precision="bf16", optimizer="sgd-momentum"))


def _convnets() -> Iterator[Configuration]:
    yield from _runs("resnet-18", (8,), Recipe(optimizer="sgd-momentum"))
    yield from _runs("resnet-18", (32,), Recipe(precision="amp-bf16", optimizer="sgd-momentum"))
    yield from _runs("resnet-18", (32,), Recipe(precision="bf16"))
    yield from _runs("resnet-50", (8, 32), Recipe(optimizer="sgd-momentum"))
    yield from _runs("resnet-50", (16,), Recipe(precision="amp-fp16", optimizer="sgd-momentum"))
    yield from _runs("resnet-50", (16,), Recipe(recompute="full", optimizer="adamw"))


def _runs(label: str, batch_sizes: tuple[int, ...], recipe: Recipe) -> Iterator[Configuration]:
    for batch_size in batch_sizes:
        yield Configuration(f"{label}-b{batch_size}-{_words(recipe)}", _workload(label, recipe), batch_size)


def _workload(label: str, recipe: Recipe) -> WorkloadSpec:
    return WorkloadSpec(recipe, shape=_shapes()[label])


def _words(recipe: Recipe) -> str:
    """Precision and optimizer, then what is not the default."""
    words: list[str] = [recipe.precision, recipe.optimizer]
    if recipe.recompute != "none":
        words.append(f"recompute-{recipe.recompute}")
    if recipe.attention != "auto":
        words.append(f"attention-{recipe.attention}")
    return "-".join(words)


def _peak_bytes(configuration: Configuration) -> int:
    shape = configuration.workload.shape
    assert shape is not None, "every workload of the matrix is of the catalog"
    return predict(shape, configuration.workload.recipe, configuration.batch_size).peak_bytes
