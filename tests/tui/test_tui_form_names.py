"""Search's form: a GPU that the catalog lacks, and a model by its name on the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, Static

from gpumem_tui.catalog.hub import HubModel
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.memory import GIB
from gpumem_tui.tui.kit.choice import ChoiceField
from gpumem_tui.tui.search import form as form_module
from gpumem_tui.tui.search.form import EditScreen
from tests.scenes import search as scene
from tests.scenes.pictures import until

QWEN = (
    '{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 500, '
    '"num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 64}'
)


async def edit(pilot: Pilot[int]) -> EditScreen:
    await pilot.press("e")
    form = pilot.app.screen
    assert isinstance(form, EditScreen)
    await until(pilot, lambda: all(node.is_mounted for node in form.walk_children(Widget, with_self=True)))
    return form


def said(form: EditScreen, field: str) -> str:
    return str(form.query_one(f"#{field}-error", Static).render())


def says(form: EditScreen, words: str) -> bool:
    return said(form, "config") == words


async def test_a_gpu_that_the_catalog_lacks_is_described_in_two_fields() -> None:
    app = scene.app(scene.config(), scene.missing_torch, autostart=False)
    async with app.run_test(size=(120, 60)) as pilot:
        form = await edit(pilot)
        assert not form.query_one("#memory_bytes-field").display
        form.query_one("#gpu", ChoiceField).value = "sim:custom"
        await until(pilot, lambda: "give the total that nvidia-smi reports" in said(form, "memory_bytes"))
        assert form.query_one("#memory_bytes-field").display
        form.query_one("#memory_bytes", Input).value = "20GiB"
        form.query_one("#arch", Input).value = "sm_89"
        await until(pilot, lambda: not form.query_one("#apply").disabled)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: not isinstance(app.screen, EditScreen))
        gpu = scene.search_screen(app).state.config.device.gpu
        assert (gpu.name, gpu.total_bytes) == ("custom-20GiB-sm_89", 20 * GIB)
        form = await edit(pilot)
        assert form.query_one("#gpu", ChoiceField).value == "sim:custom-20GiB-sm_89"


async def test_enter_asks_the_hub_for_a_model_and_typing_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    asked: list[str] = []

    def answer(model: HubModel) -> Path:
        asked.append(model.name)
        if model.name == "Qwen/Gone":
            raise CatalogError("there is no such model")
        file = model.folder / "snapshots" / "aaa" / "config.json"
        file.parent.mkdir(parents=True)
        file.write_text(QWEN)
        return file

    monkeypatch.setattr(form_module, "configuration", answer)
    app = scene.app(scene.config(), scene.missing_torch, autostart=False)
    async with app.run_test(size=(120, 60)) as pilot:
        form = await edit(pilot)
        form.query_one("#kind", ChoiceField).value = "config"
        field = form.query_one("#config", Input)
        for name, words in (("Qwen/Gone", "there is no such model"), ("Qwen/Tiny", "")):
            field.value = name
            await until(pilot, lambda: "enter asks the hub" in said(form, "config"))
            assert name not in asked
            field.focus()
            await pilot.press("enter")
            await until(pilot, partial(says, form, words))
            assert name in asked
        assert not form.query_one("#apply").disabled
