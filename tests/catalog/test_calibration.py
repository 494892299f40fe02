"""The file of what was measured of GPUs: written, read again, replaced, refused where it is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.catalog.calibration import Calibration, calibrated, load, save
from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.memory import GIB, MIB

H100 = Calibration(
    "NVIDIA H100 80GB HBM3", find_gpu("h100-80gb").total_bytes, "570.86", "2.13.0", "2026-11-23", {"context": 500 * MIB}
)


def test_what_is_saved_is_read_again_and_the_same_driver_and_torch_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.toml"
    newer = replace(H100, measured="2026-12-01", stages={"context": 510 * MIB, "cuDNN": 600 * MIB}, eager_bytes=GIB)
    other = replace(H100, driver="580.1")
    for one in (H100, other, newer):
        assert save(one, path) == path
    assert load(path) == (other, newer)
    assert calibrated(find_gpu("h100-80gb"), load(path)).context == newer.context
    assert calibrated(find_gpu("h100-nvl-94gb"), load(path)).context is None
    assert calibrated(find_gpu("h100-80gb"), load(path)) == find_gpu("h100-80gb"), "it is the same kind of GPU"


@pytest.mark.parametrize("text", ["[[calibration]]\ngpu = 3\n", "calibration = 1", "= 1", "[[calibration]]\n"])
def test_what_is_no_calibration_is_one_line_and_stays(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    path.write_text(text)
    with pytest.raises(CatalogError, match=r"calibration\.toml") as caught:
        load(path)
    assert "\n" not in str(caught.value).strip()
    with pytest.raises(CatalogError):
        save(H100, path)
    assert path.read_text() == text


def test_the_users_file_need_not_exist_but_a_named_one_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load() == ()
    with pytest.raises(CatalogError, match="there is no such file; `gpumem-tui doctor --calibrate` writes one"):
        load(tmp_path / "nowhere")
