"""The closed-form prediction of one training step's peak, and the largest batch it allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula import convnet
from gpumem_tui.formula.parallel import stages
from gpumem_tui.formula.parameters import active_parameters, count_parameters
from gpumem_tui.formula.recipe import NO_EXTRAS, Extras, Recipe
from gpumem_tui.formula.records import LOSS_BYTES
from gpumem_tui.formula.resolved import Resolved
from gpumem_tui.formula.rows import IN_A_BLOCK, OF_THE_LOSS, ONE_BLOCK, FormulaRow, Moment
from gpumem_tui.memory import Breakdown, Bucket, format_bytes

DEFAULT_HEADROOM = 0.1
"""Share of the card kept free for the CUDA context, workspaces and fragmentation."""


@dataclass(frozen=True)
class FormulaPrediction:
    """The closed form's answer for one GPU.

    Attributes:
        rows: its terms at the moment when they are highest together, in the ledger's order of buckets.
        moment: that moment.
        cache_bytes: what the allocator must be able to hold next to them, for pieces that nothing fits into.
        assumptions: what the whole answer takes for granted, one sentence each.
        terms: those of every moment.
    """

    batch_size: int
    rows: tuple[FormulaRow, ...]
    moment: Moment
    cache_bytes: int
    assumptions: tuple[str, ...]
    terms: tuple[FormulaRow, ...] = field(repr=False)

    @cached_property
    def breakdown(self) -> Breakdown:
        """The rows summed by bucket."""
        return _by_bucket(self.rows)

    @cached_property
    def highest(self) -> Breakdown:
        """The most of each bucket, whichever moment that is at."""
        moments = [_by_bucket(at_moment(self.terms, moment)) for moment in Moment]
        return Breakdown({term.bucket: max(one[term.bucket] for one in moments) for term in self.terms})

    @property
    def peak_bytes(self) -> int:
        """The rows together: allocated."""
        return sum(row.size_bytes for row in self.rows)

    @property
    def needed_bytes(self) -> int:
        """The bytes that the allocator must be able to reserve."""
        return self.peak_bytes + self.cache_bytes

    @property
    def fixed_bytes(self) -> int:
        """The bytes at that moment that no batch size changes: weights, their copies, gradients, optimizer state."""
        return sum(row.size_bytes for row in self.rows if not row.grows_with_batch)

    @property
    def activation_bytes_per_sample(self) -> int:
        """The bytes that each sample adds then: activations, head and loss, batch data. 0 at batch size 0."""
        growing_bytes = sum(row.size_bytes for row in self.rows if row.grows_with_batch)
        return growing_bytes // self.batch_size if self.batch_size else 0


@lru_cache(1024)
def predict(shape: ModelShape, recipe: Recipe, batch_size: int, extras: Extras = NO_EXTRAS) -> FormulaPrediction:
    """Return the peak of one training step on one of the recipe's GPUs, term by term.

    Args:
        extras: techniques beyond the recipe; those that mean nothing for this network change nothing.

    Raises:
        ValueError: a negative batch size, fewer than one GPU, or adapters that this network cannot have.
    """
    rows = terms(shape, recipe, batch_size, extras)
    sums = {moment: sum(row.size_bytes for row in at_moment(rows, moment)) for moment in Moment}
    moment = max(Moment, key=lambda one: sums[one])
    needed = max(_needed_bytes(moments, batch_size) for moments in by_stage(shape, recipe, extras))
    return FormulaPrediction(
        batch_size=batch_size,
        rows=at_moment(rows, moment),
        moment=moment,
        cache_bytes=needed - sums[moment],
        assumptions=tuple(_assumptions(shape, recipe, extras)),
        terms=rows,
    )


def _by_bucket(rows: Iterable[FormulaRow]) -> Breakdown:
    buckets: defaultdict[Bucket, int] = defaultdict(int)
    for row in rows:
        buckets[row.bucket] += row.size_bytes
    return Breakdown(buckets)


def at_moment(rows: Iterable[FormulaRow], moment: Moment) -> tuple[FormulaRow, ...]:
    """Return those that are there at a moment."""
    return tuple(row for row in rows if moment in row.moments)


def terms(shape: ModelShape, recipe: Recipe, batch_size: int, extras: Extras = NO_EXTRAS) -> tuple[FormulaRow, ...]:
    """Return every term of a step, each with the moments at which it is there.

    Raises:
        ValueError: as `predict`.
    """
    if batch_size < 0:
        raise ValueError(f"batch size must not be negative, it is {batch_size}")
    if recipe.gpus < 1:
        raise ValueError(f"there must be at least 1 GPU, not {recipe.gpus}")
    needed = [_needed_bytes(moments, batch_size) for moments in by_stage(shape, recipe, extras)]
    rows = stages(shape, recipe, extras)[needed.index(max(needed))].rows(batch_size)
    return tuple(sorted(rows, key=lambda one: _ORDER[one.bucket]))


_ORDER = {bucket: place for place, bucket in enumerate(Bucket)}


@dataclass(frozen=True)
class MomentBytes:
    """The bytes needed at one moment, pieces included: those of any batch size, and those that each sample adds.

    Attributes:
        beyond: what is needed instead from a batch size on, and that size; None where pieces do not end.
    """

    fixed_bytes: int
    sample_bytes: int
    beyond: tuple[int, MomentBytes] | None = None

    def at(self, batch_size: int) -> MomentBytes:
        """Return what counts from a batch size on."""
        return self if self.beyond is None or batch_size < self.beyond[0] else self.beyond[1].at(batch_size)

    def growing_as(self, other: MomentBytes) -> MomentBytes:
        """Return what this takes regardless of the batch, with samples as large as in `other`, which may end pieces."""
        if self.beyond is None or other.beyond is None:
            return MomentBytes(self.fixed_bytes, other.sample_bytes)
        return self.growing_by(other.sample_bytes - self.sample_bytes)

    def growing_by(self, sample_bytes: int) -> MomentBytes:
        """Return what this takes with so much more a sample."""
        beyond = None if self.beyond is None else (self.beyond[0], self.beyond[1].growing_by(sample_bytes))
        return MomentBytes(self.fixed_bytes, self.sample_bytes + sample_bytes, beyond)

    def needed_bytes(self, batch_size: int) -> int:
        """Return the bytes at a batch size."""
        found = self.at(batch_size)
        return found.fixed_bytes + batch_size * found.sample_bytes

    def largest(self, usable_bytes: int, most: int | None = None) -> int:
        """Return the largest batch that stays within `usable_bytes`, of those up to `most`; below 1 for none."""
        if self.beyond is not None and (most is None or most >= self.beyond[0]):
            least, beyond = self.beyond
            if (found := beyond.largest(usable_bytes, most)) >= least:
                return found
            most = least - 1
        found = (usable_bytes - self.fixed_bytes) // self.sample_bytes
        return found if most is None else min(found, most)


@lru_cache(4096)
def by_stage(shape: ModelShape, recipe: Recipe, extras: Extras = NO_EXTRAS) -> tuple[dict[Moment, MomentBytes], ...]:
    """Return the bytes of every moment, on a GPU of each stage that can need the most; one but for pipelines."""
    return tuple(_moments(stage.share, stage.rows(1)) for stage in stages(shape, recipe, extras))


def by_moment(shape: ModelShape, recipe: Recipe, extras: Extras = NO_EXTRAS) -> dict[Moment, MomentBytes]:
    """Return the bytes of every moment; of a pipeline, on its stage that needs the most for one sample."""
    return max(by_stage(shape, recipe, extras), key=lambda moments: _needed_bytes(moments, 1))


def _needed_bytes(moments: dict[Moment, MomentBytes], batch_size: int) -> int:
    return max(one.needed_bytes(batch_size) for one in moments.values())


def _moments(r: Resolved, rows: list[FormulaRow]) -> dict[Moment, MomentBytes]:
    """Return the bytes of every moment on one GPU, with the free pieces of segments that nothing fits into.

    Args:
        r: what that GPU runs. `rows`: its rows for one sample.
    """
    found = {}
    for moment in Moment:
        there = [one for one in rows if moment in one.moments]
        fixed = sum(one.size_bytes for one in there if not one.grows_with_batch)
        growing = sum(one.size_bytes for one in there if one.grows_with_batch)
        fixed += _left_copies_bytes(r, moment)
        pieces = 0 if "chunked-loss" in r.extras or not r.shape.has_head else _pieces_bytes(r, moment)
        of_logits = pieces and r.shape.record.predicts_tokens and moment in OF_THE_LOSS
        if of_logits and r.recipe.recompute == "full":
            found[moment] = _by_batch(r, fixed, growing, pieces, rows)
        else:
            found[moment] = _reserved(fixed, growing + pieces, r, moment)
    return found


def _by_batch(r: Resolved, fixed: int, growing: int, piece: int, rows: list[FormulaRow]) -> MomentBytes:
    """Return what a recomputed language model needs as the loss is there, for batches of three kinds.

    Args:
        fixed, growing: bytes of the rows at that moment, and what a sample adds. `piece`: of a sample's logits in fp32.
        rows: of every moment, for one sample.

    A block of logits is split by the optimizer's state and the inputs of the last blocks that are kept, where these
    do not fit into smaller segments, which forward made for the values of one feed-forward network. The state does not
    grow, segments do. So where it is larger than a block of logits, blocks are split; then one is, of which the state
    takes the less the larger the batch; and from some batch size on none, as all that is kept has room elsewhere. Where
    blocks are split it is these or, if more, what the last step's gradients have left empty between their state; where
    none is, what the state leaves of the segments in which a block was recomputed.
    """
    state, gradients = (sum(one.size_bytes for one in rows if one.name == name) for name in _BESIDE_EACH_OTHER)
    values = sum(one.size_bytes for one in rows if one.grows_with_batch and one.name.endswith(ONE_BLOCK))
    spilt = _SPILT_STATE * state
    room = _ROOM["autocast" if r.is_autocast else "gated" if r.shape.record.is_gated else "plain"]
    room *= r.shape.tokens * r.shape.ffn * r.width
    rest = _reserved(fixed, growing + int(_OF_A_BLOCK * values), r, Moment.LOSS)
    rest = replace(rest, fixed_bytes=rest.fixed_bytes - int(spilt))
    whole = _larger(_reserved(fixed, growing, r, Moment.LOSS), rest)
    one = _reserved(fixed, growing + piece + int(room), r, Moment.LOSS)
    one = replace(one, fixed_bytes=one.fixed_bytes - int(spilt), beyond=(int(spilt / room) + 1, whole))
    many = _reserved(fixed, growing + int(_PIECES * piece), r, Moment.LOSS)
    between = _larger(_reserved(fixed + int(_BETWEEN * gradients), growing, r, Moment.LOSS), many)
    return _until(between, int(_BLOCKS_OF_STATE * state / piece) + 1, one).at(1)


def _larger(*both: MomentBytes) -> MomentBytes:
    """Return the larger of two at each batch size: from where they are alike on the one that grows faster."""
    slower, faster = sorted(both, key=lambda one: one.sample_bytes)
    alike = (slower.fixed_bytes - faster.fixed_bytes) // max(1, faster.sample_bytes - slower.sample_bytes)
    return replace(slower, beyond=(max(1, alike + 1), faster)).at(1)


def _until(one: MomentBytes, batch_size: int, other: MomentBytes) -> MomentBytes:
    """Return what counts up to a batch size, and from there on the other."""
    if one.beyond is None or one.beyond[0] >= batch_size:
        return replace(one, beyond=(batch_size, other))
    return replace(one, beyond=(one.beyond[0], _until(one.beyond[1], batch_size, other)))


def usable_bytes(total_bytes: int, headroom: float = DEFAULT_HEADROOM) -> int:
    """Return what a step may take of a card of `total_bytes`.

    Raises:
        ValueError: a headroom that is no share of the card.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be at least 0 and below 1, not {headroom}")
    return int(total_bytes * (1 - headroom))


def max_batch_size(
    shape: ModelShape,
    recipe: Recipe,
    total_bytes: int,
    headroom: float = DEFAULT_HEADROOM,
    extras: Extras = NO_EXTRAS,
    *,
    beside_bytes: int = 0,
) -> int:
    """Return the least over the moments of a step of floor((M·(1 − headroom) − fixed) / bytes per sample); 0 for none.

    Args:
        total_bytes: M, the memory of one GPU.
        headroom: share of it to leave free.
        extras: techniques beyond the recipe.
        beside_bytes: what the allocator cannot have of it: the driver's reserve, the CUDA context, workspaces.

    Raises:
        ValueError: a headroom that is no share of the card.
    """
    usable = usable_bytes(total_bytes, headroom) - beside_bytes
    return largest_within([one for stage in by_stage(shape, recipe, extras) for one in stage.values()], usable)


def largest_within(moments: Sequence[MomentBytes], usable_bytes: int) -> int:
    """Return the largest batch that stays within so many bytes at all of the moments; 0 for none."""
    most = min(one.largest(usable_bytes) for one in moments)
    while (found := min(one.largest(usable_bytes, most) for one in moments)) < most:
        most = found
    return max(0, most)


def largest_obstacle(prediction: FormulaPrediction, capacity_bytes: int, capacity: str = "of the card's") -> str | None:
    """Return why `prediction` exceeds `capacity_bytes`, in one line; None if it fits.

    It names the largest bucket, if that alone is too much, else the fewest that are so together.

    Args:
        capacity: what the message calls the bytes there are.
    """
    if prediction.needed_bytes <= capacity_bytes:
        return None
    needed_by = {**prediction.breakdown.buckets, Bucket.CACHE: prediction.cache_bytes}
    sizes = sorted(needed_by.items(), key=lambda item: -item[1])
    together = list(accumulate(size_bytes for _, size_bytes in sizes))
    fewest = next(count for count, size_bytes in enumerate(together) if size_bytes > capacity_bytes)
    *others, last = (bucket.title for bucket, _ in sizes[: fewest + 1])
    needed = format_bytes(together[fewest])
    needs = f"{', '.join(others)} and {last} together need {needed}" if others else f"{last} alone needs {needed}"
    what = "nothing fits" if prediction.batch_size <= 1 else f"batch size {prediction.batch_size} does not fit"
    return f"{what}: {needs} {capacity} {format_bytes(capacity_bytes)}"


# Memory of the allocator besides tensors: free pieces of its segments that no request fits into.
#
# PyTorch's allocator gives a request the smallest cached block that is large enough and splits it (`get_free_block` in
# c10/cuda/CUDACachingAllocator.cpp). Where memory is short it gives whole free segments back, but a segment of which a
# piece is in use stays. Which pieces those are only a replay tells; these are what the traced steps of the catalog's
# models came to, on twelve GPUs: `python -m tests.published.formula_vs_trace`.

_SHARE = 0.055
"""The share of the reserved bytes that is in such pieces at the largest batch."""

_OF_FIXED, _OF_GROWING, _OF_UPDATE, _OF_SHORT_SEQUENCES = 0.05, 0.03, 0.02, 0.065
"""The share with full recompute: of a language model, besides `_by_batch`, as weights are updated, and of what
grows of other networks under autocast, which is the most of ViTs with 50 tokens."""

_SPILT_STATE = 0.78
"""The share of an optimizer's state that is in blocks of logits with full recompute, less what has `_ROOM`
elsewhere."""

_ROOM = {"plain": 1.45, "gated": 1.53, "autocast": 1.8}
"""Times the feed-forward's values: what is free for the state in smaller segments."""

_PIECES, _BLOCKS_OF_STATE = 1.1, 1.15
"""Blocks of logits in pieces where the state is larger than so many of them."""

