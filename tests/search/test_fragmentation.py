"""Settings of the allocator that are offered, each held to a replay with it from the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import GIB, MIB, Bucket, Range, Unknown
from gpumem_tui.search.fragmentation import _OTHERS, EXPANDABLE, AllocatorRemedy, larger_batch, remedy
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.caching import GRAPH_POOL
from gpumem_tui.simulator.allocator.replay import AffineTrace, replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings, variable_for, with_option
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.search.traces import CONTEXT_BYTES, lengths, traced, training


def on_gpu(timeline: Timeline | AffineTrace, bytes_for_allocator: int = 64 * GIB, kind: str = "a100-80gb") -> Traced:
    """A trace on a GPU that has so many bytes for the allocator."""
    gpu = find_gpu(kind)
    assert isinstance(gpu, Gpu)
    total = bytes_for_allocator + CONTEXT_BYTES
    gpu = replace(gpu, total_bytes=total + gpu.reserve_bytes, cuda_total_bytes=total)
    trace = timeline if isinstance(timeline, AffineTrace) else AffineTrace.constant(timeline)
    return traced(trace, gpu)


GROWING = lengths(30, 37, 45, 52, 61)


def offered(found: Traced) -> AllocatorRemedy:
    """The offer at batch 1."""
    best = remedy(found, 1)
    assert best is not None
    return best


@given(
    sizes=st.lists(st.integers(1, 90), min_size=2, max_size=6),
    layers=st.integers(1, 10),
    keeps=st.sampled_from([0, 3 * MIB]),
    share=st.floats(0.7, 1.6),
)
def test_what_is_offered_gains_what_a_replay_with_it_from_the_start_does(
    sizes: list[int], layers: int, keeps: int, share: float
) -> None:
    timeline = lengths(*sizes, layers=layers, keeps=keeps)
    capacity = int(replay(timeline).peak_reserved_bytes * share)
    now = on_gpu(timeline, capacity)
    found = remedy(now, 1)
    with_it = replay(timeline, capacity, AllocatorSettings(expandable_segments=True))
    if found is None:
        assert now.fits(1) or not with_it.fits
        return
    assert found.option == EXPANDABLE or found.option.startswith(("max_split_size_mb", "roundup"))
    independent = replay(timeline, capacity, AllocatorSettings.parse(found.option))
    assert (found.fit == "fits") == independent.fits
    if independent.fits:
        assert found.reserved_bytes[1] == independent.peak_reserved_bytes
    if found.option != EXPANDABLE:
        assert independent.fits >= with_it.fits
        assert not with_it.fits or independent.peak_reserved_bytes < with_it.peak_reserved_bytes


def test_lengths_that_grow_leave_pieces_which_expandable_segments_do_not() -> None:
    found = offered(on_gpu(GROWING))
    assert found.option == EXPANDABLE
    before, after = found.reserved_bytes
    allocated = replay(GROWING).peak_allocated_bytes
    assert before > 1.3 * allocated > 1.3 * after / 1.1
    assert found.line.startswith("at no cost: export PYTORCH_ALLOC_CONF=expandable_segments:True; then reserved ")


def test_it_is_offered_where_it_decides_the_verdict() -> None:
    fits_with_it = replay(GROWING, settings=AllocatorSettings(expandable_segments=True)).peak_reserved_bytes
    found = offered(on_gpu(GROWING, fits_with_it))
    assert (found.before.fit(1), found.fit) == ("does not fit", "fits")
    assert "; then it fits, " in found.line


def test_nothing_is_offered_where_it_gains_nothing_or_is_set() -> None:
    alike = training({Bucket.PARAMETERS: GIB, Bucket.ACTIVATIONS: 4 * GIB, Bucket.GRADIENTS: GIB}, layers=12)
    assert remedy(on_gpu(alike), 1) is None
    expandable = AllocatorSettings.parse(EXPANDABLE)
    assert remedy(replace(on_gpu(GROWING), settings=expandable), 1) is None
    assert remedy(replace(on_gpu(GROWING), settings=AllocatorSettings.parse("backend:cudaMallocAsync")), 1) is None


@pytest.fixture
def no_expandable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system on which segments cannot expand."""
    monkeypatch.setattr("sys.platform", "win32")


def without_expandable() -> Iterator[Traced]:
    """Traces of a graph's pool, of an older torch and of an AMD GPU."""
    yield on_gpu(lengths(30, 37, 45, 52, 61, stream=GRAPH_POOL))
    old = on_gpu(GROWING)
    yield replace(old, ready=replace(old.ready, torch_version="2.0.1+cu118"))
    yield on_gpu(GROWING, kind="mi300x-192gb")


@pytest.mark.usefixtures("no_expandable")
def test_the_best_of_the_other_settings_is_chosen() -> None:
    others = {option: replay(GROWING, settings=AllocatorSettings.parse(option)) for option in _OTHERS}
    best = min(others, key=lambda option: others[option].peak_reserved_bytes)
    assert remedy_option(on_gpu(GROWING)) == best == "roundup_power2_divisions:2"


