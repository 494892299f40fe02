"""Files that go with the metrics that `monitor.metrics` serves: a Grafana dashboard and Prometheus' alerting rules.

Both are files next to this module: `grafana.json` as Grafana imports it
(https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/), and
`prometheus_rules.yml` (https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/) with places for
thresholds.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import Template

from gpumem_tui.settings import Settings


def dashboard() -> dict[str, object]:
    """Return the dashboard as JSON. Prometheus is chosen at its top."""
    read: dict[str, object] = json.loads(Path(__file__).with_name("grafana.json").read_text("utf-8"))
    return read


def alerting_rules(settings: Settings) -> str:
    """Return the rules as YAML, with the thresholds of the settings; Prometheus' own ``$labels`` stay."""
    text = Path(__file__).with_name("prometheus_rules.yml").read_text("utf-8")
    return Template(text).safe_substitute(
        near_full=f"{settings.near_full_percent / 100:g}",
        temperature_limit=settings.temperature_limit_c,
        temperature_margin=settings.temperature_margin_c,
    )
