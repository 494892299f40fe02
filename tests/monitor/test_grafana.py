"""The Grafana dashboard asks for what is exported, by labels that it has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from gpumem_tui.monitor.for_prometheus import dashboard
from gpumem_tui.monitor.metrics import metrics
from tests.monitor.training import machine_that_trains

DASHBOARD: Any = dashboard()
PROMTOOL = shutil.which("promtool")
_METRIC = re.compile(r"\bgpumem_\w+")
_SELECTOR = re.compile(r"(gpumem_\w+)\{([^}]*)\}")
_GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")


def exported() -> dict[str, set[str]]:
    """Every series' name, with the labels that it has."""
    found: dict[str, set[str]] = {}
    families: Iterator[Metric] = metrics([machine_that_trains()])
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


QUERIES = [(panel["title"], target) for panel in _panels() for target in panel["targets"]]
CHOICES = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]


@pytest.mark.parametrize("target", [target for _, target in QUERIES], ids=[title for title, _ in QUERIES])
def test_a_panel_asks_for_metrics_and_labels_that_are_exported(target: dict[str, Any]) -> None:
    known, query = exported(), target["expr"]
    names = set(_METRIC.findall(query))
    assert names, query
    assert names <= known.keys()
    for name, selector in _SELECTOR.findall(query):
        assert set(re.findall(r'(\w+)=~?"', selector)) <= known[name]
    labels = set.intersection(*(known[name] for name in names))
    for words in (*_GROUPED.findall(query), *(",".join(_LEGEND.findall(target["legendFormat"])),)):
        assert {word.strip() for word in words.split(",") if word.strip()} <= labels
    assert [query.count(opening) for opening in "({["] == [query.count(closing) for closing in ")}]"]


@pytest.mark.parametrize("choice", CHOICES, ids=[each["name"] for each in CHOICES])
def test_what_can_be_chosen_is_a_label_that_is_exported(choice: dict[str, Any]) -> None:
    known = exported()
    name, label = re.fullmatch(r"label_values\((gpumem_\w+).*, (\w+)\)", choice["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in known[name]


def test_every_variable_that_is_used_can_be_chosen() -> None:
    offered = {each["name"] for each in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__all"}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(\w+)\}?", text)) <= offered


def test_panels_do_not_overlap_and_fill_the_width() -> None:
    cells: set[tuple[int, int]] = set()
    panels = DASHBOARD["panels"]
    for panel in panels:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells
        cells |= own
    assert len(cells) == 24 * (max(y for _, y in cells) + 1)
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed here: Debian's package prometheus has it")
def test_prometheus_itself_takes_every_query(tmp_path: Path) -> None:
    rules = []
    for number, (_, target) in enumerate(QUERIES):
        query = target["expr"].replace("$__rate_interval", "1m")
        rules.append({"record": f"query_{number}", "expr": re.sub(r"\$\w+", ".*", query)})
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([str(PROMTOOL), "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout
