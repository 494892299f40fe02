"""CUDA_VISIBLE_DEVICES: what a process knows as cuda:0, cuda:1, ..."""

from __future__ import annotations

import pytest

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import Candidate, visible_devices

_A, _B, _C, _M = "GPU-aa11", "GPU-ab22", "GPU-cc33", "MIG-dd44"
_ALIKE = [Candidate(index, uuid, "A100") for index, uuid in enumerate((_A, _B, _C))]
_MIXED = [Candidate(0, _A, "A100"), Candidate(1, _B, "H100")]
_DIVIDED = [Candidate(0, _A, "A100", instances=(_M, "MIG-ee55")), Candidate(1, _B, "A100")]
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, (_A, _B, _C)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,0", (_C, _A)),
        (" 2 , 0 ", (_C, _A)),
        ("1,-1,0", (_B,)),
        ("1,7,0", (_B,)),
        ("1,1", ()),
        (f"{_C},{_A}", (_C, _A)),
        ("GPU-c", (_C,)),
        ("GPU-a", ()),  # names two
        ("GPU-c,GPU-zz,GPU-aa", (_C,)),
    ],
)
def test_whole_gpus(variable: str | None, seen: tuple[str, ...]) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_devices(_ALIKE, environ) == seen


def test_different_gpus_are_ordered_by_speed_unless_told_otherwise() -> None:
    assert isinstance(visible_devices(_MIXED, {}), Unknown)
    assert isinstance(visible_devices(_MIXED, {"CUDA_VISIBLE_DEVICES": "1"}), Unknown)
    assert visible_devices(_MIXED, _ORDER) == (_A, _B)
    assert visible_devices(_MIXED, {**_ORDER, "CUDA_VISIBLE_DEVICES": "1"}) == (_B,)
    assert visible_devices(_MIXED, {"CUDA_VISIBLE_DEVICES": _B}) == (_B,)


@pytest.mark.parametrize(
    ("variable", "seen"),
    [(_M, (_M,)), ("MIG-e", ("MIG-ee55",)), ("0", (_M,)), ("1", (_B,)), (f"{_M},MIG-ee55", (_M,)), (_A, (_M,))],
)
def test_cuda_sees_one_mig_instance_and_nothing_beside_it(variable: str, seen: tuple[str, ...]) -> None:
    assert visible_devices(_DIVIDED, {"CUDA_VISIBLE_DEVICES": variable}) == seen
    assert visible_devices(_DIVIDED, {}) == (_M,)
