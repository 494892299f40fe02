"""The rule that puts an allocation in a bucket, where the program does not say what it is.

Imports nothing of ours but the root's `memory` and `step`, and is Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

from gpumem_tui.memory import Bucket
from gpumem_tui.step import Phase

STEADY_BUCKETS = frozenset((Bucket.PARAMETERS, Bucket.GRADIENTS, Bucket.OPTIMIZER))
"""Made once, or anew in each step in the place of the old: what a step leaves of these is no growth."""


def untagged_bucket(
    made_in: Phase | None,
    *,
    outlives_phase: bool,
    stays: bool,
    recomputed: bool = False,
    is_data: bool = False,
) -> Bucket:
    """Return the bucket of an allocation by when it was made and when it was released.

    Batch data is what surely is data. In the rest, a block that forward or an evaluation made (or forward
    repeated) and that a later phase, even the next forward, releases is an activation; what is never released is
    unexplained; all else is temporary.

    Args:
        made_in: the phase; None before the first.
        outlives_phase: whether it was released in another phase than the one in which it was made, or not at all.
        stays: whether it was not released.
        recomputed: made by a forward that is repeated in backward.
        is_data: the batch, as far as known.
    """
    if is_data:
        return Bucket.BATCH_DATA
    if recomputed or (made_in in (Phase.FORWARD, Phase.EVALUATION) and outlives_phase):
        return Bucket.ACTIVATIONS
    return Bucket.OTHER if stays else Bucket.TEMPORARY