_BESIDE_EACH_OTHER, _BETWEEN, _OF_A_BLOCK = ("optimizer state", "gradients"), 0.75, 0.75
"""The share of gradients between their state (the others are in blocks of logits), and of a block's values, whose
segments the state splits."""

_SHORT_PATH = 2
"""Convolutions in a block of the shallower ResNets; deeper ones have three."""


def _pieces_bytes(r: Resolved, moment: Moment) -> int:
    """Return what is in pieces because of a sample.

    A language model has one fp32 block of its logits in pieces: the next step's forward finds the blocks that the last
    loss had, splits them for its small tensors, and when the loss asks for them again one of them is in pieces (with
    full recompute as `_by_batch` has it). A recomputed ResNet has the maps of its largest block, which forward frees
    between the ones that it keeps. Recomputed experts have their outputs.
    """
    shape, full = r.shape, r.recipe.recompute == "full"
    if moment is Moment.UPDATE:
        return 0
    if shape.record.has_batch_norm and full:
        # Where two convolutions are all, what ReLU makes of them is no smaller than what follows.
        return r.width * max(
            block.convolution_values + (block.activated_values if len(block.path) == _SHORT_PATH else 0)
            for block in convnet.resnet(shape).blocks
        )
    if shape.experts is not None and full and moment in IN_A_BLOCK:
        return shape.seq_len * shape.experts.active * shape.hidden * r.residual
    if shape.record.predicts_tokens and moment in OF_THE_LOSS:
        return shape.seq_len * shape.vocab * LOSS_BYTES
    return 0


