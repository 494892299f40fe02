"""Unknowns of a trace: ranges of the device total, and verdicts of three kinds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB, MIB, Bucket, Range
from gpumem_tui.report.objects import encoded
from gpumem_tui.run.events import TraceDone
from gpumem_tui.search.assumed import workspace_lines
from gpumem_tui.search.prediction import BatchSizes, Traced
from gpumem_tui.search.printed import TracedObject
from gpumem_tui.search.words import fit_words, largest_words, range_line, room_words, sizes_words, up_to
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.rules import TRIED, Computed, Workspace
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase
from tests.search.traces import CONTEXT_BYTES, traced, training

_A100 = find_gpu("a100-40gb")
_H100 = find_gpu("h100-80gb")
_CONTEXT = Range(CONTEXT_BYTES - 100 * MIB, CONTEXT_BYTES + 200 * MIB)


def _step(batch: int) -> Timeline:
    sizes = {Bucket.PARAMETERS: GIB, Bucket.ACTIVATIONS: batch * 64 * MIB, Bucket.GRADIENTS: GIB}
    return training(sizes, layers=1)


def _convolving(batch: int, tried_bytes: int = 0) -> Timeline:
    """A step with a convolution, whose workspace takes up to what it reads and writes, or what is tried a sample."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(GIB, bucket=Bucket.PARAMETERS)
    recorder.mark(1, Phase.FORWARD)
    images = recorder.allocate(batch * 64 * MIB, bucket=Bucket.ACTIVATIONS)
    workspace = recorder.allocate(
        Workspace(most=batch * 128 * MIB, chosen=batch * tried_bytes).computed("unknown"),
        bucket=Bucket.TEMPORARY,
    )
    recorder.release(workspace)
    recorder.release(images)
    return recorder.finish()


def _benchmarking(tried_bytes: int) -> Timeline:
    """A step whose benchmark tries what takes so much, and then empties the cache."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(GIB, bucket=Bucket.PARAMETERS)
    recorder.mark(1, Phase.FORWARD)
    recorder.release(recorder.allocate(Computed(TRIED, 0, (tried_bytes,)), bucket=Bucket.TEMPORARY))
    recorder.empty_cache()
    return recorder.finish()


_TRACE = AffineTrace.fit((2, _step(2)), (3, _step(3)))
_EXACT = traced(_TRACE, _A100)
_UNSURE = replace(_EXACT, ready=replace(_EXACT.ready, context_range=_CONTEXT))
_CONVOLVING = traced(AffineTrace.fit((2, _convolving(2)), (3, _convolving(3))), _A100)


def _sizes(found: Traced) -> tuple[int, int, int]:
    sizes = found.max_batch_size, found.expected_batch_size, found.may_fit_batch_size
    certain, expected, may_fit = (size for size in sizes if isinstance(size, int))
    return certain, expected, may_fit


class TestDeviceTotal:
    def test_what_is_known_exactly_has_no_range(self) -> None:
        assert _EXACT.device_used_range(8) == Range(_EXACT.device_used_bytes(8), _EXACT.device_used_bytes(8))
        assert _EXACT.unknowns(8) == ()
        assert range_line(_EXACT.device_used_range(8), _EXACT.unknowns(8)) == ""
        assert len(set(_sizes(_EXACT))) == 1

    def test_the_contexts_range_is_the_totals(self) -> None:
        expected = _UNSURE.device_used_bytes(8)
        assert _UNSURE.device_used_range(8) == Range(expected - 100 * MIB, expected + 200 * MIB)
        [context] = _UNSURE.unknowns(8)
        assert (context.name, context.size) == ("CUDA context", _CONTEXT)

    def test_a_reserve_that_moves_with_the_driver_takes_of_what_is_free(self) -> None:
        """Published reserves of the H100: 328 to 454 MiB, and that of the catalog's own figure."""
        on_h100 = replace(traced(_TRACE, _H100), gpu=_H100)
        assert on_h100.device_used_range(8).is_exact
        free = on_h100.free_range(8)
        reserves = [_H100.reserve_bytes, *dict(_H100.reserves).values()]
        assert free.high_bytes - free.low_bytes == max(reserves) - min(reserves) > 100 * MIB
        assert [one.name for one in on_h100.unknowns(8)] == ["CUDA's total"]

    def test_a_compilers_trials_change_what_is_reserved_as_far_as_there_is_room(self) -> None:
        """On an H200 a compiled Trainer reserved 1.8 % less than traced, flex_attention 0.6 % more."""
        compiled = replace(_EXACT, done=replace(_EXACT.done, is_compiled=True))
        reserved = _EXACT.device_used_bytes(8) - CONTEXT_BYTES
        found = compiled.device_used_range(8)
        assert found.low_bytes <= CONTEXT_BYTES + reserved * 0.982
        assert CONTEXT_BYTES + reserved * 1.006 <= found.high_bytes <= CONTEXT_BYTES + reserved * 1.011
        [trials] = compiled.unknowns(8)
        assert (trials.name, trials.size) == ("compiler's trials", Range(0, found.high_bytes - found.low_bytes))
        certain, _, _ = _sizes(compiled)
        assert certain == _sizes(_EXACT)[0]  # cached blocks are given back where memory is short
        assert compiled.device_used_range(certain).high_bytes <= _A100.cuda_total_bytes

    def test_a_workspace_is_none_to_what_is_known(self) -> None:
        [workspaces] = _CONVOLVING.unknowns(8)
        assert workspaces.name == "cuDNN workspaces"
        assert workspaces.size == Range(0, 2 * 8 * 64 * MIB)
        expected = _CONVOLVING.device_used_bytes(8)
        assert _CONVOLVING.device_used_range(8) == Range(expected, expected + workspaces.size.high_bytes)
        assert _CONVOLVING.at(8).peak_allocated_bytes == GIB + 8 * 64 * MIB

    def test_what_a_benchmark_tries_is_a_moment_of_its_own(self) -> None:
        """Settled, it is no more than without; for the moment as much as the device has room for."""
        trying, large = (traced(AffineTrace.constant(_benchmarking(size * GIB)), _A100) for size in (8, 64))
        settled = trying.at(8).peak_allocated_bytes
        assert settled == GIB
        assert trying.momentary_peaks(8) == (9 * GIB, 9 * GIB)
        assert trying.fit(8) == "fits"
        found = large.momentary_peaks(8)
        assert found is not None
        assert found[1] == 33 * GIB, "the half of it that an A100 of 40 GB has room for"
        assert large.fit(8) == "fits"
        assert large.device_used_range(8) == trying.device_used_range(8)
        assert _EXACT.momentary_peaks(8) is None
        [line] = workspace_lines(trying, 8)
        assert line.startswith(
            "1.00 GiB allocated, and up to 9.00 GiB for a moment in the first step where there is room"
        )
        assert TracedObject.of(trying, 8).momentary_peak_bytes == 9 * GIB
        assert TracedObject.of(_EXACT, 8).momentary_peak_bytes is None

    def test_convolutions_are_counted_by_what_is_known_of_them(self) -> None:
        [line] = workspace_lines(_CONVOLVING, 8)
        assert line.startswith("1 convolution whose workspace is not known but for what others were measured to take")
        assert "0–1.00 GiB" in line


class TestVerdict:
    def test_of_three_kinds(self) -> None:
        certain, expected, may_fit = _sizes(_UNSURE)
        assert certain < expected < may_fit
        fits = [_UNSURE.fit(size) for size in (1, certain, certain + 1, may_fit, may_fit + 1)]
        assert fits == ["fits", "fits", "may fit", "may fit", "does not fit"]
        assert [_UNSURE.fits(size) for size in (certain, certain + 1)] == [True, False]

    def test_workspaces_are_counted_for_what_fits_for_certain(self) -> None:
        certain, _, may_fit = _sizes(_CONVOLVING)
        room = _A100.cuda_total_bytes - CONTEXT_BYTES - GIB
        assert certain == room // (3 * 64 * MIB)
        assert may_fit == room // (64 * MIB)

    def test_what_is_tried_as_far_as_there_is_room_may_fit(self) -> None:
        """cuDNN continues without it, but no verdict states "fits" next to a total beyond the device."""
        steps = [(batch, _convolving(batch, tried_bytes=GIB)) for batch in (2, 3)]
        trying = traced(AffineTrace.fit(*steps), _A100)
        [workspaces] = trying.unknowns(8)
        assert workspaces.size == Range(0, 8 * GIB)
        assert trying.may_fit_batch_size == _CONVOLVING.may_fit_batch_size
        certain, _, _ = _sizes(trying)
        assert trying.device_used_range(certain).high_bytes <= _A100.cuda_total_bytes
        assert trying.fit(certain + 1) == "may fit"
        assert trying.device_used_range(certain + 1).high_bytes > _A100.cuda_total_bytes

    def test_a_cap_on_reserved_bytes_leaves_the_context_out(self) -> None:
        certain, expected, may_fit = _sizes(replace(_UNSURE, allowed_bytes=10 * GIB))
        assert certain == expected == may_fit

    def test_one_batch_size_alone_has_a_verdict_too(self) -> None:
        done = TraceDone(AffineTrace.constant(_step(8)), 1.0, only_at=8, not_affine="it jumps")
        alone = replace(_UNSURE, done=done)
        assert alone.fit(8) == "fits"
        assert alone.device_used_range(8) == _UNSURE.device_used_range(8)
        with pytest.raises(ValueError, match="at batch size 8 only"):
            alone.device_used_range(9)


