"""How many samples a program's data has: what the DataLoaders that feed its steps draw from, by their samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, dataloader

from gpumem_tui.simulator.torch_internals import Replacements

_WRAPPED = ("batch_sampler", "sampler")
"""Where a sampler of batches that replaces another one keeps that: accelerate's shards, loaders whose epochs repeat."""


class Samples:
    """Notes which DataLoaders a program takes batches from between two steps, and which have no batch."""

    def __init__(self) -> None:
        self._since: dict[int, Any] = {}
        self._fed_by: dict[int, Any] = {}
        self._without_batch: Any = None

    def follow(self) -> Callable[[], None]:
        """Note each batch that is taken from now on; returns what ends that."""
        replaced = Replacements()
        replaced.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        replaced.wrap(DataLoader, "__len__", self._length)
        return replaced.close

    def _next(self, following: Callable[[Any], Any], loading: Any) -> Any:
        sampler = loading._index_sampler
        try:
            batch = following(loading)
        except StopIteration:
            if id(sampler) not in self._since and id(sampler) not in self._fed_by:
                self._without_batch = sampler
            raise
        self._since[id(sampler)] = sampler
        return batch

    def _length(self, counting: Callable[[Any], int], loader: DataLoader[Any]) -> int:
        batches = counting(loader)
        if not batches:
            self._without_batch = loader.batch_sampler
        return batches

    def stepped(self) -> None:
        """Note that a step was made: of loaders that others were read between, such as for validation, these feed it.

        A program that loads a batch ahead may make its last step of an epoch without taking one.
        """
        if self._since:
            both = self._since.keys() & self._fed_by.keys()
            self._fed_by = {key: self._since[key] for key in both or self._since}
            self._since = {}

    def fed_by(self) -> tuple[tuple[int, int], ...]:
        """Return the samples and the batch size of each loader that feeds the steps, as far as known."""
        known = map(_samples_and_batch, self._fed_by.values())
        return tuple(one for one in known if one is not None)

    def too_few(self) -> str:
        """Say that a loader has no batch, as an epoch has fewer samples than one; empty without one."""
        found = _samples_and_batch(self._without_batch)
        if found is None or found[0] >= found[1]:
            return ""
        return f"the data has {found[0]:,} samples: with drop_last=True an epoch has no batch of {found[1]:,}"


def _samples_and_batch(sampler: Any) -> tuple[int, int] | None:
    """Return what a sampler of batches draws from in an epoch, and how many it takes at once; None where unknown."""
    for one in _with_wrapped(sampler):
        if (by_rate := _drawn_by_rate(one)) is not None:
            return by_rate
        batch = getattr(one, "batch_size", None)
        if type(batch) is not int or batch < 1:
            continue
        drawn = getattr(one, "sampler", None)
        samples = _length(one) * batch if drawn is None else _length(drawn)
        return (samples, batch) if samples else None
    return None


def _drawn_by_rate(sampler: Any) -> tuple[int, int] | None:
    """Return the samples, and how many are drawn at once on average, where each is with a probability, as by Opacus."""
    samples, rate = getattr(sampler, "num_samples", None), getattr(sampler, "sample_rate", None)
    if type(samples) is not int or type(rate) is not float or not 0 < rate <= 1:
        return None
    return samples, max(1, round(samples * rate))


def _with_wrapped(sampler: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = next((found for name in _WRAPPED if (found := getattr(sampler, name, None)) is not None), None)


def _length(sized: Any) -> int:
    """Return a length; 0 of what has none, as an endless sampler."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return 0
