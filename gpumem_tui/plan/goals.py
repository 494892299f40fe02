"""A plan's goals (tokens, prices, multiples of batch and GPUs), and the numbers that a plan is solved for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.errors import OptionError

USUAL_MULTIPLE = 8
"""Tensor cores are used best where the dimensions of products are multiples of 8 (NVIDIA's guide to matrix
multiplication, for 16-bit values)."""
USUAL_NODE = 8
"""GPUs of a machine: NVIDIA's HGX and DGX boards of A100, H100, H200 and B200 have 8, and clouds rent those."""
MOST_TOKENS = 10**15


@dataclass(frozen=True)
class Goals:
    """The tokens to train, what an hour of a GPU costs, and in what multiples. None of it changes what fits.

    Attributes:
        tokens: to train on, all passes over the data together; None for not said.
        price: of the plan's GPU for an hour, in US dollars; None for not said.
        prices: an hour's price by a GPU's name, as the user's settings have them.
        batch_multiple: micro-batches are rounded down to a multiple of it.
        node_gpus: of one machine: more than those come in whole machines.
    """

    tokens: int | None = None
    price: float | None = None
    batch_multiple: int = USUAL_MULTIPLE
    node_gpus: int = USUAL_NODE
    prices: tuple[tuple[str, float], ...] = ()

    def check(self, *, has_tokens: bool) -> None:
        """Check that these goals can be, for a network whose samples are sequences of tokens or are not.

        Raises:
            OptionError: a number out of its range, or one without the other; names the option.
        """
        if self.tokens is not None and not has_tokens:
            raise OptionError("--tokens: this network has no tokens; leave it out")
        if self.tokens is not None and not 1 <= self.tokens <= MOST_TOKENS:
            raise OptionError(f"--tokens: give 1 to {MOST_TOKENS:,}, not {self.tokens:,}")
        if self.price is not None and not 0 <= self.price < 1e6:
            raise OptionError(f"--price: give the price of one GPU for an hour, not {self.price:g}")
        if not 1 <= self.batch_multiple <= 4096:
            raise OptionError(f"--batch-multiple: give 1 to 4,096, not {self.batch_multiple:,}")
        if not 1 <= self.node_gpus <= 1024:
            raise OptionError(f"--node-gpus: give 1 to 1,024, not {self.node_gpus:,}")
        try:
            short = next(((name, found) for name, _ in self.prices if (found := find_gpu(name).name) != name), None)
        except CatalogError as error:
            raise OptionError(f"[prices] in the settings: {error}") from error
        if short is not None:
            raise OptionError(f"[prices] in the settings: write {short[1]} for {short[0]}")


NO_GOALS = Goals()


Quantity = Literal["batch-size", "seq-len", "gpus", "accumulation"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

AT_ONE_SIZE: frozenset[Quantity] = frozenset({"seq-len", "gpus"})
"""Quantities that need traces of the plan's own batch size only."""

MOST_TRACES = 12
"""So many are made without a screen, the likeliest first: what is answered must not depend on how fast a machine is."""
TRACE_LIMIT_S = 600.0
"""So long are they waited for at most, unless told otherwise: then the formula answers."""
