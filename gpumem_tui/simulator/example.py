"""What an operator gives of which torch knows no shape function: found by running it on the host, on ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_MOST_ELEMENTS = 1 << 24
"""Of all arguments together: more would take seconds, and memory that the host may not have."""

_SHAPED_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view)


class NoExample(Exception):
    """The operator cannot be run on the host for its shape."""


def result_by_example(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A result of the operator on the host, whose values mean nothing; None of one that gives nothing.

    As `FakeTensorMode` does where it may, which knows no device but the host's and CUDA's.

    Raises:
        NoExample: its shape depends on values, the host has no kernel of it, it gives back or changes an argument, or
            there is too much to compute.
    """
    if any(tag in func.tags for tag in _SHAPED_BY_VALUES):
        raise NoExample
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not func._schema.returns:
        return None
    if written or any(given.alias_info is not None for given in func._schema.returns):
        raise NoExample
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    if any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves):
        raise NoExample
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    if sum(math.prod(fake.shape) for fake in fakes) > _MOST_ELEMENTS:
        raise NoExample
    on_host = torch.device("cpu")

    def example(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return torch.ones_like(torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=on_host))
        return on_host if isinstance(leaf, torch.device) else leaf

    given_args, given_kwargs = pytree.tree_map(example, (args, dict(kwargs)))
    state = torch.get_rng_state()
    try:
        made = func(*given_args, **given_kwargs)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in pytree.tree_leaves(made)):
            raise NoExample
        return made
    except (RuntimeError, IndexError, ValueError) as error:  # NotImplementedError is a RuntimeError
        raise NoExample from error
    finally:
        torch.set_rng_state(state)