def _left_copies_bytes(r: Resolved, moment: Moment) -> int:
    """Return where, under autocast with full recompute, half of forward's 16-bit weights lay, between kept inputs."""
    if r.recipe.has_adapters or r.recipe.recompute != "full" or moment in (Moment.LOSS, Moment.UPDATE):
        return 0
    return r.counts.copied * r.precision.working_copy_bytes // 2


def _reserved(fixed_bytes: int, growing_bytes: int, r: Resolved, moment: Moment) -> MomentBytes:
    """Return what the allocator holds for so much, at the largest batch.

    A fully recomputed step has little in between when the weights are updated: its pieces are used for gradients.
    """
    of_fixed = of_growing = _SHARE
    if r.recipe.recompute == "full":
        if moment is Moment.UPDATE:
            of_fixed = of_growing = _OF_UPDATE
        elif r.shape.record.predicts_tokens:
            of_fixed, of_growing = _OF_FIXED, _OF_GROWING
        elif r.is_autocast:
            of_growing = _OF_SHORT_SEQUENCES
    return MomentBytes(round(fixed_bytes / (1 - of_fixed)), round(growing_bytes / (1 - of_growing)))


def _assumptions(shape: ModelShape, recipe: Recipe, extras: Extras) -> list[str]:
    """Return what the closed form takes for granted, one sentence each."""
    assumed = [
        "The highest of six moments of a step; between them memory moves evenly.",
        "Allocator cache, CUDA context and library workspaces are not counted.",
    ]
    if shape.record.has_attention:
        assumed += _attention_assumptions(shape, recipe)
    if shape.record.has_batch_norm:
        assumed.append("BatchNorm's running statistics are not counted: they are buffers of a few kilobytes.")
    if recipe.recompute == "selective" and not shape.record.has_attention:
        assumed.append("Selective recompute drops attention scores; this network has none.")
    if recipe.precision == "fp32":
        assumed.append("The activation forms are for 16-bit values; in fp32 all but dropout masks count twice.")
    if recipe.data_parallel > 1 and recipe.sharding == "none":
        assumed.append("Data parallel: each GPU holds everything; communication buckets are not counted.")
    elif recipe.sharded_over > 1 and recipe.has_adapters:
        assumed.append("Sharded under adapters: gradients on their way are not counted.")
    assumed += _parallel_assumptions(recipe)
    if recipe.has_frozen_layers:
        assumed.append("Frozen layers come first: nothing is kept in them, and backward ends before them.")
    if recipe.has_adapters:
        assumed.append("No dropout before the adapters; the network's own weights are frozen, and have no gradient.")
    if extras:
        assumed.append(f"Formula only, never traced: {', '.join(sorted(extras))}.")
    return assumed


def _attention_assumptions(shape: ModelShape, recipe: Recipe) -> list[str]:
    assumed = []
    if recipe.attention == "auto":
        assumed.append(
            "PyTorch chooses a fused attention kernel, which drops the textbook's 5·a·S/h term; "
            "--attention math keeps it."
        )
    if recipe.attention == "flash" and recipe.precision == "fp32":
        assumed.append("Flash kernels take 16-bit values only; in fp32 PyTorch's fused kernel is efficient.")
    if shape.record.remark:
        assumed.append(shape.record.remark)
    if shape.experts is not None:
        active, total = active_parameters(shape), count_parameters(shape)
        assumed.append(f"{active / 1e9:.1f} of {total / 1e9:.1f} billion parameters work on one token.")
    if not shape.dropout:
        assumed.append("The model has no dropout, so the textbook's masks are not counted.")
    if recipe.recompute == "selective":
        assumed.append("Selective recompute drops the attention core and rebuilds one block's at a time.")
    return assumed


def _parallel_assumptions(recipe: Recipe) -> list[str]:
    """Return what the answer takes for granted where the network is cut."""
    assumed = []
    if recipe.tensor_parallel > 1:
        assumed.append("Tensor parallel cuts blocks and vocabulary (Shoeybi et al. 2019), as PyTorch's DTensor does.")
    if recipe.pipeline_parallel > 1:
        assumed.append(
            "The figures are of the fuller pipeline stage, the first or the last; the batch is one micro-batch."
        )
    if recipe.expert_parallel > 1:
        assumed.append("Expert parallel: each GPU holds a share of the experts and gets as many tokens as it sends.")
    if recipe.context_parallel > 1:
        assumed.append("Context parallel: keys and values go round in a ring, one layer's at a time.")
    return assumed