@pytest.mark.parametrize("found", without_expandable())
def test_where_segments_cannot_expand_another_setting_is_offered(found: Traced) -> None:
    assert remedy_option(found) == "roundup_power2_divisions:2"


@pytest.mark.usefixtures("no_expandable")
def test_a_limit_of_splits_is_offered_where_it_makes_a_step_fit() -> None:
    held = replay(GROWING).peak_allocated_bytes
    capacity = next(size for size in range(held, 2 * held, 2 * MIB) if replay(GROWING, size, split(64)).fits)
    assert not replay(GROWING, capacity).fits
    found = offered(on_gpu(GROWING, capacity))
    assert found.option in ("max_split_size_mb:32", "max_split_size_mb:64")
    assert (found.before.fit(1), found.fit) == ("does not fit", "fits")


def split(size_mb: int) -> AllocatorSettings:
    """A limit of splits."""
    return AllocatorSettings.parse(f"max_split_size_mb:{size_mb}")


def remedy_option(found: Traced) -> str:
    """The option that is offered at batch 1."""
    return offered(found).option


@pytest.mark.usefixtures("no_expandable")
def test_garbage_is_collected_under_a_limit_only() -> None:
    reserved = replay(GROWING).peak_reserved_bytes
    assert remedy_option(on_gpu(GROWING)) == "roundup_power2_divisions:2"
    assert remedy_option(replace(on_gpu(GROWING), allowed_bytes=reserved)).startswith("garbage_collection_threshold")


def test_the_variable_is_the_one_that_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert variable_for("2.10.0") == variable_for("2.13.0+cpu") == "PYTORCH_ALLOC_CONF"
    assert variable_for("2.9.1+cu128") == variable_for("2.4.0") == "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert variable_for("2.13.0") == "PYTORCH_CUDA_ALLOC_CONF", "it wins over the newer one"


def test_what_is_set_already_stays() -> None:
    assert with_option("", EXPANDABLE) == EXPANDABLE
    text = "roundup_power2_divisions:[256:1,512:2],expandable_segments:False"
    assert with_option(text, EXPANDABLE) == f"roundup_power2_divisions:[256:1,512:2],{EXPANDABLE}"
    found = offered(replace(on_gpu(GROWING), settings=AllocatorSettings.parse("max_split_size_mb:4096")))
    assert found.assignment.endswith(f"=max_split_size_mb:4096,{EXPANDABLE}")


def test_a_program_that_sets_the_variable_is_to_be_changed_itself() -> None:
    now = on_gpu(GROWING)
    own = replace(now, done=replace(now.done, allocator="max_split_size_mb:4096"))
    assert offered(own).how == (
        '"expandable_segments:True" where the program sets PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF'
    )


# The largest batch


def at_every_size(*shares: int) -> AffineTrace:
    """Steps whose tensors are shares of a sample's bytes."""
    runs = [(size, lengths(*(share * size for share in shares))) for size in (2, 3)]
    return AffineTrace.fit(*runs)


def test_the_largest_batch_grows_by_as_much_as_replays_say() -> None:
    trace = at_every_size(3, 4, 5, 7)
    now = on_gpu(trace, 20 * GIB)
    found = larger_batch(now)
    assert found is not None
    assert found.option == EXPANDABLE
    assert found.largest is not None
    before, after = found.largest
    expandable = AllocatorSettings(expandable_segments=True)
    capacity = now.capacity_range.low_bytes
    assert after > before == now.max_batch_size
    assert replay(trace.at(after), capacity, expandable).fits
    assert not replay(trace.at(after + 1), capacity, expandable).fits


def test_no_larger_batch_is_offered_where_there_is_none() -> None:
    steady = at_every_size(4)
    assert larger_batch(on_gpu(steady, 20 * GIB)) is None
    alone = on_gpu(GROWING)
    only = replace(alone, done=replace(alone.done, only_at=1, not_affine="one size"))
    assert isinstance(only.max_batch_size, Unknown)
    assert larger_batch(only) is None


def test_where_nothing_fits_one_sample_may() -> None:
    trace = at_every_size(30, 37, 45, 52, 61)
    enough = replay(trace.at(1), settings=AllocatorSettings(expandable_segments=True)).peak_reserved_bytes
    found = larger_batch(on_gpu(trace, enough))
    assert found is not None
    assert found.largest == (0, 1)


def test_where_not_even_the_setting_makes_it_sure_what_it_saves_is_offered() -> None:
    """The range of the context decides: with it the step may fit, as without, and takes less."""
    held = replay(GROWING).peak_allocated_bytes
    now = on_gpu(GROWING, held + 20 * MIB)
    unsure = replace(now, ready=replace(now.ready, context_range=Range(CONTEXT_BYTES - GIB, CONTEXT_BYTES + GIB)))
    found = offered(unsure)
    assert found.option == EXPANDABLE
    assert (found.before.fit(1), found.fit) == ("may fit", "may fit")
