"""Traces at any sequence length from those at three, without running the step again and without torch.

What a training step asks for is a polynomial in the sequence length, of the second degree where attention writes its
scores. Three lengths at equal distances give it for every length on their grid, exactly in whole bytes. That a longer
step allocates as these say is an assumption: whoever needs to be sure traces at the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpumem_tui.simulator.replay import AffineTrace, NotAffine

Three = tuple[AffineTrace, AffineTrace, AffineTrace]


@dataclass(frozen=True)
class TraceByLength:
    """A training run at every sequence length ``first + k · step``, and every batch size that the three answer for."""

    first: int
    step: int
    traces: Three

    @classmethod
    def fit(cls, traces: Mapping[int, AffineTrace]) -> TraceByLength:
        """The form through three traces, by sequence length.

        Raises:
            ValueError: they are not three at equal distances.
            NotAffine: the three runs made different allocations.
        """
        lengths = sorted(traces)
        if len(lengths) != 3 or lengths[1] - lengths[0] != lengths[2] - lengths[1]:
            raise ValueError(f"three lengths at equal distances give the form, not {lengths}")
        one, two, three = (traces[length] for length in lengths)
        for length, other in zip(lengths[1:], (two, three), strict=True):
            if not (_program(one) == _program(other) and _same_apart(one, other)):
                raise NotAffine(f"the step allocates differently at sequence lengths {lengths[0]} and {length}")
        return cls(lengths[0], lengths[1] - lengths[0], (one, two, three))

    def at(self, length: int) -> AffineTrace:
        """The trace at a sequence length.

        Raises:
            ValueError: one that is not on the grid.
        """
        times, rest = divmod(length - self.first, self.step)
        if rest:
            raise ValueError(f"{length} is not {self.first} and a multiple of {self.step}")
        return _extended(self.traces, times)


def _extended(traces: Three, times: int) -> AffineTrace:
    one, two, three = traces
    computed = []
    for (number, first, grows1), (_, second, grows2), (_, third, grows3) in zip(
        one.computed, two.computed, three.computed, strict=True
    ):
        arguments = _polynomials((first.arguments, second.arguments, third.arguments), times)
        computed.append((number, replace(first, arguments=arguments), _polynomials((grows1, grows2, grows3), times)))
    apart = []
    for (size, first_run), (_, second_run), (_, third_run) in zip(one.apart, two.apart, three.apart, strict=True):
        runs = (AffineTrace.constant(run) for run in (first_run, second_run, third_run))
        apart.append((size, _extended((next(runs), next(runs), next(runs)), times).at(size)))
    return replace(
        one,
        constants=_polynomials((one.constants, two.constants, three.constants), times),
        slopes=_polynomials((one.slopes, two.slopes, three.slopes), times),
        computed=tuple(computed),
        apart=tuple(apart),
    )


def _polynomials(values: tuple[Sequence[int], Sequence[int], Sequence[int]], times: int) -> tuple[int, ...]:
    """The polynomials of second degree through the values at 0, 1 and 2, at `times` (Newton's forward differences)."""
    pairs = times * (times - 1) // 2
    return tuple(
        first + times * (second - first) + pairs * (third - 2 * second + first)
        for first, second, third in zip(*values, strict=True)
    )


def _program(trace: AffineTrace) -> tuple[object, ...]:
    """All of a trace but its sizes and its places."""
    rules = [(number, computed.rule, computed.position) for number, computed, _ in trace.computed]
    return trace.events, trace.buckets, trace.marks, trace.emptied, trace.streams, trace.completions, rules


def _same_apart(one: AffineTrace, other: AffineTrace) -> bool:
    if [size for size, _ in one.apart] != [size for size, _ in other.apart]:
        return False
    runs = zip(one.apart, other.apart, strict=True)
    return all(_program(AffineTrace.constant(a)) == _program(AffineTrace.constant(b)) for (_, a), (_, b) in runs)
