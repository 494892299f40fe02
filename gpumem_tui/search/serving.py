"""An inference engine alone on a GPU: weights, KV cache, and how many sequences it holds at once, by formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from msgspec import UNSET, UnsetType

from gpumem_tui.catalog.kv_layers import KvLayers
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.kv_cache import BATCHED_TOKENS, cached_bytes, paged, sequence_range, token_bytes
from gpumem_tui.memory import GIB, Range, Unknown, format_bytes, format_range
from gpumem_tui.report.objects import SCHEMA, JsonObject, known, reason_of
from gpumem_tui.report.tables import counted
from gpumem_tui.search.config import Device
from gpumem_tui.search.prediction import Fit
from gpumem_tui.search.printed import DeviceObject

OWN_BYTES = Range(round(0.3 * GIB), round(2.4 * GIB))
"""An engine's other memory: the forward pass's peak, and memory outside of torch. Logs of vLLM for nine text models of
0.5 to 14 B state 0.33 to 2.02 GiB and 0.01 to 0.35 GiB (vllm-project/vllm#10511, #10517, #14447; pegainfer#422)."""


@dataclass(frozen=True)
class Served:
    """A model, its sequences, and the engine's share of a GPU.

    Attributes:
        weights: bytes of one GPU; or why they are not known. `weights_words`: what they are.
        utilization: the share of CUDA's total that the engine may take.
        kv_type: of the KV cache's values, a key of `KV_BITS`.
        context: tokens of a sequence. `concurrency`: sequences at once.
    """

    model: str
    device: Device
    weights: Range | Unknown
    weights_words: str
    layers: KvLayers | Unknown
    utilization: float
    kv_type: str
    context: int
    concurrency: int
    tensor_parallel: int = 1

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self.device.gpu

    @property
    def budget(self) -> Range:
        """The bytes that the engine may take, by the driver's reserve."""
        total = self.gpu.cuda_total_range
        return Range(int(self.utilization * total.low_bytes), int(self.utilization * total.high_bytes))

    @property
    def sequence(self) -> Range | Unknown:
        """The KV cache of one sequence."""
        if isinstance(self.layers, Unknown):
            return self.layers
        return sequence_range(self.layers, self.kv_type, self.context, self.tensor_parallel)

    @property
    def cache(self) -> Range | Unknown:
        """The KV cache of all sequences."""
        one = self.sequence
        if isinstance(one, Unknown):
            return one
        return Range(self.concurrency * one.low_bytes, self.concurrency * one.high_bytes)

    @property
    def needed(self) -> Range | Unknown:
        """The bytes that the engine needs for them."""
        if isinstance(self.cache, Unknown):
            return self.cache
        return self.weights if isinstance(self.weights, Unknown) else self.weights + self.cache + OWN_BYTES

    @property
    def pool(self) -> Range | Unknown:
        """The bytes left for the KV cache, 0 at least."""
        if isinstance(self.weights, Unknown):
            return self.weights
        left = self.budget - (self.weights + OWN_BYTES)
        return Range(max(0, left.low_bytes), max(0, left.high_bytes))

    @property
    def fit(self) -> Fit | Unknown:
        """Return whether all sequences fit, with every unknown at its most, at its least, or not even then."""
        needed = self.needed
        if isinstance(needed, Unknown):
            return needed
        if needed.high_bytes <= self.budget.low_bytes:
            return "fits"
        return "may fit" if needed.low_bytes <= self.budget.high_bytes else "does not fit"

    @property
    def sequences(self) -> tuple[int, int] | Unknown:
        """Return how many sequences of this length the pool holds, at least and at most."""
        pool, one = self.pool, self.sequence
        if isinstance(one, Unknown):
            return one
        if isinstance(pool, Unknown):
            return pool
        return pool.low_bytes // one.high_bytes, pool.high_bytes // one.low_bytes

    @property
    def pool_tokens(self) -> tuple[int, int] | Unknown:
        """Return the tokens that vLLM's log would state of the pool ("GPU KV cache size"), at least and at most."""
        pool, layers = self.pool, self.layers
        if isinstance(layers, Unknown):
            return layers
        if isinstance(pool, Unknown):
            return pool
        pages = paged(layers, self.kv_type, self.context, self.tensor_parallel)
        return pages.pool_tokens(pool.low_bytes), pages.pool_tokens(pool.high_bytes)

    @property
    def least_share(self) -> float | Unknown:
        """Return the smallest ``gpu_memory_utilization``, in hundredths, in which all fits."""
        needed = self.needed
        if isinstance(needed, Unknown):
            return needed
        share = ceil(100 * needed.high_bytes / self.gpu.cuda_total_range.low_bytes) / 100
        return share if share <= 1 else Unknown(f"needs up to {format_bytes(needed.high_bytes)}")


_FITS: Mapping[Fit, tuple[str, str]] = {
    "fits": ("fits", "fit"),
    "may fit": ("may fit", "may fit"),
    "may not fit": ("may not fit", "may not fit"),
    "does not fit": ("does not fit", "do not fit"),
}


def serving_lines(served: Served) -> Iterator[str]:
    """Yield what an engine holds: the answer first, then its ledger and what the figures rest on."""
    yield answer_line(served)
    yield ""
    yield from _ledger(served)
    yield ""
    yield from _facts(served)


def answer_line(served: Served) -> str:
    """Return in one line whether the sequences fit, and how many do; or why that is not known."""
    several = served.concurrency != 1
    subject = f"{counted(served.concurrency, 'sequence')} of {served.context:,} tokens"
    where = f"in {served.utilization:g} of {served.gpu.title}"
    fit, sequences = served.fit, served.sequences
    if isinstance(fit, Unknown):
        cache = served.cache
        known_part = "" if isinstance(cache, Unknown) else f"; its KV cache takes {format_range(cache)}"
        return f"Not known whether {subject} fit {where}: {fit.reason}{known_part}"
    needed = served.needed
    assert isinstance(needed, Range)
    assert not isinstance(sequences, Unknown)
    takes = f"{format_range(needed)} of {format_range(served.budget)}"
    return f"{subject} {_FITS[fit][several]} {where}: {takes}; {_between(sequences)} fit at once"


def _between(ends: tuple[int, int]) -> str:
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ledger(served: Served) -> Iterator[str]:
    def row(title: str, size: Range | Unknown, words: str = "") -> str:
        text = "unknown" if isinstance(size, Unknown) else format_range(size)
        return f"{title:<24}{text:>18}  {size.reason if isinstance(size, Unknown) else words}".rstrip()

    of = f"{served.concurrency:,} × {served.context:,} tokens in {served.kv_type}"
    yield row("weights", served.weights, served.weights_words)
    yield row("KV cache", served.cache, of)
    yield row("engine's own", OWN_BYTES, "activations and workspaces, as logs of vLLM state")
    yield row("= engine", served.needed)
    yield row("it may take", served.budget, f"gpu_memory_utilization={served.utilization:g}")
    yield row("left for the KV cache", served.pool)


def _facts(served: Served) -> Iterator[str]:
    if isinstance(served.layers, Unknown):
        return
    kept = token_bytes(served.layers, served.kv_type, served.tensor_parallel)
    yield f"{served.model}: a token takes {kept:,} B: {', '.join(_kinds(served, served.layers))}"
    if not isinstance(tokens := served.pool_tokens, Unknown):
        yield f"GPU KV cache size: {_between(tokens)} tokens"
    if not isinstance(share := served.least_share, Unknown):
        yield f"smallest share that holds them: gpu_memory_utilization={share:g}"
    if 0 < (most := served.layers.most_tokens) < served.context:
        yield f"{served.model} is for {most:,} tokens: vLLM refuses more without VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    if any(one.window for one in served.layers.cached):
        yield (
            f"a window's layers keep up to {BATCHED_TOKENS:,} tokens of a batch more; an engine without a cache for "
            "windows keeps every token"
        )


def _kinds(served: Served, layers: KvLayers) -> Iterator[str]:
    for one in layers.cached:
        size = cached_bytes(one, served.kv_type, served.tensor_parallel)
        what = "latent vector" if one.is_latent else f"{counted(one.heads, 'key/value head')} of {one.width // 2}"
        window = f" within {one.window:,} tokens" if one.window else ""
        yield f"{counted(one.count, 'layer')} × {size:,} B ({what}){window}"
    if layers.states is not None:
        yield f"{counted(layers.states.count, 'layer')} with a state instead"


# JSON


class _Tokens(JsonObject, frozen=True):
    low: int
    high: int

    @classmethod
    def of(cls, ends: tuple[int, int] | Unknown) -> _Tokens | None:
        return None if isinstance(ends, Unknown) else cls(low=ends[0], high=ends[1])


class ServeObject(JsonObject, frozen=True):
    """The object that `predict --serve --json` prints. Null is unknown, and `unavailable` gives the reason."""

    schema: Literal[1]
    model: str
    device: DeviceObject
    answer: str
    fit: Fit | None
    context: int
    concurrency: int
    tensor_parallel: int
    utilization: float
    kv_cache_dtype: str
    weights: Range | None
    kv_bytes_per_token: int | None
    kv_cache: Range | None
    own: Range
    needed: Range | None
    budget: Range
    sequences: _Tokens | None
    kv_cache_tokens: _Tokens | None
    least_share: float | None
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, served: Served) -> ServeObject:
        """Say what an engine holds."""
        layers = served.layers
        return cls(
            schema=SCHEMA,
            model=served.model,
            device=DeviceObject.of(served.device),
            answer=answer_line(served),
            fit=known(served.fit),
            context=served.context,
            concurrency=served.concurrency,
            tensor_parallel=served.tensor_parallel,
            utilization=served.utilization,
            kv_cache_dtype=served.kv_type,
            weights=known(served.weights),
            kv_bytes_per_token=None
            if isinstance(layers, Unknown)
            else token_bytes(layers, served.kv_type, served.tensor_parallel),
            kv_cache=known(served.cache),
            own=OWN_BYTES,
            needed=known(served.needed),
            budget=served.budget,
            sequences=_Tokens.of(served.sequences),
            kv_cache_tokens=_Tokens.of(served.pool_tokens),
            least_share=known(served.least_share),
            unavailable=reason_of(served.fit) or UNSET,
        )
