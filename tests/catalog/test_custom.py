"""GPUs that the catalog lacks: described on the command line, or named in the settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_tui.catalog import custom
from gpumem_tui.catalog.custom import custom_name
from gpumem_tui.catalog.loader import find_gpu, gpus, is_named
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.options.configuration import Options, asked_by, typed_words
from gpumem_tui.options.table import OPTIONS
from gpumem_tui.plan.plan import device_option
from gpumem_tui.settings import Settings, SettingsError, load, parse


def test_its_name_says_all_there_is_to_know_of_it() -> None:
    gpu = find_gpu(custom_name(20 * GIB, "8.9"))
    assert gpu == find_gpu("custom-20gib-SM_89")
    assert (gpu.name, gpu.sm, gpu.total_bytes) == ("custom-20GiB-sm_89", "sm_89", 20 * GIB)
    assert is_named(gpu)
    assert device_option(gpu) == "sim:custom-20GiB-sm_89"


def test_what_the_driver_keeps_of_it_is_a_range() -> None:
    between = find_gpu("custom-20GiB-sm_89").cuda_total_range
    assert 20 * GIB - 1200 * MIB < between.low_bytes < between.high_bytes - 100 * MIB < 20 * GIB - 200 * MIB


@pytest.mark.parametrize(("size", "arch", "count"), [("24564MiB", "sm_89", 128), ("20GiB", "sm_89", None)])
def test_its_multiprocessors_are_those_of_all_gpus_like_it(size: str, arch: str, count: int | None) -> None:
    assert find_gpu(f"custom-{size}-{arch}").multiprocessors == count


def test_an_architecture_that_is_not_given_is_said_to_be_assumed() -> None:
    assert find_gpu("custom-20GiB").title == "custom GPU (sm_80, assumed)"
    assert find_gpu("custom-20GiB-sm_80").title == "custom GPU (sm_80)"


def test_one_of_amd_has_no_reserve() -> None:
    gpu = find_gpu("custom-48GiB-gfx942")
    assert (gpu.arch, gpu.runtime, gpu.reserve_bytes) == ("gfx942", "ROCm", 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("custom", "give its memory and architecture, as in --memory 24GiB --arch sm_89"),
        ("custom-much-sm_89", "'much' is not a size"),
        ("custom-512MiB-sm_89", "from 1GiB to 4096GiB, not 0.50 GiB"),
        ("custom-9999GiB-sm_89", "from 1GiB to 4096GiB"),
        ("custom-20GiB-sm_35", "'sm_35' is unknown; write sm_60 to sm_121"),
        ("custom-20GiB-hopper", "'hopper' is unknown; write"),
        ("custom-20GiB-gfx1100", "write one of AMD's: gfx90a, gfx942, gfx950"),
    ],
)
def test_what_describes_no_gpu_is_one_line(name: str, said: str) -> None:
    with pytest.raises(CatalogError) as caught:
        find_gpu(name)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


class TestTyped:
    def test_memory_and_architecture_become_the_name(self) -> None:
        options = asked_by({"gpu": "sim:custom", "memory_bytes": 20 * GIB, "arch": "sm_89"})
        options.check_custom()
        assert options.gpu == "sim:custom-20GiB-sm_89"
        assert typed_words(options, OPTIONS) == ("--gpu", "sim:custom-20GiB-sm_89")

    @pytest.mark.parametrize(
        ("options", "flag"),
        [
            (Options(memory_bytes=GIB), "--memory"),
            (Options(gpu="sim:h100", memory_bytes=GIB), "--memory"),
            (Options(gpu="sim:custom", arch="sm_89"), "--arch"),
        ],
    )
    def test_half_of_it_or_another_gpu_is_refused(self, options: Options, flag: str) -> None:
        with pytest.raises(OptionError, match=rf"^{flag}: .*write --gpu sim:custom --memory 24GiB --arch sm_89$"):
            options.check_custom()


class TestSettings:
    @pytest.fixture(autouse=True)
    def _reads_them_anew(self) -> Iterator[None]:
        gpus.cache_clear()
        yield
        gpus.cache_clear()

    def _with(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        settings: Settings = parse(text)
        monkeypatch.setattr(custom, "load", lambda: settings)

    def test_a_gpu_of_them_is_one_of_the_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._with(monkeypatch, '[gpus.my-card]\nmemory = "20GiB"\narch = "sm_89"\nmultiprocessors = 70')
        gpu = find_gpu("my-card")
        assert gpu == list(gpus().values())[-1]
        assert (gpu.title, gpu.total_bytes, gpu.sm, gpu.multiprocessors) == ("my-card", 20 * GIB, "sm_89", 70)
        assert device_option(gpu) == "sim:my-card"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('[gpus.h100-80gb]\nmemory = "20GiB"', "the catalog has a GPU of this name"),
            ('[gpus."My card"]\nmemory = "20GiB"', "write its name in small letters"),
            ('[gpus.my-card]\nmemory = "lots"', "[gpus.my-card] in the settings: memory 'lots' is not a size"),
            ('[gpus.my-card]\nmemory = "20GiB"\narch = "sm_10"', "'sm_10' is unknown; write sm_60"),
        ],
    )
    def test_a_wrong_one_is_one_line(self, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
        self._with(monkeypatch, text)
        with pytest.raises(OptionError) as caught:
            gpus()
        assert said in str(caught.value)

    def test_one_without_memory_names_its_line(self, tmp_path: Path) -> None:
        file = tmp_path / "settings.toml"
        file.write_text('# mine\n[gpus.my-card]\narch = "sm_89"\n')
        with pytest.raises(SettingsError, match=r"settings.toml:2: gpus.my-card must be a table with memory = "):
            load(file)
