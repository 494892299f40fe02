"""Traces at any sequence length from those at two or three, without running the step again and without torch.

What a training step asks for is a polynomial in the sequence length: a straight line, or of the second degree where
attention writes its scores. Through as many lengths as its degree asks for, it gives whole bytes at every other length;
where the step does otherwise (in kernels that round their sizes up) it is near. Whoever needs to be sure traces at the
answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from gpumem_tui.simulator.replay import AffineTrace, NotAffine


@dataclass(frozen=True)
class TraceByLength:
    """A training run at every sequence length, and every batch size that the traces it is from answer for."""

    lengths: tuple[int, ...]
    traces: tuple[AffineTrace, ...]

    @classmethod
    def fit(cls, traces: Mapping[int, AffineTrace]) -> TraceByLength:
        """The form through two or three traces, by sequence length.

        Raises:
            ValueError: fewer or more.
            NotAffine: the runs made different allocations.
        """
        lengths = tuple(sorted(traces))
        if len(lengths) not in (2, 3):
            raise ValueError(f"two or three lengths give the form, not {len(lengths)}")
        first = traces[lengths[0]]
        for length in lengths[1:]:
            if not (_program(first) == _program(traces[length]) and _same_apart(first, traces[length])):
                raise NotAffine(f"the step allocates differently at sequence lengths {lengths[0]} and {length}")
        return cls(lengths, tuple(traces[length] for length in lengths))

    def at(self, length: int) -> AffineTrace:
        """The trace at a sequence length."""
        shares = [
            (prod(length - other for other in self.lengths if other != one),
             prod(one - other for other in self.lengths if other != one))
            for one in self.lengths
        ]  # fmt: skip
        whole = prod(below for _, below in shares)
        return _extended(self.traces, [above * (whole // below) for above, below in shares], whole)


def _extended(traces: Sequence[AffineTrace], weights: Sequence[int], whole: int) -> AffineTrace:
    """The sum of the traces by their weights, each over `whole` (Lagrange's polynomials)."""

    known: dict[tuple[int, ...], int] = {}  # every layer's sizes are the same

    def polynomials(values: Sequence[Sequence[int]]) -> tuple[int, ...]:
        together = list(zip(*values, strict=True))
        for same in set(together) - known.keys():
            is_constant = same.count(same[0]) == len(same)
            known[same] = same[0] if is_constant else -(-sum(map(int.__mul__, weights, same)) // whole)
        return tuple(map(known.__getitem__, together))

    computed = []
    for of_one in zip(*(trace.computed for trace in traces), strict=True):
        number, first, _ = of_one[0]
        arguments = polynomials([at.arguments for _, at, _ in of_one])
        computed.append((number, replace(first, arguments=arguments), polynomials([grows for _, _, grows in of_one])))
    apart = []
    for runs in zip(*(trace.apart for trace in traces), strict=True):
        size = runs[0][0]
        apart.append((size, _extended([AffineTrace.constant(run) for _, run in runs], weights, whole).at(size)))
    return replace(
        traces[0],
        constants=polynomials([trace.constants for trace in traces]),
        slopes=polynomials([trace.slopes for trace in traces]),
        computed=tuple(computed),
        apart=tuple(apart),
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