class TestWords:
    def test_the_largest_batch_is_one_number_or_two(self) -> None:
        assert largest_words(34, 34) == "34"
        assert largest_words(1034, 1040) == "1,034–1,040"
        assert up_to(34, 34) == ""
        assert up_to(34, 38) == " (up to 38 may fit)"

    @pytest.mark.parametrize(
        ("free", "words"),
        [
            (Range(GIB, 2 * GIB), "1.00–2.00 GiB of it left"),
            (Range(-GIB, 2 * GIB), "1.00 GiB missing to 2.00 GiB of it left"),
            (Range(-2 * GIB, -GIB), "1.00–2.00 GiB missing"),
        ],
    )
    def test_what_is_left_or_missing(self, free: Range, words: str) -> None:
        assert room_words(free, of=" of it") == words

    def test_the_ledgers_line_names_what_is_not_known(self) -> None:
        line = range_line(_UNSURE.device_used_range(8), _UNSURE.unknowns(8))
        assert line == "device used 2.82–3.11 GiB: CUDA context 0.32–0.61 GiB"

    def test_three_sizes_are_one_where_nothing_is_unknown(self) -> None:
        assert sizes_words(BatchSizes(8, 8, 8)) == "safe batch 8"
        assert sizes_words(BatchSizes(8, 9, 12)) == "safe batch 8, 9 expected, 12 at most"
        assert sizes_words(BatchSizes(0, 1, 1)) == "no batch is safe, 1 expected, 1 at most"
        assert sizes_words(BatchSizes(0, 0, 0)) == "no batch fits"
        assert sizes_words(BatchSizes(8, 9, 12), is_estimate=True) == "largest batch that may fit 8–12"

    def test_an_estimate_that_leaves_most_of_the_device_fits_by_a_wide_margin(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        estimate = replace(_UNSURE, done=replace(_UNSURE.done, is_estimate=True, steps=3))
        least, _, most = _sizes(estimate)
        far = next(size for size in range(least, 0, -1) if fit_words(estimate, size) != "may fit")
        assert fit_words(estimate, far) == "fits by a wide margin (estimate)"
        assert estimate.fit(far) == "may fit"
        used, free = estimate.device_used_range(far), estimate.free_range(far)
        assert 0.55 < free.low_bytes / (free.low_bytes + used.high_bytes) < 0.75
        assert fit_words(estimate, most + 1) == "may not fit"
        was_cut = replace(estimate, done=replace(estimate.done, steps=0))
        assert fit_words(was_cut, far) == "may fit", "what trains nothing and was ended may take more later"
        monkeypatch.setattr(Traced, "steps_left", lambda *_: 1200)
        assert fit_words(estimate, far) == "fits by a wide margin (estimate) for about 1,200 steps"

    def test_json_has_both_ends_beside_what_it_had(self) -> None:
        _, _, may_fit = _sizes(_UNSURE)
        body = json.loads(encoded(TracedObject.of(_UNSURE, may_fit)))
        assert (body["fits"], body["fit"], body["may_fit_batch_size"]) == (False, "may fit", may_fit)
        used = _UNSURE.device_used_range(may_fit)
        assert body["device_used_range"] == {"low_bytes": used.low_bytes, "high_bytes": used.high_bytes}
        assert body["unknowns"][0]["low_bytes"] == _CONTEXT.low_bytes
