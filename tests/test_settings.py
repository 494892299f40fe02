"""The settings file: every key documented, every mistake on its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs

from gpumem_tui.settings import Notify, Settings, SettingsError, default_file, default_path, load, parse


def test_brackets_that_go_too_deep_are_one_line() -> None:
    with pytest.raises(SettingsError, match=r"settings\.toml: too many nested brackets"):
        parse("hosts = " + "[" * 5000)


def test_the_printed_file_has_every_key_at_its_default() -> None:
    text = default_file()
    assert parse(text) == Settings()
    live = re.sub(r"^# (\w+ = |\[\w+\]$)", r"\1", text, flags=re.MULTILINE)
    assert parse(live) == Settings()
    names = [name for table in (Settings, Notify) for name in table.__struct_fields__ if name != "notify"]
    assert re.findall(r"^(\w+) = ", live, flags=re.MULTILINE) == names


def test_values_are_read() -> None:
    text = 'interval_s = 2\ntheme = "light"\nbell = true\ntemperature_limit_c = 80\n'
    expected = structs.replace(Settings(), interval_s=2.0, theme="light", bell=True, temperature_limit_c=80)
    assert parse(text) == expected
    assert isinstance(parse(text).interval_s, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\nintervall_s = 2", "settings.toml:3: unknown key 'intervall_s'; did you mean interval_s?"),
        ("zebra = 2", "settings.toml:1: unknown key 'zebra'; `gpumem-tui settings` lists the keys"),
        ("bell = true\n[interval_s]\na = 1", "settings.toml:2: interval_s must be a number, not a table"),
        ("[monitor]\nbell = true", "settings.toml:1: unknown key 'monitor'"),
        ('"bel" = true', "settings.toml:1: unknown key 'bel'; did you mean bell?"),
        ("bell = 1", "settings.toml:1: bell must be true or false, not 1"),
        ("interval_s = true", "settings.toml:1: interval_s must be a number, not true"),
        ('interval_s = "1"', 'settings.toml:1: interval_s must be a number, not "1"'),
        ("interval_s = 0", "settings.toml:1: interval_s must be 0.2 to 3600, not 0"),
        ("interval_s = nan", "settings.toml:1: interval_s must be 0.2 to 3600, not nan"),
        ("temperature_limit_c = 80.5", "settings.toml:1: temperature_limit_c must be a whole number, not 80.5"),
        ("theme = 1", "settings.toml:1: theme must be a text in quotes, not 1"),
        ("bell = true\nbell = ", "settings.toml:2: Invalid value"),
        ("bell = true\nbell = false", "settings.toml:2: Cannot overwrite a value"),
        (
            "bel = 1\n\nasci = 2",
            "settings.toml:1: unknown key 'bel'; did you mean bell?; settings.toml:3: unknown key",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_prices_are_a_table_of_numbers() -> None:
    assert parse("[prices]\nh100-80gb = 2\nt4-16gb = 0.35").prices == {"h100-80gb": 2.0, "t4-16gb": 0.35}
    with pytest.raises(SettingsError, match=r"settings.toml:1: prices must be a table"):
        parse("prices = 3")
    for wrong in ("t4-16gb = -1", 't4-16gb = "cheap"', "t4-16gb = nan"):
        with pytest.raises(SettingsError, match=r"settings.toml:2: prices.*price of one GPU for an hour"):
            parse(f"[prices]\n{wrong}")


def test_who_is_told_is_a_table() -> None:
    text = "[notify]\ncommand = \"sh -c 'cat > x'\"\ntimeout_s = 3\n"
    assert parse(text).notify == Notify("sh -c 'cat > x'", timeout_s=3)
    assert parse(text).notify.argv == ("sh", "-c", "cat > x")
    assert parse('[notify]\ncommand = ["a b", "c"]').notify.argv == ("a b", "c")
    assert parse('[notify]\ncommand = ""').notify == Notify()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("notify = 3", "settings.toml:1: notify must be a table, not 3"),
        ("[notify]\ncommand = 3", "settings.toml:2: notify.command must be a text in quotes or a list of them, not 3"),
        (
            "[notify]\ncommand = [1]",
            "settings.toml:2: notify.command must be a text in quotes or a list of them, not a",
        ),
        ('[notify]\ncommand = "a \'b"', "settings.toml:2: notify.command: No closing quotation"),
        (
            '[notify]\nseverity = "bad"',
            'settings.toml:2: notify.severity must be one of note, warning, critical, not "b',
        ),
        ("[notify]\n\ntimeout_s = 0", "settings.toml:3: notify.timeout_s must be 0.5 to 600, not 0"),
        ("[notify]\ncomand = 1", "settings.toml:2: unknown key 'comand'; did you mean command?"),
    ],
)
def test_a_mistake_in_who_is_told_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert str(caught.value).startswith(said)


def test_a_key_in_a_comment_or_another_keys_name_does_not_mislead() -> None:
    with pytest.raises(SettingsError, match=r"^settings.toml:3: "):
        parse('# bells = 1\ntheme = "bells = 2"\nbells = 3')


def test_the_users_file_need_not_exist_but_a_named_one_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "gpumem-tui" / "settings.toml"
    assert load() == Settings()
    default_path().parent.mkdir()
    default_path().write_text("bell = true")
    assert load().bell
    with pytest.raises(SettingsError, match="nowhere: there is no such file"):
        load(tmp_path / "nowhere")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load(tmp_path)
    (tmp_path / "latin").write_bytes(b"theme = '\xe4'")
    with pytest.raises(SettingsError, match="cannot be read: not UTF-8"):
        load(tmp_path / "latin")
    assert load(Path("/dev/null")) == Settings()
