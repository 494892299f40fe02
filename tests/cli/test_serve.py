"""The refusals of `serve`, in one line; tests/serve holds that it works."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest

from tests.cli.conftest import Program


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "gpu-box"])
def test_only_loopback_can_be_bound(program: Program, address: str) -> None:
    said = program("serve", "--bind", address)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert f"--bind {address}" in said.err
    assert "unencrypted" in said.err
    assert "ssh -N -L" in said.err


def test_without_its_package_it_says_what_to_install(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "textual_serve" else find_spec(name)

    monkeypatch.setattr("gpumem_tui.cli.serve.find_spec", find)
    said = program("serve")
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert "-m pip install textual-serve" in said.err


def test_settings_that_are_invalid_are_said_to_who_serves(program: Program) -> None:
    (program.folder / "own.toml").write_text("interval_s = 'often'\n")
    said = program("serve", "--settings", "own.toml")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "own.toml:1: interval_s must be a number" in said.err
