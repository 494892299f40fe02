"""The sizes of an out-of-memory message, in PyTorch's words and in those of a trial on a real GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.memory import GIB
from gpumem_tui.run.events import TrialDone
from gpumem_tui.search.words import shortfall

OOM = TrialDone(51, "oom", GIB, GIB, GIB, {"parameters": GIB}, "", 1.0, 1)
PYTORCH = (
    "CUDA out of memory. Tried to allocate 9.78 GiB. GPU 0 has a total capacity of 79.15 GiB of which 318.06 MiB is "
    "free. Process 4711 has 78.83 GiB memory in use. Of the allocated memory 60.77 GiB is allocated by PyTorch"
)
OBSERVED = "CUDA out of memory. Tried to allocate 512 bytes; 0 bytes free"


@pytest.mark.parametrize(
    ("detail", "limit_bytes", "line"),
    [
        (PYTORCH, None, "wanted 9.78 GiB, 318.06 MiB free"),
        (OBSERVED, None, "wanted 512 bytes, 0 bytes free"),
        (PYTORCH, 20 * GIB, "wanted 9.78 GiB, 318.06 MiB free, limited to 20.00 GiB"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", None, "wanted 2.00 GiB"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", None, "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_was_wanted_and_what_was_free(detail: str, limit_bytes: int | None, line: str) -> None:
    assert shortfall(replace(OOM, detail=detail), limit_bytes) == line


def test_another_failure_keeps_its_own_words_and_a_fit_has_none() -> None:
    said = "RuntimeError: Tried to allocate 2.00 GiB of something else (train.py:3)"
    assert shortfall(replace(OOM, outcome="error", detail=said)) == said
    assert shortfall(replace(OOM, outcome="fit")) == ""
