"""The run of a deep network as those of shallow ones tell it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.simulator.fast.layers import LayerPattern, NotRepeating
from gpumem_tui.step import Phase, Site

SHALLOW, DEEP = 3, 11


@dataclass(frozen=True)
class Layer:
    """The memory of a layer of a made-up network: weights, what backward needs, what forward works with.

    `prefetched` are buffers that the layer before has already taken, as sharded weights are gathered ahead.
    """

    weights: tuple[int, ...]
    kept: tuple[int, ...]
    scratch: tuple[int, ...]
    prefetched: int = 0


def trained(layers: list[Layer], steps: int = 2) -> Timeline:
    """A run of it: built, then trained by an optimizer that keeps a state for each weight, all lists at once."""
    recorder = TimelineRecorder()

    def take(sizes: tuple[int, ...], operator: str, layer: int = -1) -> list[int]:
        site = Site(operator, "" if layer < 0 else f"blocks.{layer}.mlp")
        return [recorder.allocate(size, site=site) for size in sizes]

    def drop(numbers: list[int]) -> None:
        for number in numbers:
            recorder.release(number)

    recorder.mark(0, Phase.BUILD)
    for layer in layers:
        take(layer.weights, "empty")
    for step in range(1, steps + 1):
        recorder.mark(step, Phase.FORWARD)
        embedded = take((4096,), "embedding")
        kept = []
        ahead = take((layers[0].prefetched,), "gather", 0)
        for number, layer in enumerate(layers):
            gathered = ahead
            if number + 1 < len(layers):
                ahead = take((layers[number + 1].prefetched,), "gather", number + 1)
            scratch = take(layer.scratch, "mul", number)
            kept.append(take(layer.kept, "mm", number))
            drop(scratch + gathered)
        recorder.mark(step, Phase.BACKWARD)
        gradients: list[list[int]] = []
        for number, layer in reversed(list(enumerate(layers))):
            gradients.insert(0, take(layer.weights, "mm_backward", number))
            drop(kept.pop()[::-1])
        drop(embedded)
        recorder.mark(step, Phase.OPTIMIZER)
        for operator in ("exp_avg", "exp_avg_sq") if step == 1 else ():
            for layer in layers:
                take(layer.weights, operator)
        square_roots = [take(layer.weights, "sqrt") for layer in layers]
        for numbers in (*square_roots, *gradients):
            drop(numbers)
    return recorder.finish()


def extended(layers: list[Layer], added: int) -> Timeline:
    """The run with the last layer so many times more, from those with it once and twice."""
    shallow, deeper = trained(layers), trained([*layers, layers[-1]])
    return LayerPattern.between(shallow, deeper).extended(AffineTrace.constant(shallow), added).at(1)


sizes = st.lists(st.sampled_from([512, 1024, 4096, 65536]), min_size=1, max_size=4).map(tuple)
some_layer = st.builds(Layer, sizes, sizes, sizes, st.sampled_from([0, 512, 2048]))


@given(some_layer)
def test_a_deep_run_is_that_of_a_shallow_one_with_more_of_the_same(layer: Layer) -> None:
    assert extended([layer] * SHALLOW, DEEP - SHALLOW) == trained([layer] * DEEP)


@given(some_layer, some_layer)
def test_the_first_layer_may_be_another(first: Layer, layer: Layer) -> None:
    assert extended([first, *[layer] * SHALLOW], DEEP - SHALLOW) == trained([first, *[layer] * DEEP])


@given(some_layer)
def test_no_layer_more_changes_nothing(layer: Layer) -> None:
    assert extended([layer] * SHALLOW, 0) == trained([layer] * SHALLOW)


def test_layers_in_turns_are_not_repeated() -> None:
    wide, narrow = Layer((4096,), (4096,), (512,)), Layer((512,), (512,), (512,))

    def in_turns(layers: int) -> Timeline:
        return trained([wide, narrow] * (layers // 2) + [wide] * (layers % 2))

    with pytest.raises(NotRepeating):
        LayerPattern.between(in_turns(3), in_turns(4))


def test_runs_of_other_programs_are_not_repeated() -> None:
    layer = Layer((4096,), (4096,), (512,))
    with pytest.raises(NotRepeating):
        LayerPattern.between(trained([layer] * 3), trained([layer] * 4, steps=3))


def test_marks_streams_emptied_caches_and_completions_are_where_the_deep_run_has_them() -> None:
    def run(layers: int) -> Timeline:
        recorder = TimelineRecorder()
        recorder.mark(1, Phase.FORWARD)
        numbers = list(_on_another_stream(recorder, layers))
        recorder.empty_cache()
        recorder.mark(1, Phase.BACKWARD)
        for number in numbers:
            recorder.complete(number)
            recorder.allocate(512, site=Site("wait"))
        return recorder.finish()

    pattern = LayerPattern.between(run(SHALLOW), run(SHALLOW + 1))
    found = pattern.extended(AffineTrace.constant(run(SHALLOW)), DEEP - SHALLOW)
    assert found.at(1) == run(DEEP)


def _on_another_stream(recorder: TimelineRecorder, layers: int) -> Iterator[int]:
    for layer in range(layers):
        number = recorder.allocate(2048, site=Site("gather", f"blocks.{layer}"), stream=7)
        recorder.release_in_use(number)
        yield number


def test_a_place_that_all_its_allocations_name_a_part_of_is_none_of_its_own() -> None:
    """Else runs of two depths, of which the deeper was extended from the shallower, would differ by it."""
    recorder = TimelineRecorder()
    for part in ("autocast's copies", ""):
        number = recorder.allocate(512, site=Site("aten._to_copy", part or "blocks.0"))
        recorder.allocate(512, site=Site("aten.mm"))
        if part:
            recorder.name(number, part)
    timeline = recorder.finish()
    assert [(site.operator, site.part) for site in timeline.site_table] == [
        ("aten._to_copy", "autocast's copies"),
        ("aten.mm", ""),
        ("aten._to_copy", ""),
    ]
    assert timeline.sites == (0, 1, 2, 1)
